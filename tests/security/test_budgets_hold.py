"""Stated budgets hold: every look at a client counts, and an image's effect stays within the bound that was assumed."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from torch import nn

from gradveil.audits import make_audit_settings
from gradveil.audits.run import audit
from gradveil.defences import Client, build_defence
from gradveil.defences.dp_sgd import DpSgd
from gradveil.defences.parts.accounting import epsilon
from gradveil.defences.parts.grid import grid_of
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError, DefenceError
from gradveil.federated.client import train_locally
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch


class Centred(nn.Module):
    """A network that subtracts the mean over the batch, without any normalisation layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 3)

    def forward(self, images):
        features = self.first(images.flatten(1))
        return self.last(features - features.mean(0, keepdim=True))


class Plain(Centred):
    def forward(self, images):
        return self.last(self.first(images.flatten(1)).relu())


def batch(count=6, size=1.0):
    rng = torch.Generator().manual_seed(2)
    images = torch.rand(count, 1, 8, 8, generator=rng) * size
    return Batch(images, torch.arange(count) % 3, torch.zeros(count) > 0)


def train(network, data):
    net = FlatModel(copy.deepcopy(network))
    received = net.values[net.shared].clone()
    client = Client(0, 1, net.module, net.shared_tensors(received), data, {}, {}, SecretStream(0))
    return train_locally(net, received, client, DpSgd(), LocalSettings(batch_size=2), 0.1, SecretStream(1))


def test_a_network_that_mixes_images_sends_nothing():
    with pytest.raises(DefenceError, match=r"network's own forward, before layer 'last', mixes the images"):
        train(Centred(), batch())
    assert train(Plain(), batch()).tensors


def test_a_network_that_mixes_images_is_refused_before_any_work(tiny, monkeypatch):
    with pytest.raises(ConfigError, match="mixes the images"):
        DpSgd().check(Centred(), (1, 8, 8))
    with pytest.raises(ConfigError, match="mixes the images"):
        build_defence("dp-sgd+prune").check(Centred(), (1, 8, 8))
    DpSgd().check(Plain(), (1, 8, 8))
    monkeypatch.setattr("gradveil.engines.devices.create_model", lambda *_: Centred28())
    with (
        pytest.raises(ConfigError, match="mixes the images"),
        Simulation(replace(tiny, defence="dp-sgd"), workers=0) as simulation,
    ):
        simulation.run()


class Centred28(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.LazyLinear(10))

    def forward(self, images):
        return super().forward(images - images.mean(0, keepdim=True))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("clip", [1.0, 0.37])
def test_an_image_changes_the_noisy_sum_by_no_more_than_the_clipping_bound(size, clip):
    """With the same noise, the sums with and without an image differ by whole steps, of a norm within the bound."""
    data, defence = batch(5, size), DpSgd(clip=clip, noise=1.0, sampling="shuffle")
    grid = grid_of(clip, bound=clip)
    sums = []
    for some in (data, data[:4]):
        client = Client(0, 1, Plain(), {}, data, {}, {}, SecretStream(0))
        client.state["batch_size"] = torch.tensor(1)  # so that the sum is not divided
        gradient = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in client.model.named_parameters()}
        sums.append(torch.cat([t.flatten() for t in defence.on_gradient(gradient, some, client).values()]))
    steps = (sums[0] - sums[1]) / grid
    assert torch.equal(steps, steps.round())
    assert 0 < int(sum(int(step) ** 2 for step in steps.tolist())) <= (clip / grid) ** 2


def test_every_look_at_a_client_counts(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (80, 8, 8), dtype=np.uint8)
    labels, path = np.arange(80) % 3, tmp_path / "pictures.npz"
    np.savez(path, x_train=images[:60], y_train=labels[:60], x_test=images[60:], y_test=labels[60:])
    few = {"dataset": str(path), "clients": 3, "rounds": 1, "targets": 1, "images": 4, "metrics": "psnr"}
    shown = {}
    for looks in (1, 20):
        settings = make_audit_settings(
            few | {"attacks": "idlg:iterations=1", "defences": "pogz:noise=1,dp-sgd,ca-fl", "looks": looks}
        )
        rows = audit(settings, tmp_path / str(looks), workers=0).rows
        shown[looks] = {r["defence"]: r["epsilon"] for r in rows if r["kind"] == "privacy" and r["defence"] != "none"}
    releases = LocalSettings("fedsgd", batch_size=4).releases(20, rounds=20)  # a client has 20 images
    assert shown[20]["pogz:noise=1"] == pytest.approx(build_defence("pogz:noise=1").budget(releases).epsilon)
    assert shown[20]["pogz:noise=1"] > 5 * shown[1]["pogz:noise=1"]
    assert shown[20]["dp-sgd"] == pytest.approx(build_defence("dp-sgd").budget(releases).epsilon)
    assert shown[20]["ca-fl"] == pytest.approx(20 * shown[1]["ca-fl"])


@pytest.mark.parametrize("noise", [1.0, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 1.0])
def test_no_budget_is_below_that_of_a_tight_accountant(noise, rate):
    """At 48 points in all, neither accountant states less than Google's privacy loss distributions."""
    one = GaussianDpEvent(noise)
    step = one if rate == 1 else PoissonSampledDpEvent(rate, one)
    for steps in (1, 10, 100):
        tight = PLDAccountant().compose(SelfComposedDpEvent(step, steps)).get_epsilon(1e-5)
        assert tight > 0
        for accountant in ("rdp", "prv"):
            assert epsilon(noise, rate, steps, 1e-5, accountant) >= tight
