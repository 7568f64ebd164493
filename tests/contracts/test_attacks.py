"""Laws that every attack in the folder keeps."""

import inspect
import re
from dataclasses import fields

import pytest
import torch

from gradveil.attacks import Attack
from gradveil.errors import ThreatModelError
from gradveil.models import create_model
from gradveil.observe import observe
from gradveil.registry import build, components
from gradveil.threat import Knowledge, ThreatModel
from gradveil.types import Batch

ATTACKS = list(components("attacks"))
EVERYTHING = ThreatModel(frozenset(Knowledge))


def look(threat):
    rng = torch.Generator().manual_seed(0)
    network = create_model("lenet-dlg", (1, 8, 8), 4, 0).eval()
    private = [
        Batch(torch.rand(1, 1, 8, 8, generator=rng), torch.tensor([label]), torch.zeros(1) > 0) for label in (1, 3)
    ]
    return observe(
        network, private, threat=threat, num_classes=4, class_averages=torch.rand(4, 1, 8, 8), public_data=private[0]
    )


@pytest.mark.parametrize("name", ATTACKS)
class TestEveryAttack:
    def test_refuses_an_unfit_threat_model(self, name):
        attack = build(Attack, name)
        for knowledge in attack.needs:
            seen = look(ThreatModel(EVERYTHING.knows - {knowledge}))
            with pytest.raises(ThreatModelError, match=knowledge.value):
                attack(seen, torch.Generator())

    def test_gives_images_of_the_right_shape_and_range_and_the_same_for_the_same_seed(self, name):
        attack = build(Attack, f"{name}:iterations=3")
        seen = look(EVERYTHING)
        before = torch.get_rng_state()
        one, two = (attack(seen, torch.Generator().manual_seed(4)) for _ in range(2))
        assert torch.equal(before, torch.get_rng_state())
        assert one.images.shape == (2, 1, 1, 8, 8)
        assert one.labels.shape == (2, 1)
        assert one.loss.shape == one.converged.shape == (2,)
        assert one.images.min() >= 0
        assert one.images.max() <= 1
        assert torch.equal(one.images, two.images)
        assert not one.images.requires_grad

    def test_leaves_the_observation_as_it_was(self, name):
        seen = look(EVERYTHING)
        updates = {key: tensor.clone() for key, tensor in seen.updates.items()}
        weights = {key: tensor.clone() for key, tensor in seen.network.state_dict().items()}
        build(Attack, f"{name}:iterations=2")(seen, torch.Generator())
        assert all(torch.equal(updates[key], tensor) for key, tensor in seen.updates.items())
        assert all(torch.equal(weights[key], tensor) for key, tensor in seen.network.state_dict().items())
        assert all(parameter.grad is None for parameter in seen.network.parameters())

    def test_the_docstring_is_complete(self, name):
        cls = components("attacks")[name]
        text = inspect.getdoc(cls)
        for part in ("Needs:", "Fails:", "Reference:", "Differs from the paper:"):
            assert part in text, f"{name} lacks {part!r}"
        for field in fields(cls):
            assert re.search(rf"^\s+{field.name}: ", text, re.MULTILINE), f"{name} does not explain {field.name}"
