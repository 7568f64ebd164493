"""What a defence is: identity hooks in the order the data meets them. Overriding one is the request for it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gradveil.defences.countermove import Arrived, Countermove
from gradveil.errors import ConfigError, DefenceError
from gradveil.registry import Component
from gradveil.storage import PrivateFolder
from gradveil.types import Batch, Tensors, Update
from gradveil.validate import one_of

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
        aux: public images that are at hand on every device; None where there are none.
        folder: the client's own files, for long work that must survive an interruption; None where nothing is kept.
    """

    id: int
    round: int
    model: nn.Module
    start: Tensors
    data: Batch
    public: Tensors
    state: MutableMapping[str, Tensor]
    rng: torch.Generator
    aux: Batch | None = None
    folder: PrivateFolder | None = None


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


class Releases(NamedTuple):
    """What one client gives away over a whole training, as far as differential privacy counts it.

    Attributes:
        num_examples: images of the client.
        batch_size: images a step (expected, where they are sampled).
        steps: local steps in all rounds together.
        uses: how often one image can be in a step at most, where batches are not sampled: once an epoch, or with FedSGD
            once a round.
        rounds: how many updates are sent.
        entries: numbers in an update of the model; 0 where that is not told.
    """

    num_examples: int
    batch_size: int
    steps: int
    uses: int
    rounds: int = 1
    entries: int = 0


class Budget(NamedTuple):
    """A guarantee of differential privacy for each of a client's images; the defence says what neighbours are."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Defence(Component):
    """Base of all defences: every hook is the identity. Each returns the type it was given and edits nothing.

    A defence that cannot protect what it was given raises `gradveil.errors.DefenceError`: then nothing is sent.

    Attributes:
        post_processing: whether its hooks read nothing of a client but the tensors that they replace, so that a
            guarantee of differential privacy given before survives them.
        takes_own_gradient: whether ``on_gradient`` starts from the images, whatever earlier members of a chain made of
            the gradient.
        uses_aux: whether its hooks have use for public images, ``--aux``.
        needs_aux: whether it can't do without them.
        fewest_images: that a client must have.
        hides_images: whether clients train on other images than their own, so that any attack's guesses need decoding.
        aux_labels: whether they read those images' labels too, which then must be classes of the task.
        marked_only: whether it protects images that are marked sensitive, and no others.
    """

    kind: ClassVar[str] = "defences"
    post_processing: ClassVar[bool] = False
    takes_own_gradient: ClassVar[bool] = False
    uses_aux: ClassVar[bool] = False
    needs_aux: ClassVar[bool] = False
    aux_labels: ClassVar[bool] = True
    fewest_images: ClassVar[int] = 1
    hides_images: ClassVar[bool] = False
    marked_only: ClassVar[bool] = False

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

    def check(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        """Raise `ConfigError` before any work where this network (after ``on_model``) can't be protected. No hook.

        ``shape`` is (C, H, W) of the images.
        """

    def check_images(self, fewest: int, *, aux: bool) -> None:
        """Raise `ConfigError` where clients with so few images can't be protected, or not without public ones."""
        if fewest < self.fewest_images:
            raise ConfigError(
                f"Defence {self.spec!r} needs clients with {self.fewest_images} images or more, got one with {fewest}. "
                "Give clients more images (those that an audit attacks: --images), or lower what it mixes."
            )
        if self.needs_aux and not aux:
            raise ConfigError(f"Defence {self.spec!r} needs public images, got none. Give --aux.")

    def require_pixels(self, images: Tensor) -> None:
        """Raise `DefenceError` where pixels are not in [0, 1]."""
        low, high = (float(images.min()), float(images.max())) if images.numel() else (0.0, 0.0)
        if not (low >= 0 and high <= 1):
            raise DefenceError(
                f"Defence {self.name!r} needs pixels in [0, 1], got {low:.3g} to {high:.3g}. Scale the images."
            )

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """How an attacker who knows this defence matches, by name; the first is the one to fear most. No hook."""
        return {}

    @property
    def counts_early(self) -> bool:
        """Whether the early clients' updates are aggregated with the others."""
        return True

    def budget(self, releases: Releases) -> Budget | None:
        """The guarantee of differential privacy for a training that releases so much; None where there is none."""
        return None

    def certificate(self, network: nn.Module, batch: Batch, rng: torch.Generator) -> Tensor | None:
        """(N,) a lower bound on the distance of each image from what can be rebuilt of it; None where there is none.

        The defence says what it bounds, and when. Distances are Euclidean, of pixels in [0, 1].
        """
        return None

    def overrides(self, hook: str) -> bool:
        """Whether this defence asks for a hook, i.e. replaces the identity."""
        return getattr(type(self), hook) is not getattr(Defence, hook)


@dataclass(frozen=True)
class Perturbation(Defence, ABC):
    """Base of defences that change tensors without looking at anything else: a subclass has `perturb`.

    Attributes:
        where: ``update`` perturbs what is sent, once a round; ``gradient`` the gradient of every local step.
    """

    post_processing: ClassVar[bool] = True
    where: str = "update"

    def __post_init__(self) -> None:
        one_of("where", self.where, ["update", "gradient"])

    @abstractmethod
    def perturb(self, tensors: Tensors, rng: torch.Generator) -> dict[str, Tensor]:
        """New tensors of the same names, shapes and types; ``rng`` is on the CPU."""

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Perturb every local step's gradient, if asked to."""
        return self.perturb(gradient, client.rng) if self.where == "gradient" else gradient

    def on_update(self, update: Update, client: Client) -> Update:
        """Perturb what is sent, if asked to."""
        return replace(update, tensors=self.perturb(update.tensors, client.rng)) if self.where == "update" else update

    def overrides(self, hook: str) -> bool:
        """Of the two hooks here only that of ``where``."""
        return hook == f"on_{self.where}" if hook in ("on_gradient", "on_update") else super().overrides(hook)
