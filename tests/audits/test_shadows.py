"""Shadow models: what they are trained on, under what, and that attacks with them find members if there is a leak."""

import copy
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import pytest
import torch

from gradveil.attacks import build_any_attack
from gradveil.attacks.lira import Lira
from gradveil.audits import audit, make_audit_settings, shadows
from gradveil.audits.membership import infer_membership
from gradveil.audits.plan import plan
from gradveil.audits.shadow_trainings import TrainingShadows
from gradveil.audits.shadows import RoundShadows, drawn, public_positions
from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.data.auxiliary import image_keys
from gradveil.data.datasets import Split
from gradveil.defences import Defence, build_defence
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError
from gradveil.federated import client
from gradveil.scratch import scratch_in


def doubtful(train=400, test=600, classes=4):
    """Return images of a few classes, of which a third have a random label: those must be learned by heart."""
    rng, count = np.random.default_rng(0), train + test
    means, labels = rng.random((classes, 1, 8, 8)), rng.integers(0, classes, count)
    images = np.clip(means[labels] + 0.15 * rng.standard_normal((count, 1, 8, 8)), 0, 1).astype(np.float32)
    told = np.where(rng.random(count) < 0.3, rng.integers(0, classes, count), labels)
    parts = (Split(images[own], told[own]) for own in (slice(train), slice(train, None)))
    return Dataset("doubtful", *parts, classes, (0.5,), (0.5,))


DOUBTFUL = doubtful()
LEARNED = {"model": "mlp:hidden=200", "clients": 2, "rounds": 1, "epochs": 40, "partition": "iid:images=100"}


def areas(attack, *, adaptive=False, seeds=range(3), **settings):
    """Return the rows of an attack on the same candidates, one per seed."""
    return [
        next(
            infer_membership(
                TrainSettings(**LEARNED | settings, seed=seed),
                build_any_attack(attack),
                dataset=DOUBTFUL,
                adaptive=adaptive,
                apart=True,
            )
        )
        for seed in seeds
    ]


@pytest.fixture(scope="module")
def boundary():
    return areas("boundary:queries=100")


@pytest.mark.parametrize("attack", ["lira", "rmia", "lira:play=training,shadows=4"])
def test_they_find_what_was_learned_by_heart_better_than_boundary(boundary, attack):
    rows = areas(attack)
    assert all(row["auc_low"] > 0.5 and row["auc"] > 0.6 for row in rows)
    assert fmean(row["auc"] for row in rows) > fmean(row["auc"] for row in boundary) + 0.05
    assert fmean(row["tpr_at_1_fpr"] for row in rows) > 2 * fmean(row["tpr_at_1_fpr"] for row in boundary)
    assert [row["client"] for row in rows] == [row["client"] for row in boundary]
    assert [row["auc_loss"] for row in rows] == [row["auc_loss"] for row in boundary]  # the same candidates


