"""No draw of a training round comes from PyTorch's or NumPy's generators, under any defence."""

import contextlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from gradveil.defences import Client, Defence, Server, build_defence
from gradveil.federated.client import Broadcast, Device, Streams, play_client
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.registry import components
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update

FUNCTIONS = ["bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
             "randn_like", "randperm"]  # fmt: skip
METHODS = ["bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal_",
           "random_", "uniform_"]  # fmt: skip
SPECS = [*components("defences"), "soteria:probes=4", "quantise:stochastic=true", "mixup:pool=data", "entangle:noise=1",
         "instahide:pool=public", "ats:crop=2,mirror=true", "dcs2:start=noise,ratio=2,steps=2", "loda:start=noise",
         "gaussian:where=gradient", "laplace:relative=true", "ca-fl:per=update", "mixup+dp-sgd"]  # fmt: skip
SLOW = {"dcs2": "dcs2:steps=2", "loda": "loda:steps=2", "loda:start=noise": "loda:start=noise,steps=2"}
HOW = LocalSettings(epochs=2, batch_size=4, batch_norm="freeze")


class TorchDrewError(Exception):
    """A draw came from a generator that can be computed from its draws."""


@contextlib.contextmanager
def no_torch_draws():
    """Let every draw of PyTorch and of NumPy's global generator raise."""

    def refuse(*args, **options):
        raise TorchDrewError

    with pytest.MonkeyPatch.context() as patch:
        for name in FUNCTIONS:
            patch.setattr(torch, name, refuse)
        for name in METHODS:
            patch.setattr(torch.Tensor, name, refuse)
        patch.setattr(np.random, "default_rng", refuse)
        yield


def network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def images(count=8):
    rng = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (count,), generator=rng)
    return Batch(torch.rand(count, 1, 8, 8, generator=rng), labels, torch.arange(count) % 2 == 0)


def play(defence, monkeypatch):
    """Play one client's round under a defence; only what protects nothing is drawn before."""
    module = defence.on_model(network(), SecretStream(0))
    early = defence.early_clients(4)
    tensors = {name: torch.ones_like(parameter) for name, parameter in module.named_parameters()}
    server = Server(1, module, {}, {}, torch.Generator())
    public = defence.public({number: Update(tensors, 4) for number in early}, server)
    net = FlatModel(module, defence.private)
    received = net.values[net.shared].clone()
    device = Device(images(), max(set(range(4)) - set(early)), aux=images(6))
    streams = replace(Streams.of(0, 0, 1), data=SecretStream(0, "data"))
    monkeypatch.setattr("gradveil.defences.precode.layer_stream", lambda: SecretStream(0))  # its key protects nothing
    if "ca-fl" in defence.spec:  # its projections are public
        defence._sensing(len(received), public)
    with no_torch_draws():
        return play_client(net, device, Broadcast(received, 0.1, public=public), defence, HOW, streams)


@pytest.mark.parametrize("spec", SPECS)
def test_a_round_draws_nothing_from_torch(spec, monkeypatch):
    played = play(build_defence(SLOW.get(spec, spec)), monkeypatch)
    assert all(bool(tensor.isfinite().all()) for tensor in played.update.tensors.values())


def test_keys_and_locks_are_not_from_torch():
    plain = network()
    with no_torch_draws():
        build_defence("fedkl:length=8").on_model(plain, SecretStream(0))


@dataclass(frozen=True)
class Careless(Defence):
    """A defence that draws from PyTorch's generator."""

    def on_update(self, update: Update, client: Client) -> Update:
        return replace(update, tensors={name: t + torch.randn(t.shape) for name, t in update.tensors.items()})


def test_a_careless_defence_is_found(monkeypatch):
    with pytest.raises(TorchDrewError):
        play(Careless(), monkeypatch)
