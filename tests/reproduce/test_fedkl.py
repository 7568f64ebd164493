"""The tables of the FedKL paper at scale smoke, on the digits that come with the package."""

import json
import math

import pytest
import torch

from gradveil.reproduce import papers
from gradveil.reproduce.base import Lab, run_experiment
from gradveil.reproduce.fedkl_attacks import Attacked, figures_of

PAPER = papers()["fedkl"]


def smoke(name, out):
    heard = []
    lab = Lab(out / name, "smoke", workers=0, progress=lambda share, doing: heard.append(share))
    document = run_experiment(PAPER, name, lab)
    assert heard
    assert all(0 <= share <= 1 for share in heard)
    assert json.loads((lab.out / "results.json").read_bytes()) == document
    return document["rows"], lab.out


def test_all_tables_are_there():
    assert list(PAPER.experiments) == ["1", "2", "3", "6", "7", "time"]


def test_the_papers_metrics_have_their_true_names():
    truth = torch.zeros(2, 1, 16, 16)
    found = figures_of(Attacked(truth, truth + 0.2, 0), None)
    assert found["rmse_255"] == pytest.approx(51, abs=1e-4)
    assert found["psnr"] == pytest.approx(-20 * math.log10(0.2), abs=1e-4)
    assert found["psnr_from_rmse"] == pytest.approx(10 * math.log10(255**2 / 51), abs=1e-4)


def test_raw_lpips_is_of_pixels_from_0_to_255(real_data):
    rng = torch.Generator().manual_seed(0)
    pair = Attacked(*(torch.rand(2, 3, 32, 32, generator=rng) for _ in range(2)), 0)
    found = figures_of(pair, real_data)
    assert found["lpips"] is not None
    assert abs(found["lpips_on_0_255"] - found["lpips"]) > 0.01


@pytest.mark.slow
def test_accuracy(tmp_path):
    rows, _ = smoke("1", tmp_path)
    assert [(row["training"], row["defence"]) for row in rows] == [
        ("centralised", "none"), ("centralised", "fedkl:lock=common,scale=paper"),
        ("federated", "none"), ("federated", "fedkl:lock=common,scale=paper"), ("federated", "fedkl:scale=paper"),
    ]  # fmt: skip
    assert [row["paper"] for row in rows] == [98.09, 98.07, 98.14, 97.45, None]
    assert all(10 < row["accuracy"] <= row["best_round"] <= 100 for row in rows if row["training"] == "centralised")


@pytest.mark.slow
def test_curves(tmp_path):
    rows, out = smoke("2", tmp_path)
    assert len(rows) == 2
    assert (out / "curves.png").stat().st_size > 1000


def test_keys(tmp_path):
    rows, _ = smoke("3", tmp_path)
    keys = [row["key"] for row in rows]
    assert keys == 2 * [
        "client 0", "client 1", "client 2", "average", "another's key", "random key, own lock",
        "random key, server's first lock", "random",
    ]  # fmt: skip
    assert [row["defence"] for row in rows[::8]] == ["fedkl:lock=common,scale=paper", "fedkl:scale=paper"]
    assert [row["paper"] for row in rows[::8]] == [97.88, None]
    assert rows[-1]["gap"] == rows[7]["gap"] == 0
    locks = 2 * 6 * 1025
    assert rows[0]["lock_proportion"] == f"{100 * locks / (61706 + locks):.2f} %"


@pytest.mark.slow
def test_attacks(tmp_path):
    rows, out = smoke("6", tmp_path)
    assert {row["defence"] for row in rows} >= {"none", "FedKL", "FedKL, scales searched"}
    assert {row["attack"].split(":")[0] for row in rows} >= {"dlg", "gs"}
    assert (out / "pictures-mnist-5k.png").stat().st_size > 1000


def test_attacks_by_what_the_client_shares(tmp_path):
    rows, out = smoke("7", tmp_path)
    figures = {row["shared"]: row["psnr"] for row in rows if row["attack"].startswith("gs")}
    assert next(iter(figures)) == "nothing, scales at random"
    assert figures["key"] == figures["both"] == pytest.approx(figures["lock's gradient"], abs=0.5)
    assert figures["key"] != figures["nothing, scales at random"]
    assert (out / "shared-mnist-5k-gs.png").stat().st_size > 1000


PLAIN_ONLY = ["FedAvg, BatchNorm", "FedKL, no normalisation"]


@pytest.mark.slow
def test_times(tmp_path):
    rows, _ = smoke("time", tmp_path)
    assert [row["training"] for row in rows] == ["FedAvg", "FedKL", *PLAIN_ONLY]
    assert rows[0]["times_fedavg"] == 1
