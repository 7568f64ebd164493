"""What a defence is: identity hooks in the order the data meets them. Overriding one is the request for it."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.registry import Component
from gradveil.types import Batch, Tensors, Update

HOOKS = (
    "on_model",
    "private",
    "on_data",
    "on_batch",
    "on_gradient",
    "on_update",
    "on_server",
    "early_clients",
    "public",
)
"""The names of all hooks, in the order the data meets them."""


@dataclass(frozen=True)
class Client:
    """What a hook that runs on the device has at hand. Nothing of it leaves the device but what the hook returns.

    Attributes:
        id: number of the client, from 0.
        round: number of the round, from 1.
        model: the local network as it is now, its normalisation included; hooks read it and leave it unchanged.
        start: the shared tensors as they were received at the start of the round.
        data: all images of this client, as ``on_data`` left them (in ``on_data`` itself: as they came).
        public: what the server broadcast beside the model, from ``public``.
        state: per-client tensors that survive rounds; a hook may set and delete entries. Saved with mode 0600 in the
            client's private folder, never sent.
        rng: random stream of this client and round, on the CPU.
    """

    id: int
    round: int
    model: nn.Module
    start: Tensors
    data: Batch
    public: Tensors
    state: MutableMapping[str, Tensor]
    rng: torch.Generator


@dataclass(frozen=True)
class Server:
    """What a hook that runs on the server has at hand.

    Attributes:
        round: number of the round, from 1.
        model: the global network as it was broadcast; hooks read it and leave it unchanged.
        public: what was broadcast beside the model in this round (empty while ``public`` itself runs).
        state: server-side tensors that survive rounds and are part of the checkpoint.
        rng: random stream of the server and round, on the CPU.
    """

    round: int
    model: nn.Module
    public: Tensors
    state: MutableMapping[str, Tensor]
    rng: torch.Generator


@dataclass(frozen=True)
class Defence(Component):
    """Base of all defences: every hook is the identity. Each returns the type it was given and edits nothing.

    A defence that cannot protect what it was given raises `gradveil.errors.DefenceError`: then nothing is sent.
    """

    kind: ClassVar[str] = "defences"

    def on_model(self, model: nn.Module, rng: torch.Generator) -> nn.Module:
        """Edit the architecture. Called on the server with its stream, and for each client with the client's own.

        The global values of shared tensors overwrite the result's; tensors named by ``private`` keep the value that
        this call gave them on their device.
        """
        return model

    def private(self, name: str) -> bool:
        """Whether the parameter or buffer of this name stays on the device for ever."""
        return False

    def on_data(self, data: Batch, client: Client) -> Batch:
        """Replace all of a client's images, once, before its first round. The result is kept on the device."""
        return data

    def on_batch(self, batch: Batch, client: Client) -> Batch:
        """Replace one batch of local training."""
        return batch

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Replace the gradient of one local step, taken at ``client.model`` on ``batch``."""
        return gradient

    def on_update(self, update: Update, client: Client) -> Update:
        """Replace the update: the last stop on the device. ``client.model`` holds the trained weights."""
        return update

    def on_server(self, update: Update, server: Server) -> Update:
        """Turn what one client sent into an update that can be aggregated (e.g. decompress it)."""
        return update

    def early_clients(self, num_clients: int) -> tuple[int, ...]:
        """Clients that train before the others in every round; ``public`` gets their updates."""
        return ()

    def public(self, early: Mapping[int, Update], server: Server) -> Tensors:
        """What the server broadcasts beside the model, given the early clients' updates (after ``on_server``)."""
        return {}

    def overrides(self, hook: str) -> bool:
        """Whether this defence asks for a hook, i.e. replaces the identity."""
        return getattr(type(self), hook) is not getattr(Defence, hook)
