"""Tables of the manual that benchmarks generate are those of their result files."""

import importlib
import importlib.util
import json
from pathlib import Path
from statistics import fmean

from gradveil.runs.score import LEARNED_SLACK, SLACK

ROOT = Path(__file__).parents[2]


def generated(benchmark, result, page, function="table"):
    """Return a page, what it must contain, and the benchmark's figures."""
    path = ROOT / "benchmarks" / f"{benchmark}.py"
    spec = importlib.util.spec_from_file_location(benchmark, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    document = json.loads((ROOT / "results" / f"{result}.json").read_text())
    text = (ROOT / "docs" / page).read_text()
    return text, [getattr(module, function)(document), document["command"], document["date"]], document


def test_the_gain_of_learned_priors_in_noise_is_the_measured_one():
    page, wanted, document = generated("noise_priors", "noise-priors", "attacks.md")
    assert [text for text in wanted if text not in page] == []
    psnr = {(row["std"], row["prior"]): row["psnr"] for row in document["figures"]}
    assert psnr[0.1, "denoiser"] > psnr[0.1, "smooth"] + 2  # "wins by far"
    assert abs(psnr[0.5, "denoiser"] - psnr[0.5, "normal"]) < 1  # "no better"


def test_the_bounds_beside_attacks_are_the_measured_ones_and_hold_with_their_slack():
    page, wanted, document = generated("score_bound", "score-bound", "score.md")
    assert [text for text in wanted if text not in page] == []
    for row in (row for part in ("mnist-5k", "pneumoniamnist.npz") for row in document["figures"][part]):
        learned = row["psnr"]["gs, prior=denoiser"]
        others = max(psnr for attack, psnr in row["psnr"].items() if "denoiser" not in attack)
        assert others < row["psnr_cap_covariance"] + SLACK
        assert learned < row["psnr_cap_covariance"] + LEARNED_SLACK
        assert row["psnr_cap_white"] < row["psnr"]["gs"] < row["psnr_cap_covariance"]  # as the page says


def test_the_scores_of_many_defences_are_the_measured_ones():
    page, wanted, _ = generated("score_bound", "score-bound", "score.md", "scores")
    assert [text for text in wanted if text not in page] == []


def test_the_price_of_veil_is_the_measured_one():
    page, wanted, _ = generated("veil", "veil", "defences.md")
    times = generated("veil", "veil", "defences.md", "sentence")[1]
    assert [text for text in (*wanted, *times) if text not in page] == []


def test_what_nvflares_server_saw_is_the_measured_share():
    page, wanted, document = generated("nvflare_simulator", "nvflare", "nvflare.md")
    assert [text for text in wanted if text not in page] == []
    assert all((row["zeros"] > 0.8) == (row["defence"] != "none") for row in document["rows"])


def test_a_sites_own_policy_protects_it_whatever_the_job_says(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page, wanted, document = generated("nvflare_poc", "nvflare-poc", "nvflare.md")
    assert [text for text in wanted if text not in page] == []
    assert all((row["zeros"] > 0.8) == (row["site"] == "site-1") for row in document["rows"])


def test_the_price_of_veil_at_full_size_is_the_measured_one():
    page, wanted, document = generated("veil_targets", "veil-targets", "defences.md")
    gaps = generated("veil_targets", "veil-targets", "defences.md", "gaps")[1]
    assert [text for text in (*wanted, *gaps) if text not in page] == []

    def mean(dataset, mu):
        return fmean(
            row["accuracy"] for row in document["trainings"]
            if row["dataset"] == dataset and row["model"] == "patches" and row["rounds"] == 60
            and row["partition"] == "iid" and row["defence"] == f"veil:mu={mu},at=sum"
        )  # fmt: skip

    assert mean("mnist", 1_000_000) - mean("mnist", 1) <= 0.006
    assert mean("mnist", 1_000_000) - mean("mnist", 3) <= 0.003
    assert mean("cifar10", 1_000_000) - mean("cifar10", 3) <= 0.015


def test_accuracy_against_epsilon_is_the_measured_one():
    page, wanted, document = generated("dp_sgd", "dp-sgd", "defences.md")
    scale = generated("dp_sgd", "dp-sgd", "defences.md", "scale")[1]
    assert [text for text in (*wanted, *scale) if text not in page] == []
    assert all(row["reached_epsilon"] <= row["epsilon"] for row in document["trainings"])


def test_the_gain_of_rehearsing_untransform_is_the_measured_one():
    page, wanted, document = generated("untransform", "untransform", "hiding-images.md")
    assert [text for text in wanted if text not in page] == []
    assert all(sum(row["rehearsed"]) > sum(row["plain"]) for row in document["rows"])  # "gains in every line"


def test_standard_is_as_good_as_settings_by_hand():
    page, wanted, document = generated("standard_against_hand", "standard-against-hand", "attacks.md")
    assert [text for text in wanted if text not in page] == []
    rows = document["rows"]
    assert [row["each"] for row in rows[::2]] == [row["each"] for row in rows[1::2]]  # "the same guesses"


def test_the_time_of_a_round_over_flower_is_the_measured_one():
    page, wanted, document = generated("flower_rounds", "flower-rounds", "flower.md")
    assert [text for text in (*wanted, document["machine"]) if text not in page] == []
    assert all(row["ratio"] < 1.1 for row in document["rows"])  # "less than that of the bare app"


def test_the_speed_beside_a_plain_loop_is_the_measured_one():
    page, wanted, document = generated("never_slower", "never-slower", "performance.md")
    assert [text for text in wanted if text not in page] == []
    measured = [line for line in document["figures"] if "ratio" in line]
    assert max(line["apart"] for line in measured) < 1e-5  # float32
    assert min(line["ratio"] for line in measured if line["model"] != "mlp") > 0.95  # "noise"
    assert min(line["ratio"] for line in measured if line["model"] == "mlp") < 0.95  # "slower than the loop"


def test_what_was_killed_and_searched_over_flower_is_as_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = importlib.import_module("flower_processes")
    document = json.loads((ROOT / "results" / "flower-processes.json").read_text())
    page, figures = (ROOT / "docs" / "flower.md").read_text(), document["figures"]
    wanted = [*(benchmark.table(document, part) for part in figures), *document["commands"].values(), document["date"]]
    assert [text for text in wanted if text not in page] == []
    assert figures["server"]["equals simulation"]  # "bit for bit"
    assert figures["server"]["rounds"] == [1, 2, 3, 4, 5, 6]
    assert all(each["finished"] for each in figures["nodes"]["kills"])
    fuzz = figures["fuzz"]
    assert importlib.import_module("flower_fuzz").fuzz_sentence(fuzz) in page
    used = {way for way, each in fuzz["ways"].items() if each["left out by name"] < each["sent"]}
    assert used <= {"random changes of bytes"}  # "only random changes"
    assert fuzz["server alive"] or fuzz["finished"]
    control, secure = figures["bytes"]["runs"]["single updates"], figures["bytes"]["runs"]["secure sums"]
    assert min(control["traffic"]["updates"], control["memory"][0]["found"]["updates"]) > 0
    found = [secure["traffic"], secure["files"], *(look["found"] for look in secure["memory"])]
    assert not any(count for places in found for count in places.values())
