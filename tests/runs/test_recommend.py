"""A recommendation keeps the wish by proof, costs least, and is confirmed with another seed."""

import json
from dataclasses import replace

import pytest

from gradveil.config import make_train_settings, read_settings
from gradveil.defences.parts.gaussian_dp import epsilon_of, identification_bound
from gradveil.errors import ConfigError
from gradveil.report.recommendation import headline
from gradveil.runs import recommend as module
from gradveil.runs.recommend import DELTA, RecommendSettings, candidates, recommend

SMALL = RecommendSettings(model="logistic", clients=2, partition="iid:images=40", rounds=1, max_loss=100)


@pytest.fixture
def accuracies(monkeypatch):
    """Let trainings end at once, with an accuracy by model and the budget that was planned; return what was trained."""
    played = []

    def play(training, folder, *, progress, **_):
        played.append((folder.name, training))
        shares = {"logistic": 0.9, "patches": 0.85 if "at=sum" not in training.defence else 0.88}
        accuracy = shares[training.model] - (0.3 if "dp-sgd" in training.defence else 0)
        progress(training.rounds, None, "")
        mu = float(training.defence.split("mu=")[1].split(",")[0]) if "veil" in training.defence else None
        row = {"accuracy": accuracy, "mu": mu, "epsilon": epsilon_of(mu or 0.5, DELTA)}
        return type("Result", (), {"rows": [row]})

    monkeypatch.setattr(module, "train", play)
    return played


@pytest.mark.parametrize(("wish", "bound"), [({"identified": 0.05}, 0.05), ({"identified": 0.3}, 0.3)])
def test_mu_is_the_largest_that_keeps_the_wish_for_images(wish, bound):
    mu = replace(SMALL, **wish).mu
    assert identification_bound(mu) <= bound < identification_bound(mu + 0.002)


def test_mu_is_the_largest_that_keeps_the_wish_for_membership():
    mu = replace(SMALL, protect="membership", epsilon=5).mu
    assert epsilon_of(mu, DELTA) <= 5 < epsilon_of(mu + 0.002, DELTA)


def test_a_malicious_server_gets_no_shared_noise():
    for server, there in (("honest", True), ("malicious", False)):
        shared = next(c for c in candidates(replace(SMALL, server=server), [40, 40]) if "shared" in c.name)
        assert (shared.training is not None) == there
        assert bool(shared.why_not) != there


def test_whole_clients_are_hidden_by_veil_alone():
    some = candidates(replace(SMALL, protect="client"), [40, 40])
    assert all("unit=client" in c.training.defence for c in some if c.training)
    assert "not clients" in some[-1].why_not


def test_the_least_loss_is_recommended_and_checked_with_another_seed(accuracies, tmp_path):
    found = recommend(SMALL, tmp_path / "r")
    assert found.chosen == "veil on patches, noise shared in secure sums"
    assert found.confirmed
    assert {training.seed for name, training in accuracies if name.startswith("check")} == {1}
    chosen = make_train_settings(read_settings(tmp_path / "r" / "recommended.toml"))
    assert chosen == dict(accuracies)["1"]
    page = (tmp_path / "r" / "report.html").read_text()
    assert headline(json.loads((tmp_path / "r" / "recommendation.json").read_text())) in page


def test_if_nothing_keeps_the_wish_the_nearest_two_are_shown(accuracies, tmp_path):
    found = recommend(replace(SMALL, max_loss=0.5), tmp_path / "r")
    assert (found.chosen, found.check) == ("", None)
    assert [line["loss"] for line in found.nearest] == pytest.approx([2.0, 5.0])
    assert "Nothing" in (tmp_path / "r" / "report.html").read_text()
    assert not (tmp_path / "r" / "recommended.toml").exists()


def test_another_wish_needs_another_folder(accuracies, tmp_path):
    recommend(SMALL, tmp_path / "r")
    recommend(SMALL, tmp_path / "r")
    with pytest.raises(ConfigError, match="another one"):
        recommend(replace(SMALL, max_loss=3), tmp_path / "r")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="new or empty"):
        recommend(SMALL, tmp_path / "other")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"max_loss": -1}, "max_loss must be"),
        ({"identified": 0.0005}, "identified must be"),
        ({"protect": "client", "clients": 1}, "clients must be at least 2"),
        ({"server": "nice"}, "Unknown server"),
        ({"epsilon": 0}, "epsilon must be"),
    ],
)
def test_wishes_that_contradict_themselves_are_refused(wrong, text):
    with pytest.raises(ConfigError, match=text):
        RecommendSettings(**wrong)


@pytest.mark.slow
def test_it_runs_as_it_is_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HEAD_ROUNDS", 2)
    found = recommend(SMALL, tmp_path / "r", workers=0)
    assert found.chosen
    assert all(line["mu"] <= SMALL.mu * 1.001 for line in found.lines if line["mu"])
    assert recommend(SMALL, tmp_path / "r", workers=0).lines == found.lines
