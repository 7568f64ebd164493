"""Laws that every attack must keep."""

import copy
import inspect
import re
from dataclasses import fields

import pytest
import torch

from gradveil.attacks import AnyAttack, Attack, MembershipAttack, Scene, build_attack
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.models import Normalisation, create_model, normalisation_of
from gradveil.registry import build, components
from gradveil.threat import Knowledge, PublicKnowledge, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch

EVERY = components("attacks")
ATTACKS = [name for name, cls in EVERY.items() if issubclass(cls, Attack)]
MEMBERSHIP = [name for name, cls in EVERY.items() if issubclass(cls, MembershipAttack)]
EVERYTHING = ThreatModel(frozenset(Knowledge))


MODELS = {"linear": "mlp:hidden=20", "spear": "mlp:hidden=20", "cpa": "mlp:hidden=20"}
"""The network for attacks that cannot work on the default one."""


def look(attack, threat):
    rng = torch.Generator().manual_seed(0)
    network = create_model(MODELS.get(attack.name, "lenet-dlg"), (1, 8, 8), 4, 0).eval()
    private = [
        Batch(torch.rand(1, 1, 8, 8, generator=rng), torch.tensor([label]), torch.zeros(1) > 0) for label in (1, 3)
    ]
    scene = Scene((1, 8, 8), 4, private[0])
    alter = (lambda net: attack.alter(net, scene, rng)) if Knowledge.ALTERS_MODEL in threat.knows else None
    return observe(
        network,
        private,
        threat=threat,
        num_classes=4,
        public=PublicKnowledge(
            Batch(torch.rand(24, 1, 8, 8, generator=rng), torch.arange(24) % 4, torch.zeros(24) > 0),
            torch.rand(4, 1, 8, 8),
        ),
        federation=Federation(alter=alter),
    )


def quick(name, iterations):
    """Return the attack with little work, if it has such settings."""
    there = {field.name for field in fields(EVERY[name])}
    less = {"iterations": iterations, "samples": 40}
    settings = ",".join(f"{key}={value}" for key, value in less.items() if key in there)
    return build(Attack, ":".join(filter(None, [name, settings])))


def test_every_attack_is_of_one_kind():
    assert {cls.seeks for cls in EVERY.values()} == {"pictures", "labels", "membership"}
    assert sorted(ATTACKS + MEMBERSHIP) == sorted(EVERY)
    assert all(issubclass(cls, AnyAttack) for cls in EVERY.values())


@pytest.mark.parametrize("name", ATTACKS)
class TestEveryReconstruction:
    def test_refuses_an_unfit_threat_model(self, name):
        attack = build(Attack, name)
        for knowledge in attack.needs:
            seen = look(attack, ThreatModel(EVERYTHING.knows - {knowledge}))
            with pytest.raises(ThreatModelError, match=knowledge.value):
                attack(seen, torch.Generator())

    def test_gives_images_of_the_right_shape_and_range_and_the_same_for_the_same_seed(self, name):
        attack = quick(name, 3)
        seen = look(attack, EVERYTHING)
        before = torch.get_rng_state()
        one, two = (attack(seen, torch.Generator().manual_seed(4)) for _ in range(2))
        assert torch.equal(before, torch.get_rng_state())
        assert one.images.shape == (2, 1, 1, 8, 8)
        assert one.labels.shape == (2, 1)
        assert one.loss.shape == one.converged.shape == (2,)
        if attack.seeks == "pictures":
            assert one.images.min() >= 0
            assert one.images.max() <= 1
        else:
            assert one.images.isnan().all()
        assert torch.equal(one.images.nan_to_num(-1), two.images.nan_to_num(-1))
        assert torch.equal(one.labels, two.labels)
        assert not one.images.requires_grad

    def test_does_not_change_the_observation(self, name):
        attack = quick(name, 2)
        seen = look(attack, EVERYTHING)
        updates = {key: tensor.clone() for key, tensor in seen.updates.items()}
        weights = {key: tensor.clone() for key, tensor in seen.network.state_dict().items()}
        attack(seen, torch.Generator())
        assert all(torch.equal(updates[key], tensor) for key, tensor in seen.updates.items())
        assert all(torch.equal(weights[key], tensor) for key, tensor in seen.network.state_dict().items())
        assert all(parameter.grad is None for parameter in seen.network.parameters())


