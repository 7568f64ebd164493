import copy
from dataclasses import dataclass

import pytest
import torch

from gradveil.attacks import MembershipAttack
from gradveil.audits import membership
from gradveil.audits.membership import alike, infer_membership, load_local_model
from gradveil.config import TrainSettings
from gradveil.defences import Defence
from gradveil.engines.simulation import Simulation
from gradveil.types import Batch


@dataclass(frozen=True)
class Watched(MembershipAttack):
    """An attack that scores at random and records its inputs."""

    def scores(self, network, batch, rng):
        SHOWN.append((copy.deepcopy(network.state_dict()), batch))
        return torch.rand(len(batch), generator=rng)


SHOWN = []


@pytest.fixture(autouse=True)
def nothing_shown():
    SHOWN.clear()


def batch(*labels):
    images = torch.arange(len(labels)).float().view(-1, 1, 1, 1) / 100
    return Batch(images, torch.tensor(labels), torch.zeros(len(labels), dtype=torch.bool))


@pytest.mark.parametrize(
    ("rounds", "every", "wanted"), [(20, 5, [5, 10, 15, 20]), (4, 5, [4]), (0, 5, []), (3, 2, [2])]
)
def test_every_nth_round_is_measured_or_the_last(rounds, every, wanted):
    assert Watched(every=every).measured_rounds(rounds) == wanted


def test_others_have_the_classes_of_the_members():
    own, rest = batch(*[0] * 10, *[1] * 6, *[2] * 3), batch(*[0] * 4, *[1] * 50, *[3] * 50)
    members, others = alike(own, rest, 100, torch.Generator().manual_seed(0))
    assert sorted(members.labels.tolist()) == sorted(others.labels.tolist()) == [0] * 4 + [1] * 6
    members, others = alike(own, rest, 5, torch.Generator().manual_seed(0))
    assert len(members) <= 5
    assert members.labels.tolist() == others.labels.tolist()
    assert not len(alike(batch(2, 2), rest, 5, torch.Generator())[0])


def test_the_local_model_of_a_single_client_is_the_next_global_one(tiny):
    settings = TrainSettings(**vars(tiny) | {"clients": 1, "save_rounds": (1,)})
    with Simulation(settings, workers=0) as simulation:
        network = copy.deepcopy(simulation.net.module)
        _, played = simulation.step(1)
        load_local_model(network, played, 0)
        for name, tensor in network.state_dict().items():
            assert tensor.allclose(played.model[name], atol=1e-7)


@dataclass(frozen=True)
class Halved(Defence):
    """A defence that sends half of the update, which the server doubles; client 1 is a guard, the bias is private."""

    def on_update(self, update, client):
        return update.map(lambda tensor: tensor / 2)

    def on_server(self, update, server):
        return update.map(lambda tensor: tensor * 2)

    def early_clients(self, num_clients):
        return (1,)

    def private(self, name):
        return name.endswith("bias")


def test_the_server_attacks_what_it_recovered_and_never_the_guard(tiny, monkeypatch):
    def simulation(settings, **more):
        return Simulation(settings, **more, defence=Halved())

    monkeypatch.setattr(membership, "Simulation", simulation)
    settings = TrainSettings(**vars(tiny) | {"rounds": 8, "clients": 2})
    rows = list(infer_membership(settings, Watched(every=1, images=6)))
    assert {row["client"] for row in rows} == {0}
    with simulation(TrainSettings(**vars(settings) | {"save_rounds": (1,)}), workers=0) as plain:
        start = copy.deepcopy(plain.net.module.state_dict())
        _, played = plain.step(1)
    seen = SHOWN[0][0]
    for name, tensor in seen.items():
        if name.endswith("bias"):
            assert torch.equal(tensor, start[name])  # the client's private bias is unknown
        else:
            change = played.sent[0].tensors[name] * 2
            assert change.abs().max() > 0
            assert tensor.allclose(played.received[name] + change, atol=1e-7)


def test_rows_are_complete_and_repeatable_and_the_attack_sees_no_marks(tiny):
    settings = TrainSettings(**vars(tiny) | {"rounds": 4, "sensitive": "0.5"})
    one, two = (list(infer_membership(settings, Watched(every=2, images=12))) for _ in range(2))
    assert [row["round"] for row in one] == [2, 4]
    for row, again in zip(one, two, strict=True):
        assert row.keys() == {*membership.FIGURES, "round", "seconds", "why"}
        assert row | {"seconds": 0} == again | {"seconds": 0}
        assert row["members"] == row["non_members"] == 12
        assert all(0 <= row[key] <= 1 for key in row if key.startswith(("auc", "accuracy", "advantage")))
        assert row["tpr_at_1_fpr"] is None  # twelve non-members cannot resolve a rate of one in a hundred
    shown = SHOWN[0][1]
    assert len(shown) == 24
    assert not shown.sensitive.any()


def test_members_are_the_clients_own_images_and_others_are_test_images(tiny):
    (row,) = infer_membership(TrainSettings(**vars(tiny) | {"rounds": 1}), Watched())
    with Simulation(tiny, workers=0) as simulation:
        own = {image.numpy().tobytes() for image in simulation.data.client(row["client"]).images}
    shown = [image.numpy().tobytes() for image in SHOWN[0][1].images]
    assert row["members"] == len(own) == 20  # at most as many as there are
    mine = [image in own for image in shown]
    assert sum(mine) == 20
    assert mine != sorted(mine, reverse=True)  # in random order


def test_victims_are_the_same_under_every_defence_except_for_guards(tiny):
    victims = []
    for defence in ("none", "entangle:guards=3"):
        settings = TrainSettings(**vars(tiny) | {"rounds": 6, "defence": defence})
        victims.append([row["client"] for row in infer_membership(settings, Watched(every=1, images=4))])
    assert 3 not in victims[1]
    assert all(one == other for one, other in zip(*victims, strict=True) if one != 3)
    assert any(one != 3 for one in victims[0])


def test_a_round_with_only_the_guard_says_so(tiny, monkeypatch):
    monkeypatch.setattr(Halved, "early_clients", lambda self, num_clients: tuple(range(num_clients)))
    monkeypatch.setattr(membership, "Simulation", lambda s, **more: Simulation(s, **more, defence=Halved()))
    (row,) = infer_membership(TrainSettings(**vars(tiny) | {"rounds": 1}), Watched())
    assert row["auc"] is None
    assert row["why"] == "only guards trained in this round"


def test_an_overfitted_model_reveals_its_members(tiny):
    settings = TrainSettings(
        **vars(tiny)
        | {"model": "mlp", "clients": 2, "partition": "iid:images=60", "epochs": 30, "lr": 0.1, "rounds": 2}
    )
    (row,) = infer_membership(settings, Watched(every=2))
    assert row["accuracy_members"] > row["accuracy_non_members"] + 0.1
    assert row["auc_loss"] > 0.65
    assert row["auc_confidence"] > 0.6