@pytest.mark.parametrize("attack", ["lira", "rmia", "lira:play=training,shadows=4"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_under_strong_noise_they_only_guess(attack, adaptive):
    strong = {"model": "mlp:hidden=20", "epochs": 5, "momentum": 0.0, "defence": "dp-sgd:noise=10.0"}
    for row in areas(attack, adaptive=adaptive, **strong):
        assert row["auc_low"] <= 0.5 <= row["auc_high"]


@pytest.mark.parametrize("attack", ["lira", "rmia"])
def test_a_round_of_one_step_on_all_images_is_played_and_veil_leaves_a_guess(attack):
    (row,) = areas(attack, adaptive=True, seeds=[0], model="mlp:hidden=20", defence="veil:mu=0.1")
    assert row["auc_low"] <= 0.5 <= row["auc_high"]


def test_a_round_of_some_images_can_not_be_played():
    with pytest.raises(ConfigError, match="play must be training"):
        areas("lira", seeds=[0], algorithm="fedsgd", batch_size=10)


@pytest.fixture
def world():
    """Return a function that plays the first round of a training: the training, its network and the round."""
    with ExitStack() as stack:

        def play(settings, defence=None):
            training = Simulation(settings, workers=0, dataset=DOUBTFUL, defence=defence)
            simulation = stack.enter_context(training)
            network = copy.deepcopy(simulation.net.module).eval()
            return simulation, network, simulation.step(1)[1]

        yield play


SETTINGS = TrainSettings(
    model="mlp:hidden=20", clients=3, rounds=2, partition="iid:images=40", save_rounds=(1, 2), eval_every=2
)


@pytest.mark.parametrize("play", ["round", "training"])
@pytest.mark.parametrize("aggregation", ["none", "secure"])
def test_they_are_trained_on_public_images_alone(monkeypatch, world, play, aggregation):
    seen, settings = [], replace(SETTINGS, aggregation=aggregation)
    simulation, network, played = world(settings)
    train = client.train_locally

    def watched(net, received, own, *rest):
        seen.append(own.data.images)
        return train(net, received, own, *rest)

    monkeypatch.setattr(client, "train_locally", watched)
    kind = RoundShadows if play == "round" else TrainingShadows
    extra = {} if play == "round" else {"rounds": (1,)}
    attack = Lira(shadows=2, play=play)
    own = kind(attack, settings, DOUBTFUL, simulation.defence, **extra)
    found = [
        [tensor.clone() for tensor in shadow.state_dict().values()]
        for shadow in own.models(simulation, played, network, torch.arange(40) % 4, 40)
    ]
    assert len(found) == 2
    assert any(not torch.equal(*pair) for pair in zip(*found, strict=True))  # two different models
    public, others = public_positions(DOUBTFUL)
    keys = [image_keys(images.numpy()) for images in seen]
    clients = 1 if (play, aggregation) == ("round", "none") else 3
    assert len(keys) == 2 * clients
    assert len(set(np.concatenate(keys[:clients]).tolist())) == sum(map(len, keys[:clients]))  # no image twice
    for some in keys:
        assert len(some) == 40
        assert np.isin(some, image_keys(DOUBTFUL.test.images[public])).all()
        assert not np.isin(some, image_keys(DOUBTFUL.test.images[others])).any()
        assert not np.isin(some, image_keys(DOUBTFUL.train.images)).any()


@dataclass(frozen=True)
class Silent(Defence):
    """A defence that sends nothing."""

    def on_update(self, update, client):
        return update.map(lambda tensor: 0 * tensor)


@pytest.mark.parametrize("known", [False, True])
def test_only_who_knows_the_defence_plays_it(world, known):
    simulation, network, played = world(SETTINGS, Silent())
    own = RoundShadows(Lira(shadows=1), SETTINGS, DOUBTFUL, Silent(), known)
    (shadow,) = own.models(simulation, played, network, torch.arange(40) % 4, 40)
    moved = max(float((shadow.state_dict()[name] - t).abs().max()) for name, t in played.received.items())
    assert (moved == 0) is known


def test_a_shadow_round_is_the_round_of_a_client_with_those_images(monkeypatch, world):
    """Played by hand: one step of gradient descent on all images that were drawn."""
    settings = replace(SETTINGS, batch_size=0, momentum=0.0, lr=0.1)
    simulation, network, played = world(settings)
    drawn_images = []

    def spied(*inputs):
        drawn_images.extend(drawn(*inputs))
        return drawn_images

    monkeypatch.setattr(shadows, "drawn", spied)
    own = RoundShadows(Lira(shadows=1), settings, DOUBTFUL, simulation.defence)
    (shadow,) = own.models(simulation, played, network, torch.arange(40) % 4, 40)
    naive = copy.deepcopy(network)
    naive.load_state_dict({**naive.state_dict(), **played.received})
    (batch,) = drawn_images
    torch.nn.functional.cross_entropy(naive(batch.images), batch.labels).backward()
    for (name, parameter), other in zip(naive.named_parameters(), shadow.parameters(), strict=True):
        assert torch.allclose(parameter - 0.1 * parameter.grad, other, atol=1e-6), name


def test_images_are_drawn_with_the_classes_of_the_candidates():
    split = Split(np.zeros((100, 1, 2, 2), np.float32), np.arange(100) % 4)
    labels = torch.tensor([0, 0, 0, 1])
    (batch,) = drawn(split, labels, 24, 1, torch.Generator().manual_seed(0))
    assert batch.labels.bincount().tolist() == [18, 6]
    one, two = drawn(split, labels, 40, 2, torch.Generator().manual_seed(0))
    assert len(one) == len(two) == 20  # of 60 wanted of class 0, four fifths of 25 are there
    assert (one.labels < 2).all()
    (batch,) = drawn(Split(split.images, split.labels // 3 * 2 + 1), torch.tensor([0, 2]), 30, 1, torch.Generator())
    assert len(batch) == 30  # no class fits, so any image is better than none


@pytest.mark.parametrize("play", ["round", "training"])
def test_a_second_attack_takes_them_from_the_scratch_folder(tmp_path, play):
    settings = replace(SETTINGS, rounds=1, save_rounds=())
    with scratch_in(tmp_path):
        (first,) = infer_membership(settings, Lira(shadows=2, play=play), dataset=DOUBTFUL)
        files = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        assert len(files) == 2
        (again,) = infer_membership(settings, Lira(shadows=2, play=play), dataset=DOUBTFUL)
        list(infer_membership(settings, build_any_attack(f"rmia:shadows=2,play={play}"), dataset=DOUBTFUL))
        assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files
        list(infer_membership(replace(settings, lr=0.2), Lira(shadows=2, play=play), dataset=DOUBTFUL))
        assert len(list(tmp_path.iterdir())) == 4  # another training has others
    assert first | {"seconds": 0} == again | {"seconds": 0}


def test_trainings_that_diverge_are_left_out(world):
    own = TrainingShadows(Lira(shadows=2, play="training"), SETTINGS, DOUBTFUL, Defence(), rounds=(1,))
    simulation, network, played = world(SETTINGS)
    wild = replace(own, settings=replace(SETTINGS, lr=1e30))
    assert list(wild.models(simulation, played, network, torch.arange(40) % 4, 40)) == []


@pytest.mark.parametrize("defence", ["entangle", "precode", "prune:fraction=0.9+gaussian:std=0.01", "ca-fl"])
@pytest.mark.parametrize("play", ["round", "training"])
def test_defences_with_state_layers_and_guards_can_be_played(defence, play):
    settings = replace(SETTINGS, model="lenet-dlg", rounds=1, save_rounds=(), defence=defence)
    for adaptive in (False, True):
        (row,) = infer_membership(settings, Lira(shadows=2, play=play), dataset=DOUBTFUL, adaptive=adaptive)
        assert 0 <= row["auc_low"] <= row["auc"] <= row["auc_high"] <= 1
        assert "2 shadow" in row["why"]


@pytest.mark.parametrize(
    ("attack", "changes", "dataset", "message"),
    [
        ("lira", {}, doubtful(test=30), "needs at least 20 public images here, got 15"),
        ("lira:play=training", {"clients": 30, "partition": "iid"}, doubtful(test=60), "at least 38 public.*got 30"),
        ("rmia", {"algorithm": "fedsgd"}, DOUBTFUL, "play must be training for attack 'rmia'.*rmia:play=training"),
        ("lira", {"defence": "mixup:k=30"}, doubtful(test=60), "can't play defence 'mixup.*24 public images"),
    ],
)
def test_what_cannot_be_played_is_named_before_any_round(attack, changes, dataset, message):
    settings = TrainSettings(**{"model": "logistic", "clients": 2, "partition": "iid:images=100"} | changes)
    found = infer_membership(settings, build_any_attack(attack), dataset=dataset, adaptive=True)
    with pytest.raises(ConfigError, match=message):
        next(found)


def test_an_audit_has_a_row_per_kind_of_attacker(small, tmp_path):
    attacks = "boundary:queries=64,images=8,lira:shadows=2,images=8"
    settings = small(attacks=attacks, defences="prune", protocol="fedavg", adaptive=True, targets=1, images=1)
    cells = [(cell.defence, cell.attack[:4], cell.adaptive) for cell in plan(settings) if cell.kind == "membership"]
    assert cells == [
        ("none", "boun", False), ("none", "lira", False),
        ("prune", "boun", False), ("prune", "lira", False), ("prune", "lira", True),
    ]  # fmt: skip


def test_too_few_public_images_end_an_audit_before_work(gradveil, pictures, tmp_path):
    command = ["audit", "--dataset", pictures, "--protocol", "fedavg", "--rounds", 2, "--clients", 3, "--workers", 0]
    ended = gradveil(*command, "--attacks", "lira", "--out", tmp_path / "run")
    assert ended.code == 2
    assert "Attack 'lira' needs at least 20 public images here, got 10" in ended.err
    ended = gradveil(*command, "--attacks", "lira", "--knows", "labels", "--out", tmp_path / "run")
    assert ended.code == 2
    assert not (tmp_path / "run").exists()


def test_an_adaptive_audit_reports_both_attackers(tmp_path):
    images = (DOUBTFUL.train.images * 255).astype(np.uint8), (DOUBTFUL.test.images * 255).astype(np.uint8)
    np.savez(
        tmp_path / "d.npz",
        x_train=images[0], y_train=DOUBTFUL.train.labels, x_test=images[1], y_test=DOUBTFUL.test.labels,
    )  # fmt: skip
    settings = make_audit_settings(
        {
            "dataset": str(tmp_path / "d.npz"), "model": "mlp:hidden=20", "protocol": "fedavg", "rounds": 2,
            "clients": 3, "partition": "iid:images=40", "attacks": "lira:shadows=2,images=30", "defences": "prune",
            "adaptive": True,
        }
    )  # fmt: skip
    result = audit(settings, tmp_path / "run", workers=0)
    assert result.failed == {}
    rows = [row for row in result.rows if row["kind"] == "membership"]
    assert [(row["defence"], row["adaptive"]) for row in rows] == [("none", False), ("prune", False), ("prune", True)]
    usual = ["labels", "local-steps", "num-examples", "public-data"]
    assert [row["knows"] for row in rows] == [usual, usual, sorted([*usual, "defence"])]
    assert [line["adaptive"] for line in result.membership] == [False, False, True]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Adaptive attackers know the defence and play their shadow models under it" in page
    assert not (tmp_path / "run" / "scratch").exists()


def test_the_played_defence_is_the_named_one():
    own = RoundShadows(Lira(), SETTINGS, DOUBTFUL, build_defence("prune"))
    assert (own.plays, replace(own, known=True).plays) == (Defence(), build_defence("prune"))
