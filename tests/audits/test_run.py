import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from gradveil.audits import audit
from gradveil.audits.plan import plan
from gradveil.defences import Countermove
from gradveil.defences.mixup import Mixup
from gradveil.errors import ConfigError, RunFolderError
from gradveil.report.headline import headline
from gradveil.report.summary import summarise
from gradveil.threat.observe import observe
from tests.audits.conftest import QUICK

TIMES = ("seconds", "round_seconds", "round_seconds_undefended", "overhead")
PRIVACY = {
    "defence", "attack", "adaptive", "seed", "target", "mse", "psnr", "ssim", "lpips", "converged", "attacker_loss",
    "knows", "seconds", "why", "epsilon", "delta",
}  # fmt: skip
UTILITY = {"kind", "defence", "seed", "accuracy", "accuracy_sensitive", "round_seconds", "overhead", "epsilon", "delta"}


def timeless(rows):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def csv_rows(path):
    with path.open() as file:
        return timeless(csv.DictReader(file))


@pytest.fixture
def whole(small, tmp_path):
    """Run an audit of three defences with an adaptive attacker in this process."""
    settings = small(defences="prune,gaussian:std=0.01", adaptive=True)
    return settings, audit(settings, tmp_path / "whole", workers=0)


def test_rows_are_complete_and_in_order(whole):
    settings, result = whole
    rows = result.rows
    assert result.failed == {}
    privacy = [row for row in rows if row["kind"] == "privacy"]
    assert [(r["defence"], r["adaptive"], r["round"], r["target"]) for r in privacy] == [
        (defence, adaptive, number, target)
        for defence, versions in (("none", 1), ("prune", 2), ("gaussian:std=0.01", 2))
        for adaptive in (False, True)[:versions]
        for number in (1, 2)
        for target in (0, 1)
    ]
    for row in privacy:
        assert row.keys() >= PRIVACY
        assert row["attack"] == QUICK
        assert row["knows"] == sorted(["labels", "num-examples", *(["defence"] if row["adaptive"] else [])])
        assert row["psnr"] == pytest.approx(-10 * torch.tensor(row["mse"]).log10().item(), abs=1e-3)
        assert row["lpips"] is not None or "lpips" in row["why"]
        assert (row["seconds"] > 0, row["failed"], row["label_accuracy"]) == (True, False, 1.0)
    utility = [row for row in rows if row["kind"] == "utility"]
    assert [row["defence"] for row in utility] == list(settings.defences)
    for row in utility:
        assert row.keys() >= UTILITY
        assert 0 <= row["accuracy"] <= 1
        assert row["round_seconds"] > 0
        assert row["overhead"] > 0
    assert utility[0]["overhead"] == 1.0
    files = {path.name for path in result.out.iterdir()}
    assert files >= {"settings.toml", "plan.json", "rows.jsonl", "rows.csv", "truth.safetensors", "report.html"}
    assert [json.loads(line) for line in (result.out / "rows.jsonl").read_text().splitlines()] == rows
    table = csv_rows(result.out / "rows.csv")
    assert [row["psnr"] for row in table] == ["" if row.get("psnr") is None else str(row["psnr"]) for row in rows]
    assert [row["knows"] for row in table] == ["+".join(row.get("knows", [])) for row in rows]
    assert len(list((result.out / "images").glob("*.png"))) == 10


def test_saved_images_are_the_scored_ones(whole):
    settings, result = whole
    truth = load_file(result.out / "truth.safetensors")
    assert truth["images"].shape == (4, 1, 1, 8, 8)
    assert truth["round"].tolist() == [1, 1, 2, 2]
    for cell in plan(settings):
        if cell.kind == "privacy":
            found = load_file(result.out / "cells" / f"{cell.name}.safetensors")
            assert torch.equal(found["iterates"][-1], found["images"])
            assert found["guessed"].all()
            own = truth["images"][truth["round"] == cell.round]
            assert torch.equal(found["truth"], own)
            apart = (own.double() - found["images"].double()).div(255).square().flatten(1).mean(1)
            rows = [row for row in result.rows if row["cell"] == cell.name]
            assert apart.tolist() == pytest.approx([row["mse"] for row in rows], abs=2e-3)


def test_a_defence_hinders_the_attacker_and_knowledge_of_it_helps(whole):
    _, result = whole

    def psnr(defence, adaptive=False):
        return sum(
            row["psnr"]
            for row in result.rows
            if row["kind"] == "privacy" and (row["defence"], row["adaptive"]) == (defence, adaptive)
        )

    assert psnr("none") > psnr("prune")
    assert psnr("prune", adaptive=True) > psnr("prune")