@pytest.mark.parametrize("name", [name for name in ATTACKS if EVERY[name].ignores])
def test_an_attack_does_not_use_what_it_says_to_ignore(name):
    attack = quick(name, 2)
    less = ThreatModel(EVERYTHING.knows - attack.ignores)
    one, two = (attack(look(attack, threat), torch.Generator().manual_seed(4)) for threat in (EVERYTHING, less))
    assert torch.equal(one.labels, two.labels)


ALTERING = [name for name in ATTACKS if Knowledge.ALTERS_MODEL in EVERY[name].needs]


@pytest.mark.parametrize("name", ALTERING)
class TestEveryAlteration:
    def test_keeps_the_normalisation_accessible_and_the_output_usable(self, name):
        normalisation = Normalisation((0.4,), (0.2,))
        honest = create_model("lenet-dlg", (1, 8, 8), 4, 0, normalisation).eval()
        rng = torch.Generator().manual_seed(0)
        before = torch.get_rng_state()
        altered = build(Attack, name).alter(copy.deepcopy(honest), Scene((1, 8, 8), 4), rng)
        assert torch.equal(before, torch.get_rng_state())
        assert normalisation_of(altered) == normalisation
        assert not altered.training
        images = torch.rand(5, 1, 1, 1, generator=rng) * torch.rand(5, 1, 8, 8, generator=rng)
        with torch.no_grad():
            moved = (altered(images).softmax(1) - honest(images).softmax(1)).abs().max()
        assert 0 < moved < 0.2


class Decided(torch.nn.Module):
    """A network that returns only its decision."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return torch.nn.functional.one_hot(self.network(images).argmax(1), 4).float()


@pytest.fixture
def candidates():
    """Return a network and images that it classifies correctly, or mostly so."""
    rng = torch.Generator().manual_seed(0)
    network = create_model("mlp", (1, 8, 8), 4, 0).eval()
    images = torch.rand(24, 1, 8, 8, generator=rng)
    with torch.no_grad():
        labels = network(images).argmax(1)
    labels[::7] = (labels[::7] + 1) % 4
    return network, Batch(images, labels, torch.zeros(24, dtype=torch.bool))


def score(name, network, batch, seed=4):
    few = ":queries=120" if "queries" in {field.name for field in fields(EVERY[name])} else ""
    attack = build(MembershipAttack, name + few)
    return attack.scores(network, batch, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MEMBERSHIP)
class TestEveryMembershipAttack:
    def test_gives_finite_scores_and_the_same_for_the_same_seed(self, name, candidates):
        before = torch.get_rng_state()
        one, two = (score(name, *candidates) for _ in range(2))
        assert torch.equal(before, torch.get_rng_state())
        assert one.shape == (24,)
        assert one.isfinite().all()
        assert torch.equal(one, two)
        assert not one.requires_grad

    def test_does_not_change_network_and_images(self, name, candidates):
        network, batch = candidates
        weights = {key: tensor.clone() for key, tensor in network.state_dict().items()}
        images, labels = batch.images.clone(), batch.labels.clone()
        score(name, network, batch)
        assert all(torch.equal(weights[key], tensor) for key, tensor in network.state_dict().items())
        assert all(parameter.grad is None for parameter in network.parameters())
        assert torch.equal(images, batch.images)
        assert torch.equal(labels, batch.labels)
        assert not network.training

    def test_uses_nothing_but_the_decisions_of_the_network_if_it_says_so(self, name, candidates):
        network, batch = candidates
        same = torch.equal(score(name, network, batch), score(name, Decided(network), batch))
        assert same is EVERY[name].label_only

    def test_ignores_the_sensitive_marks(self, name, candidates):
        network, batch = candidates
        marked = Batch(batch.images, batch.labels, torch.arange(24) < 12)
        assert torch.equal(score(name, network, batch), score(name, network, marked))

    def test_is_refused_as_an_attack_that_reconstructs_images(self, name):
        with pytest.raises(ConfigError, match=f"must be one that rebuilds images here, got '{name}'.*gradveil audit"):
            build_attack(name)


@pytest.mark.parametrize("name", list(EVERY))
def test_the_docstring_is_complete(name):
    cls = EVERY[name]
    text = inspect.getdoc(cls)
    for part in ("Needs:", "Fails:", "Reference:", "Differs from the paper:"):
        assert part in text, f"{name} lacks {part!r}"
    for field in fields(cls):
        assert re.search(rf"^\s+{field.name}: ", text, re.MULTILINE), f"{name} does not explain {field.name}"
