"""Countermoves as an attacker reads them off an observation: the noise is that of what arrived."""

import pytest
import torch

from gradveil.attacks.parts.countermoves import countermove
from gradveil.defences import build_defence
from gradveil.federated.protocol import Protocol
from gradveil.models import create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch


@pytest.mark.parametrize(
    "spec",
    ["dp-sgd:sampling=shuffle,noise=20", "veil:rounds=400", "veil:rounds=400,at=sum,clients=4", "gaussian:std=1.0"],
)
@pytest.mark.parametrize("clients", [1, 4])
def test_the_noise_of_a_mean_is_the_stated_one(spec, clients):
    network = create_model("patches:filters=8", (1, 12, 12), 4, 0)
    rng = torch.Generator().manual_seed(0)
    private = [Batch(torch.rand(3, 1, 12, 12, generator=rng), torch.arange(3), torch.zeros(3) > 0)] * clients
    seen = observe(
        network,
        private,
        threat=ThreatModel.of("num-examples", "defence"),
        num_classes=4,
        defence=build_defence(spec),
        protocol=Protocol(aggregation="secure" if clients > 1 else "none"),
    )
    rest = seen.mean_gradients["head.weight"].flatten()
    quiet = observe(network, private[:1], threat=ThreatModel(), num_classes=4).mean_gradients["head.weight"].flatten()
    assert float(quiet.std()) < 0.2 * float(rest.std())  # the gradient itself hardly counts
    assert countermove(seen).noise["head.weight"] == pytest.approx(float(rest.std()), rel=0.15)
