"""gradveil train-generator, and an audit with what it made."""

import json

import pytest

QUICK = ("--generator", "dcgan:latent=4,width=2", "--steps", 2, "--batch-size", 4)


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path / "data"))


def test_trains_and_leaves_weights_settings_and_a_sheet(gradveil, tmp_path):
    out = tmp_path / "digits.safetensors"
    ended = gradveil("train-generator", "--dataset", "mnist-5k", "--out", out, *QUICK, "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["steps"] == 2
    assert sorted(path.name for path in tmp_path.glob("digits*")) == [
        "digits.png", "digits.safetensors", "digits.toml",
    ]  # fmt: skip
    again = gradveil("train-generator", "--config", out.with_suffix(".toml"), "--out", tmp_path / "two.safetensors")
    assert again.code == 0, again.err
    assert (tmp_path / "two.safetensors").read_bytes() == out.read_bytes()


def test_an_audit_refuses_targets_that_the_generator_has_seen(gradveil, tmp_path):
    attack = "ggl:generator={},iterations=1,population=4"
    common = ("audit", "--dataset", "mnist-5k", "--targets", 2, "--rounds", 0, "--workers", 0)
    common += ("--knows", "num-examples,public-data")
    for split in ("train", "test"):
        out = tmp_path / f"{split}.safetensors"
        assert gradveil("train-generator", "--dataset", "mnist-5k", "--split", split, "--out", out, *QUICK).code == 0
        ended = gradveil(*common, "--attacks", attack.format(out), "--out", tmp_path / f"run-{split}")
        if split == "train":
            assert ended.code == 2
            assert "got 2 of 2 that its generator was trained on" in ended.err.replace("\n", " ")
            assert not (tmp_path / "run-train" / "rows.jsonl").exists()
        else:
            assert ended.code == 0, ended.err
            rows = [json.loads(line) for line in (tmp_path / "run-test" / "rows.jsonl").read_text().splitlines()]
            assert len([row for row in rows if row.get("psnr") is not None]) == 2


def test_the_help_shows_no_default_data_set(gradveil):
    """It has none: without --dataset the command is refused."""
    assert "mnist-5k" not in gradveil("train-generator", "--help").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "g.safetensors"), "Add --dataset"),
        (("--out", "g.safetensors", "--dataset", "mnist-5"), "Did you mean 'mnist-5k'"),
        (("--out", "g.pt", "--dataset", "mnist-5k"), "ends in .safetensors"),
        (("--out", "g.safetensors", "--dataset", "mnist-5k", "--steps", "x"), "steps"),
    ],
)
def test_bad_usage(gradveil, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = gradveil("train-generator", *arguments)
    assert ended.code == 2
    assert message in ended.err
