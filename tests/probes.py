"""Small defences, one per hook, which prove that the simulation calls each hook when and where it should.

The command line names them like any defence in a user's file: ``tests/probes.py:Halve``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from gradveil.defences import Defence
from gradveil.types import Batch, Update


@dataclass(frozen=True)
class Scale(Defence):
    """A defence with on_update and state: it multiplies the update, and counts on the device how often it did."""

    factor: float = 0.5

    def on_update(self, update, client):
        client.state["times"] = client.state.get("times", torch.zeros(())) + 1
        return update.map(lambda tensor: tensor * self.factor)


@dataclass(frozen=True)
class Tell(Defence):
    """report: the client's number, once per step, and the number of the round."""

    reports: ClassVar[Mapping[str, str]] = {"tell_id": "number of the client", "tell_round": "number of the round"}

    def on_batch(self, batch, client):
        client.report("tell_id", client.id, weight=len(batch))
        return batch

    def on_update(self, update, client):
        client.report("tell_round", client.round)
        return update


@dataclass(frozen=True)
class EchoState(Defence):
    """A defence with state: every entry of its update is the number of rounds this client has trained."""

    def on_update(self, update, client):
        client.state["times"] = client.state.get("times", torch.zeros(())) + 1
        return update.map(lambda tensor: torch.full_like(tensor, float(client.state["times"])))


@dataclass(frozen=True)
class Constant(Defence):
    """A defence with on_gradient: it sets every entry of the gradient to one."""

    def on_gradient(self, gradient, batch, client):
        assert not any(torch.equal(tensor, torch.ones_like(tensor)) for tensor in gradient.values())
        return {name: torch.ones_like(tensor) for name, tensor in gradient.items()}


@dataclass(frozen=True)
class Blacken(Defence):
    """A defence with on_data: it blackens a client's images once, and counts the calls in its state."""

    def on_data(self, data, client):
        client.state["asked"] = client.state.get("asked", torch.zeros(())) + 1
        return replace(data, images=torch.zeros_like(data.images))

    def on_update(self, update, client):
        assert client.data.images.abs().sum() == 0
        return update.map(lambda tensor: torch.full_like(tensor, float(client.state["asked"])))


@dataclass(frozen=True)
class BlackBatch(Defence):
    """A defence with on_batch: it blackens each batch and makes its labels soft."""

    def on_batch(self, batch, client):
        soft = torch.full((len(batch), 10), 0.1)
        return Batch(torch.zeros_like(batch.images), soft, batch.sensitive)


@dataclass(frozen=True)
class Pack(Defence):
    """A defence with on_update and on_server: it sends all tensors as one, and unpacks them at the server."""

    def on_update(self, update, client):
        packed = torch.cat([tensor.reshape(-1) for tensor in update.tensors.values()])
        return Update({"packed": packed}, update.num_examples, update.buffers)

    def on_server(self, update, server):
        tensors, rest = {}, update.tensors["packed"]
        for name, parameter in server.model.named_parameters():
            tensors[name], rest = rest[: parameter.numel()].view(parameter.shape), rest[parameter.numel() :]
        return replace(update, tensors=tensors)


@dataclass(frozen=True)
class Guard(Defence):
    """A defence with early_clients and public: client 0 trains first; all others send its update."""

    def early_clients(self, num_clients):
        return (0,)

    def public(self, early, server):
        return dict(early[0].tensors)

    def on_update(self, update, client):
        if client.id == 0:
            assert not client.public
            return update
        return replace(update, tensors=dict(client.public))


class Locked(nn.Module):
    """A network behind a private scale for each channel."""

    def __init__(self, body, lock):
        super().__init__()
        self.body, self.lock = body, nn.Parameter(lock)

    def forward(self, images):
        return self.body(images * self.lock.view(-1, 1, 1))


@dataclass(frozen=True)
class Lock(Defence):
    """A defence with on_model and private: it puts a private parameter before the network."""

    def on_model(self, model, rng):
        return Locked(model, 0.5 + rng.uniform((1,)))

    def private(self, name):
        return name == "lock"


@dataclass(frozen=True)
class Refuse(Defence):
    """A defence that raises: an update that cannot be protected is not sent."""

    def on_update(self, update, client):
        from gradveil.errors import DefenceError

        raise DefenceError("refuse must not be asked, got an update.")


@dataclass(frozen=True)
class Crash(Defence):
    """A defence that ends the training process, as the operating system does when memory runs out."""

    def on_update(self, update, client):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Bug(Defence):
    """A defence with a programming error."""

    def on_update(self, update, client):
        return update.no_such_attribute


def factory(shape, num_classes, width="3"):
    """Build a user's own model: a frozen scale, a convolution and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(shape[0], int(width), 3, stride=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes)
    )