@pytest.mark.slow
def test_workers_and_resumption_do_not_change_a_row(whole, small, tmp_path):
    settings, expected = whole
    out = tmp_path / "resumed"
    found = audit(settings, out, workers=2)
    assert timeless(found.rows) == timeless(expected.rows)
    names = [cell.name for cell in plan(settings)]
    kept = (out / "cells" / f"{names[1]}.json").stat().st_mtime_ns
    for name in names[2::2]:
        (out / "cells" / f"{name}.json").unlink()
    (out / "rows.csv").unlink()
    again = audit(settings, out, workers=2, resume=True)
    assert timeless(again.rows) == timeless(expected.rows)
    assert csv_rows(out / "rows.csv") == csv_rows(expected.out / "rows.csv")
    assert (out / "cells" / f"{names[1]}.json").stat().st_mtime_ns == kept  # finished cells are not repeated


@pytest.mark.slow
def test_kill_9_leaves_no_process_and_loses_no_finished_cell(pictures, tmp_path):
    out = tmp_path / "killed"
    call = [sys.executable, "-m", "gradveil.cli", "audit", "--dataset", str(pictures), "--defences", "prune"]
    call += ["--attacks", QUICK.replace("=60", "=400"), "--targets", "2", "--rounds", "0", "--adaptive", "--json"]
    process = subprocess.Popen([*call, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((out / "cells").glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = {path.name: path.read_bytes() for path in (out / "cells").glob("*.json")}
    assert finished
    ended = subprocess.run(
        [sys.executable, "-m", "gradveil.cli", "audit", "--out", str(out), "--resume", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = json.loads(ended.stdout)["rows"]
    assert all((out / "cells" / name).read_bytes() == content for name, content in finished.items())
    straight = subprocess.run([*call, "--out", str(tmp_path / "b")], capture_output=True, text=True, check=True)
    assert timeless(rows) == timeless(json.loads(straight.stdout)["rows"])
    assert csv_rows(out / "rows.csv") == csv_rows(tmp_path / "b" / "rows.csv")


BROKEN = """
from dataclasses import dataclass
from gradveil.defences import Defence
from gradveil.errors import DefenceError
from pathlib import Path

@dataclass(frozen=True)
class Broken(Defence):
    def on_update(self, update, client):
        if Path(__file__).with_name("mended").exists():
            return update
        raise DefenceError("The update must be mended, got a broken one.")
"""


def test_a_failed_cell_is_recorded_the_others_run_and_resume_retries_it(small, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    settings = small(defences=f"{tmp_path}/broken.py:Broken,prune", rounds=1)
    out = tmp_path / "run"
    result = audit(settings, out, workers=0)
    assert len(result.failed) == 2
    assert all("must be mended" in why for why in result.failed.values())
    bad = [row for row in result.rows if row["failed"]]
    assert [(row["kind"], row.get("target")) for row in bad] == [("utility", None), ("privacy", 0), ("privacy", 1)]
    assert "The training utility-00002, whose updates are attacked" in bad[1]["why"]
    assert all(row["psnr"] is None for row in bad if row["kind"] == "privacy")
    assert all("DefenceError: The update must be mended" in row["why"] for row in bad)
    assert sum(not row["failed"] for row in result.rows) == 6
    (tmp_path / "mended").touch()
    again = audit(settings, out, workers=0, resume=True)
    assert again.failed == {}
    assert [row for row in again.rows if "Broken" not in row["defence"]] == [
        row for row in result.rows if "Broken" not in row["defence"]
    ]


def test_an_unexpected_error_in_a_users_component_fails_only_its_cell(small, tmp_path):
    (tmp_path / "odd.py").write_text(BROKEN.replace('DefenceError("The', 'ZeroDivisionError("The'))
    result = audit(small(defences=f"{tmp_path}/odd.py:Broken", rounds=0), tmp_path / "run", workers=0)
    assert [why.split(": ", 1)[1] for why in result.failed.values()] == [
        "ZeroDivisionError: The update must be mended, got a broken one. (odd.py, line 12)"
    ]
    assert sum(not row["failed"] for row in result.rows) == 2


def test_a_used_folder_another_run_and_changed_settings_are_refused(whole, small, tmp_path):
    settings, result = whole
    with pytest.raises(RunFolderError, match="must be new or empty"):
        audit(settings, result.out, workers=0)
    with pytest.raises(RunFolderError, match=r"must keep its settings, got targets = 3 \(was 2\)"):
        audit(small(defences="prune,gaussian:std=0.01", adaptive=True, targets=3), result.out, workers=0, resume=True)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "settings.toml").write_text('defence = "none"\n')
    with pytest.raises(RunFolderError, match="must hold an audit"):
        audit(settings, tmp_path / "train", workers=0, resume=True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"targets": 61, "rounds": 0}, "at most the 60 training images, got 61"),
        ({"targets": 4}, r"at most the clients of a round that are no guards \(3 in round 1\), got 4. Lower --targets"),
        ({"targets": 3, "defences": "entangle", "model": "mlp"}, r"\(2 in round 1\), got 3"),
        ({"targets": 2, "sampled": 1}, r"\(1 in round 1\), got 2"),
    ],
)
def test_too_many_targets_are_refused_before_anything_is_written(small, tmp_path, change, text):
    with pytest.raises(ConfigError, match=text):
        audit(small(**change), tmp_path / "run", workers=0)
    assert not (tmp_path / "run").exists()


def test_attacked_updates_equal_those_of_observe_in_any_slicing(small, tmp_path, monkeypatch):
    """Each target is its own client, whichever slice it is in."""
    from gradveil.audits import views

    seen = []

    def watched(*args, **kwargs):
        seen.append(observe(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(views, "observe", watched)
    settings = small(defences="gaussian:std=0.1", targets=18, rounds=0, attacks="gs:iterations=1")
    audit(settings, tmp_path / "run", workers=0)
    none, more_none, noisy, more_noisy = (next(iter(each.updates.values())) for each in seen)
    first, second = (noisy - none)[0], (more_noisy - more_none)[0]
    assert first.std().item() == pytest.approx(0.1, rel=0.2)
    assert not torch.equal(first, second)


def test_local_updates_and_more_knowledge(small, tmp_path):
    settings = small(
        protocol="fedavg", images=4, batch_size=2, targets=1, rounds=0, lr=0.01, momentum=0.0,
        knows="num-examples,local-steps,class-averages",
        attacks="gs:iterations=5,start=class-average,sign=none",
    )  # fmt: skip
    result = audit(settings, tmp_path / "run", workers=0)
    assert result.failed == {}
    assert result.rows[0]["knows"] == ["class-averages", "local-steps", "num-examples"]


def test_dp_sgd_states_its_budget_in_every_row(small, tmp_path):
    result = audit(small(defences="dp-sgd:noise=2.0"), tmp_path / "run", workers=0)
    for row in result.rows:
        if row["defence"] == "none":
            assert (row["epsilon"], row["delta"]) == (None, None)
        else:
            assert row["epsilon"] > 0
            assert row["delta"] == 1e-5
    utility, privacy = (next(r for r in result.rows if r["kind"] == k and r["epsilon"]) for k in ("utility", "privacy"))
    assert utility["epsilon"] != privacy["epsilon"]  # the budget of a whole training, and of one step on all images


LETHAL = """
import os
from dataclasses import dataclass
from gradveil.defences import Defence

@dataclass(frozen=True)
class Lethal(Defence):
    def on_update(self, update, client):
        os._exit(3)
"""


@pytest.mark.slow
def test_a_lost_worker_fails_only_its_cell(small, tmp_path):
    (tmp_path / "lethal.py").write_text(LETHAL)
    settings = small(defences=f"{tmp_path}/lethal.py:Lethal,prune", rounds=0)
    result = audit(settings, tmp_path / "run", workers=2)
    assert [why.split(": ", 1)[1] for why in result.failed.values()] == [
        "WorkerError: the worker process was lost, perhaps because memory ran out. Use fewer --workers"
    ]
    assert sum(not row["failed"] for row in result.rows) == 4
    assert {row["defence"] for row in result.rows if row["failed"]} == {f"{tmp_path}/lethal.py:Lethal"}


@pytest.mark.parametrize("content", ['{"a": 1}', '["x"]', '[{"failed": false}]', "[", "[]"])
def test_an_invalid_cell_file_is_computed_again(small, tmp_path, content):
    settings = small(rounds=0, attacks="gs:iterations=2")
    first = audit(settings, tmp_path / "run", workers=0)
    (tmp_path / "run" / "cells" / "privacy-00000.json").write_text(content)
    again = audit(settings, tmp_path / "run", workers=0, resume=True)
    assert timeless(again.rows) == timeless(first.rows)


def test_missing_images_are_computed_again(small, tmp_path):
    settings = small(rounds=0, attacks="gs:iterations=2")
    audit(settings, tmp_path / "run", workers=0)
    pictures = tmp_path / "run" / "cells" / "privacy-00000.safetensors"
    before = pictures.read_bytes()
    pictures.unlink()
    audit(settings, tmp_path / "run", workers=0, resume=True)
    assert pictures.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": "lenet6"}, "Unknown model 'lenet6'"),
        ({"partition": "by-clas"}, "Unknown partition"),
        ({"knows": "labels"}, "needs num-examples; add --knows labels,num-examples"),
        (
            {"attacks": f"{QUICK},start=class-average"},
            "needs class-averages; add --knows class-averages,labels",
        ),
        (
            {"attacks": "idlg:start=public", "knows": "labels,num-examples"},
            r"needs public-data; add --knows labels,num-examples,public-data",
        ),
        (
            {"attacks": "imprint:distribution=empirical", "knows": "num-examples,alters-model"},
            "needs public-data; add --knows alters-model,num-examples,public-data",
        ),
        (
            {"protocol": "fedavg", "batch_size": 2, "knows": "labels,num-examples"},
            "needs local-steps; add --knows labels,local-steps,num-examples",
        ),
        ({"model": "resnet20", "defences": "clip+dp-sgd"}, "needs per-example gradients.*--batch-norm freeze"),
        ({"model": "resnet20", "defences": "dp-sgd", "rounds": 0}, "needs per-example gradients.*--batch-norm freeze"),
        ({"images": 1000, "attacks": "labels"}, r"images must be at most the images of a client \(\d+\), got 1,000"),
        ({"defences": "mixup", "images": 3}, "needs clients with 4 images or more, got one with 3"),
        ({"defences": "mixup:k=5", "images": 6, "partition": "iid:images=4"}, "5 images or more, got one with 4"),
        ({"defences": "clip+loda"}, "needs public images, got none"),
        ({"weights": "no-such-file"}, "No such file or directory: 'no-such-file'"),
    ],
)
def test_errors_that_would_fail_every_cell_are_found_before_any_work(small, tmp_path, change, text):
    with pytest.raises(ConfigError, match=text):
        audit(small(**change), tmp_path / "run", workers=0)
    assert not (tmp_path / "run").exists()


def test_a_network_that_a_defence_breaks_is_found_before_any_work(small, tmp_path):
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "class Own(nn.Module):\n"
        "    def __init__(self, shape, num_classes):\n"
        "        super().__init__()\n"
        "        self.conv = nn.Conv2d(shape[0], num_classes, shape[1:])\n"
        "    def forward(self, images):\n"
        "        return nn.functional.conv2d(images, self.conv.weight, self.conv.bias).flatten(1)\n"
    )
    with pytest.raises(ConfigError, match=r"must take images of shape .*no attribute 'weight'"):
        audit(small(model=f"{tmp_path / 'own.py'}:Own", defences="fedkl:length=8"), tmp_path / "run", workers=0)
    assert not (tmp_path / "run").exists()


def test_lpips_is_measured_with_the_weights_of_the_data_root(small, tmp_path, real_data):
    result = audit(small(rounds=0, attacks="gs:iterations=2"), tmp_path / "run", workers=0, data_root=real_data)
    assert all(row["lpips"] > 0 and not row["why"] for row in result.rows)


def test_rows_contain_the_certificate(small, tmp_path):
    result = audit(small(defences="soteria:prune=0.5", rounds=0), tmp_path / "run", workers=0)
    bounds = {row["defence"]: row["certificate"] for row in result.rows}
    assert bounds["none"] is None
    assert bounds["soteria:prune=0.5"] > 0


def test_rows_of_an_earlier_version_are_not_computed_again(small, tmp_path):
    settings, folder = small(rounds=0), tmp_path / "run"
    audit(settings, folder, workers=0)
    later = {column.key for column in settings.schema.of("privacy") if column.later}
    assert later >= {"countermove", "guessed", "tripwire", "not_decoded"}
    for path in (folder / "cells").glob("*.json"):
        rows = json.loads(path.read_bytes())
        old = [{k: v for k, v in row.items() if k not in later} | {"seconds": -1} for row in rows]
        path.write_text(json.dumps(old))
    rows = audit(settings, folder, workers=0, resume=True).rows
    assert [row["seconds"] for row in rows] == [-1] * len(rows)
    assert all(row[key] is None for row in rows for key in later)


@pytest.mark.parametrize(
    ("defence", "attack", "knows", "answer"),
    [
        ("prune:fraction=0.5", QUICK, "labels,num-examples", "surviving"),
        ("prune:fraction=0.5", f"{QUICK},adapt=again", "labels,num-examples", "again"),
        ("prune:fraction=0.5", f"{QUICK},adapt=none", "labels,num-examples", None),
        ("ats", "encodings", "num-examples,encodings,public-data", "untransform"),
        ("ats", QUICK, "labels,num-examples", "untransform"),
    ],
)
def test_rows_name_the_attackers_countermove(small, tmp_path, defence, attack, knows, answer):
    settings = small(defences=defence, attacks=attack, knows=knows, adaptive=True, rounds=0)
    result = audit(settings, tmp_path / "run", workers=0)
    found = {(row["defence"], row["adaptive"]): row["countermove"] for row in result.rows}
    assert found.pop((defence, True)) == answer
    assert set(found.values()) == {None}


def test_only_attackers_who_know_the_defence_are_granted_secrets(small, tmp_path):
    how = {"defences": "fedkl", "model": "lenet-dlg", "knows": "labels,num-examples,key", "rounds": 0}
    with pytest.raises(ConfigError, match=r"must not name key without --adaptive.*Add --adaptive"):
        audit(small(**how), tmp_path / "plain", workers=0)
    rows = audit(small(**how, adaptive=True), tmp_path / "run", workers=0).rows
    assert {(row["adaptive"], "key" in row["knows"]) for row in rows} == {(False, False), (True, True)}


def test_images_without_a_guess_are_not_recognised():
    row = {"kind": "privacy", "defence": "none", "attack": "imprint", "seed": 0, "psnr": 60.0, "ssim": 0.9}
    counts = [summarise([row | {"guessed": share}])[0]["recognisable"] for share in (1.0, 0.6, 0.5, None)]
    assert counts == [1, 1, 0, 1]


def test_an_attack_that_guesses_no_labels_has_no_share_of_them(small, tmp_path):
    attacks = f"{QUICK},imprint:bins=8"
    settings = small(attacks=attacks, knows="labels,num-examples,alters-model", rounds=0)
    result = audit(settings, tmp_path / "run", workers=0)
    assert [row["label_accuracy"] for row in result.rows] == [1.0, 1.0, None, None]
    assert [line["label_accuracy"] for line in summarise(result.rows)] == [1.0, None]


def test_rows_say_whether_the_client_would_have_noticed_an_altered_model(small, tmp_path):
    settings = small(
        attacks=f"{QUICK},imprint:bins=8,trap-weights:rows=32", knows="labels,num-examples,alters-model", rounds=0
    )
    result = audit(settings, tmp_path / "run", workers=0)
    found = {row["attack"].partition(":")[0]: row["tripwire"] for row in result.rows}
    assert found["gs"] is None
    assert "parallel-rows in inserted.rows (imprint)" in found["imprint"]
    assert "balanced-rows in inserted.rows (trap-weights)" in found["trap-weights"]
    assert not any("shift" in text for texts in found.values() for text in texts or [])
    altered = [row for row in result.rows if row["tripwire"] is not None]
    assert f"warned of the altered model before {len(altered)} of {len(altered)} updates" in headline(result.rows)


@pytest.mark.parametrize("scores", ["example", "batch"])
def test_a_target_is_certified_by_what_was_pruned_of_its_own_batch(small, tmp_path, scores):
    spec = f"soteria:prune=0.5,scores={scores}"
    runs = [audit(small(defences=spec, rounds=0, targets=n), tmp_path / str(n), workers=0).rows for n in (3, 1)]
    together, alone = (next(row for row in rows if row["defence"] == spec and row["target"] == 0) for rows in runs)
    assert together["certificate"] == pytest.approx(alone["certificate"], rel=1e-3)


def test_many_looks_at_a_client_are_decoded_by_an_attacker_who_knows_the_defence(small, tmp_path, monkeypatch):
    quick = {"unmix": Countermove(decode=("unmix:train=60,width=8,restarts=4",))}
    monkeypatch.setattr(Mixup, "adaptive", lambda self, arrived: quick)
    settings = small(
        defences="mixup:k=2", attacks="encodings", knows="num-examples,encodings,public-data", images=4, looks=40,
        targets=1, adaptive=True, rounds=0, dataset="mnist-5k",
    )  # fmt: skip
    rows = audit(settings, tmp_path / "looks", workers=0).rows
    plain, known = (next(r for r in rows if r["defence"] == "mixup:k=2" and r["adaptive"] is a) for a in (False, True))
    assert known["psnr"] > plain["psnr"] + 3
    assert "not decoded" not in known["why"]
