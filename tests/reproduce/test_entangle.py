"""The figures of the Model Entanglement paper, with attacks and trainings replaced, and some at scale smoke."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gradveil.defences import Defence, build_defence
from gradveil.errors import DivergedError
from gradveil.reproduce import entangle, entangle_attacks, entangle_training, papers, trainings
from gradveil.reproduce.base import Lab, run_experiment
from gradveil.reproduce.entangle_attacks import Trials, attack_case, make_case, membership_means, normalised_mse
from gradveil.reproduce.entangle_training import DEFENCES, Curve, images, measure_rounds, train_curve, training
from tests.reproduce.invented import invented

PAPER = papers()["entangle"]


@pytest.fixture
def no_files(monkeypatch):
    """Replace every data set by random images."""

    def load(spec, root=None):
        return invented(spec, (3, 32, 32) if spec == "cifar10" else (1, 28, 28))

    for module in (entangle, entangle_training, entangle_attacks):
        monkeypatch.setattr(module, "load_dataset", load)


def played(name, out, scale="smoke", data_root=None):
    heard = []
    lab = Lab(out / name, scale, data_root=data_root, workers=0, progress=lambda share, doing: heard.append(share))
    document = run_experiment(PAPER, name, lab)
    assert all(0 <= share <= 1 for share in heard)
    assert json.loads((lab.out / "results.json").read_bytes()) == document
    return document, heard, lab.out


def test_all_figures_of_the_paper_are_there():
    assert list(PAPER.experiments) == ["fig1b", "fig4", "fig5a", "fig5b", "fig5c", "fig6"]


def test_all_four_defences_can_be_built():
    assert [build_defence(spec).name for spec in DEFENCES.values()] == ["none", "entangle", "pogz", "ca-fl"]


# --- trainings --------------------------------------------------------------------------------------------------------


def test_training_at_full_scale_has_the_papers_settings(tmp_path):
    mnist, cifar = (training(Lab(tmp_path, "full"), task) for task in ("mnist", "cifar10"))
    assert (mnist.dataset, mnist.lr, mnist.epochs, mnist.rounds, mnist.batch_size) == ("mnist", 0.01, 10, 50, 256)
    assert (cifar.dataset, cifar.lr, cifar.epochs, cifar.rounds, cifar.batch_size) == ("cifar10", 0.001, 20, 50, 64)
    assert {mnist.clients, cifar.clients} == {10}
    assert {mnist.momentum, cifar.momentum} == {0.0}


@pytest.mark.parametrize(("scale", "kept"), [("smoke", 1000), ("small", 4000), ("full", 5000)])
def test_smaller_scales_train_on_fewer_images_of_all_classes(tmp_path, monkeypatch, scale, kept):
    monkeypatch.setattr(entangle_training, "load_dataset", lambda spec, root: invented(each=500))
    data = images(Lab(tmp_path, scale), "mnist")
    assert len(data.train) == kept
    assert np.bincount(data.train.labels).tolist() == [kept // 10] * 10


def test_accuracy_by_beta_compares_runs_that_differ_only_in_the_defence(tmp_path, monkeypatch, no_files):
    runs = []

    def stub(settings, data, lab, progress):
        runs.append(settings)
        progress(1.0)
        return Curve((0.5, 0.9 if settings.defence == "none" else 0.895))

    monkeypatch.setattr(entangle_training, "train_curve", stub)
    document, heard, out = played("fig4", tmp_path, "small")
    rows = document["rows"]
    assert len(rows) == len(runs) == 14
    assert heard == pytest.approx([number / 14 for number in range(1, 15)])
    assert len({dataclasses.replace(run, defence="none") for run in runs}) == 4  # two data sets, two partitions
    assert [row["defence"] for row in rows[:5]] == ["none", *(f"entangle:beta={b}" for b in (0.3, 0.5, 0.7, 0.89))]
    assert [row["lost_points"] for row in rows[:5]] == [None, 0.5, 0.5, 0.5, 0.5]
    assert [row["defence"] for row in rows if row["paper_lost_points"]] == ["entangle:beta=0.7"]
    assert {row["partition"] for row in rows} == {"dirichlet:alpha=0.5", "label-parts"}
    assert (out / "accuracy.png").stat().st_size > 1000


def test_a_training_that_diverges_has_no_last_accuracy(tmp_path, monkeypatch, no_files):
    def stub(settings, data, lab, progress):
        return Curve((0.5, 0.6, 0.4), "the training diverged" if settings.defence.startswith("pogz") else "")

    monkeypatch.setattr(entangle_training, "train_curve", stub)
    rows = played("fig5a", tmp_path)[0]["rows"]
    assert [row["paper_name"] for row in rows] == ["FedAvg", "ME", "POGZ-FL", "CA-FL"]
    assert [row["accuracy"] for row in rows] == [0.4, 0.4, None, 0.4]
    assert [row["lost_points"] for row in rows] == [None, 0.0, None, 0.0]
    assert [row["swing_points"] for row in rows] == [20.0, 20.0, None, 20.0]
    assert rows[2]["ended"] == "the training diverged"


class Played:
    """A simulation that does not train, but records which defence played which round."""

    diary: list = []  # noqa: RUF012 - cleared by each test

    def __init__(self, settings, **rest):
        self.settings = settings

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        pass

    def step(self, number):
        self.diary.append((number, self.settings.defence))
        return {"seconds": 2.0 if self.settings.defence == "none" else 3.0}, None

    def run(self):
        yield {"accuracy": 0.5}
        raise DivergedError("The model must stay finite.")


def test_a_curve_ends_when_the_training_diverges(tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "Simulation", Played)
    lab, heard = Lab(tmp_path, "smoke"), []
    curve = train_curve(training(lab, "mnist"), invented(), lab, heard.append)
    assert curve == Curve((0.5,), "The model must stay finite.")
    assert curve.last is None
    assert curve.swing is None
    assert heard == [1 / 3]


def test_rounds_are_timed_in_turns_in_a_changing_order(tmp_path, monkeypatch):
    monkeypatch.setattr(entangle_training, "Simulation", Played)
    monkeypatch.setattr(Played, "diary", [])
    seconds = measure_rounds(Lab(tmp_path, "smoke"), invented(), 4)
    rounds = [[defence for number, defence in Played.diary if number == wanted] for wanted in range(1, 5)]
    assert all(sorted(each) == sorted(DEFENCES.values()) for each in rounds)
    assert len({each[0] for each in rounds}) == 4
    assert seconds == {name: [2.0 if name == "FedAvg" else 3.0] * 4 for name in DEFENCES}


def test_measured_times_are_listed_with_the_papers(tmp_path, monkeypatch, no_files):
    monkeypatch.setattr(entangle_training, "Simulation", Played)
    document, heard, out = played("fig5c", tmp_path)
    assert [row["times_fedavg"] for row in document["rows"]] == [1.0, 1.5, 1.5, 1.5]
    assert [row["paper_times_fedavg"] for row in document["rows"]] == [1.0, 1.069, 1.494, 2.966]
    assert heard[-1] == 1
    assert (out / "seconds.png").stat().st_size > 1000


# --- representations --------------------------------------------------------------------------------------------------


def test_the_principal_plane_has_the_largest_variance():
    line = torch.linspace(-1, 1, 50)
    points = torch.stack([torch.full((50,), 7.0), 10 * line, line.square(), 0.1 * (-1.0) ** torch.arange(50)], 1)
    plane, share = entangle.principal_plane(points)
    assert plane[:, 0].abs() == pytest.approx((10 * line).abs().double(), abs=0.05)
    assert 0.99 < share < 1


def test_identical_classes_are_separated_only_by_chance():
    rng = torch.Generator().manual_seed(0)
    first = torch.rand(4000, generator=rng) < 0.5
    points = torch.randn(4000, 2, generator=rng)
    assert entangle.told_apart(points, first) == pytest.approx(0.5, abs=0.05)
    assert entangle.told_apart(points + 6 * first[:, None], first) > 0.99


def test_representations_of_digits(tmp_path, no_files):
    document, _, out = played("fig1b", tmp_path)
    assert [row["features"] for row in document["rows"]] == [784, 84, 84]
    assert all(0 <= row["digits_told_apart"] <= 1 for row in document["rows"])
    assert (out / "representations.png").stat().st_size > 1000


# --- attacks ----------------------------------------------------------------------------------------------------------


def test_the_guards_class_differs_from_all_targets():
    for seed in range(5):
        case = make_case(invented(), "lenet-dlg", 8, seed)
        labels = case.private.labels.tolist()
        assert len(set(labels)) == 8
        assert case.guard.labels.item() not in labels


def test_the_attacker_chooses_by_its_loss_and_the_oracle_by_the_truth(monkeypatch):
    case = make_case(invented(), "lenet-dlg", 2, 0)
    truth, calls = case.private.images, []

    def attack(seen, rng):
        trial = len(calls)
        calls.append(rng.initial_seed())
        loss = torch.tensor([[5.0, 1.0], [0.5, torch.nan], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]])[trial]
        guess = truth[:, None] * 0.8 if trial == 3 else torch.full_like(truth, trial / 10)[:, None]
        return SimpleNamespace(images=guess, loss=loss)

    monkeypatch.setattr(entangle_attacks, "build_attack", lambda spec: attack)
    trials = attack_case(case, Defence(), "gs", False, 0)
    assert len(set(calls)) == 5
    assert trials.chosen[:, 0, 0, 0].tolist() == pytest.approx([0.1, 0.0])
    assert torch.equal(trials.closest, truth * 0.8)


def test_only_the_adaptive_attacker_knows_the_defence(monkeypatch):
    case, known = make_case(invented(), "lenet-dlg", 2, 0), []

    def attack(seen, rng):
        known.append(seen.threat.names)
        return SimpleNamespace(images=case.private.images[:, None], loss=torch.zeros(2))

    monkeypatch.setattr(entangle_attacks, "build_attack", lambda spec: attack)
    for adaptive in (False, True):
        attack_case(case, build_defence("entangle"), "gs", adaptive, 0)
    assert known == [["labels", "num-examples"]] * 5 + [["defence", "labels", "num-examples"]] * 5


def test_pictures_and_errors_under_each_defence(tmp_path, monkeypatch, no_files):
    def stub(case, defence, attack, adaptive, seed):
        truth = case.private.images
        return Trials(truth * 0, truth) if defence.name == "entangle" and not adaptive else Trials(truth, truth)

    monkeypatch.setattr(entangle_attacks, "attack_case", stub)
    document, _, out = played("fig6", tmp_path, "small")
    rows = document["rows"]
    assert len(rows) == 2 * 2 * 7
    assert [row["attacker"] for row in rows[:7]] == ["plain", *["plain", "knows it"] * 3]
    wrong = [row for row in rows if row["mse"]]
    assert {(row["defence"], row["attacker"]) for row in wrong} == {("entangle:beta=0.7", "plain")}
    assert all(row["mse_normalised"] == pytest.approx(16 * row["mse"], rel=1e-3) for row in wrong)
    assert all(row["mse_oracle_of_5"] == 0 for row in rows)
    assert [row["paper_mse"] for row in rows[:3]] == ["< 0.05", "0.9835", None]
    assert not any(row["paper_mse"] for row in rows if row["dataset"] == "cifar10")
    for name in ("mnist-lenet5", "mnist-lenet-dlg", "cifar10-lenet5", "cifar10-lenet-dlg"):
        assert (out / f"pictures-{name}.png").stat().st_size > 1000


def test_normalised_errors_are_errors_after_the_networks_normalisation():
    rng = torch.Generator().manual_seed(0)
    truth, guess = (torch.rand(2, 3, 4, 4, generator=rng) for _ in range(2))
    normalisation = entangle_attacks.Normalisation((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    expected = (normalisation(truth) - normalisation(guess)).square().mean((1, 2, 3))
    assert normalised_mse(truth, guess, normalisation.std) == pytest.approx(expected)


def test_membership_is_averaged_over_the_measured_rounds(tmp_path, monkeypatch, no_files):
    figures = {"auc_loss": 0.6, "accuracy_members": 1.0, "accuracy_non_members": 0.9, "members": 6}

    def stub(settings, attack, **rest):
        yield figures | {"round": 1, "auc": 0.5}
        yield dict.fromkeys(figures) | {"round": 2, "auc": None}
        yield figures | {"round": 3, "auc": 0.7}

    monkeypatch.setattr(entangle_attacks, "infer_membership", stub)
    document, _, out = played("fig5b", tmp_path)
    assert [row["auc"] for row in document["rows"]] == [0.6] * 4
    assert [row["rounds_measured"] for row in document["rows"]] == [2] * 4
    assert [row["paper_auc"] for row in document["rows"]] == [0.5453, 0.5245, 0.5235, 0.5357]
    assert (out / "membership.png").stat().st_size > 1000


def test_the_standard_error_is_that_of_guessing():
    rng = torch.Generator().manual_seed(0)
    scores = torch.rand(4000, 2, 30, generator=rng)
    found = (scores[:, 0, :, None] > scores[:, 1, None, :]).double().mean((1, 2))
    row = {"auc": 0.5, "auc_loss": 0.5, "accuracy_members": 1.0, "accuracy_non_members": 1.0, "members": 30}
    assert membership_means([row])["auc_standard_error"] == pytest.approx(float(found.std()), rel=0.05)
    assert membership_means([])["auc"] is None


@pytest.mark.slow
def test_an_attacker_who_knows_the_defence_reconstructs_better(tmp_path):
    document, heard, out = played("fig6", tmp_path)
    assert heard
    errors = {(row["defence"], row["attacker"]): row["mse"] for row in document["rows"]}
    assert errors["entangle:beta=0.7", "knows it"] < errors["entangle:beta=0.7", "plain"]
    assert (out / "pictures-mnist-lenet-dlg.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig4", "fig5a", "fig5b", "fig5c"])
def test_trainings_at_scale_smoke(tmp_path, name):
    document, heard, _ = played(name, tmp_path)
    assert heard[-1] == 1
    assert len(document["rows"]) == (5 if name == "fig4" else 4)
