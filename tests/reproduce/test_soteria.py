"""The experiments of the Soteria paper at scale smoke, on real data."""

import json

import pytest

from gradveil.reproduce import papers, soteria
from gradveil.reproduce.base import Lab, run_experiment

PAPER = papers()["soteria"]


def smoke(name, out, data_root=None):
    heard = []
    lab = Lab(out / name, "smoke", data_root=data_root, workers=0, progress=lambda share, doing: heard.append(share))
    document = run_experiment(PAPER, name, lab)
    assert heard
    assert all(0 <= share <= 1 for share in heard)
    assert json.loads((lab.out / "results.json").read_bytes()) == document
    return document["rows"], lab.out


def test_all_tables_and_figures_of_the_paper_are_there():
    assert list(PAPER.experiments) == ["1", "fig3", "fig5", "fig6", "fig7"]


@pytest.mark.slow
def test_convergence(tmp_path):
    rows, out = smoke("fig7", tmp_path)
    assert [row["defence"] for row in rows] == ["none", "soteria:count=50"]
    for row in rows:
        assert row["optimum"] < row["loss_last_round"] < row["loss_first_round"]
        assert 0 < row["gap"] < row["bound_on_gap"]
    assert (out / "convergence.png").stat().st_size > 1000


@pytest.mark.slow
def test_representations_match_the_paper_if_clients_have_few_classes(tmp_path, real_data):
    rows, _ = smoke("1", tmp_path, real_data)
    assert rows[0]["training"] == "E=1, B=32"
    first = [float(value) for value in rows[0]["errors"].split(" / ")]
    assert all(abs(ours - paper) < 0.1 for ours, paper in zip(first, (0.98, 0.99, 0.99), strict=True))
    iid = [float(value) for value in rows[-1]["errors"].split(" / ")]
    assert sum(iid) < sum(first) - 1


@pytest.mark.slow
def test_attacks_on_parts_of_the_gradient(tmp_path, real_data):
    rows, out = smoke("fig3", tmp_path, real_data)
    assert [row["network"] for row in rows] == ["lenet-dlg:convs=4"] * 4 + ["lenet-dlg"] * 4
    assert all(row["mse"] > 0 for row in rows)
    assert len([*out.glob("audit-cifar10-*/report.html")]) == 2


@pytest.mark.slow
def test_privacy_against_accuracy(tmp_path):
    rows, out = smoke("fig5", tmp_path)
    families = {row["defence"].split(":")[0] for row in rows}
    assert families == {"none", "soteria", "prune", "gaussian", "laplace"}
    assert {row["adaptive"] for row in rows if row["defence"] != "none"} == {False, True}
    assert all(row["mse"] > 0 and 0 < row["accuracy"] < 1 for row in rows)
    noisy = [row["defence"] for row in rows if row["defence"].startswith(("gaussian", "laplace"))]
    assert all("where=gradient" in spec for spec in noisy)  # the same quantity in attack and training
    assert (out / "tradeoff-mnist-5k.png").exists()


@pytest.mark.slow
def test_the_same_rates(tmp_path, real_data):
    rows, _ = smoke("fig6", tmp_path, real_data)
    assert {row["defence"] for row in rows} == {"none", "soteria:prune=0.5", "prune:fraction=0.5"}
    assert all(row["recognisable"].endswith(" of 1") for row in rows)


@pytest.mark.parametrize(("dataset", "images"), [("mnist", 54_000), ("cifar10", 19_250)])
def test_the_partition_of_full_scale_fits_the_images(tmp_path, dataset, images):
    """A class has a tenth of the images; each is dealt to 20 of 100 clients with two classes each."""
    assert 20 * soteria._per_class(Lab(tmp_path, "full"), dataset) <= images / 10


def test_accuracy_is_none_if_the_rounds_are_too_few_to_learn(tmp_path):
    small = Lab(tmp_path, "small")
    assert soteria._accuracies(small, "cifar10", ["none", "prune:fraction=0.1"]) == {
        "none": None,
        "prune:fraction=0.1": None,
    }
    assert "none on CIFAR-10" in soteria._notes_5(small)[0]
