"""The base of all defences: hooks that return their input, in the order in which the data meets them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.config import TrainSettings
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.parts.accounting import Budget, Releases
from gradveil.defences.parts.reports import Reports
from gradveil.errors import ConfigError, DefenceError
from gradveil.registry import Component
from gradveil.secret_stream import SecretStream
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
    "on_aggregate",
    "early_clients",
    "public",
)
"""The names of all hooks, in the order the data meets them."""


@dataclass(frozen=True)
class Client:
    """A client as its hooks see it. Only what a hook returns can leave the device.

    Attributes:
        id: number of the client, from 0.
        round: number of the round, from 1.
        model: the local network in its current state, including its normalisation; hooks must not change it.
        start: the shared tensors received at the start of the round.
        data: all images of this client, after ``on_data`` (in ``on_data`` itself: before it).
        public: tensors that the server broadcast beside the model, from ``public``.
        state: per-client tensors that survive rounds; a hook may set and delete entries. Saved with mode 0600 in the
            client's private folder, never sent.
        rng: secret random stream of this client and round, for everything that a hook draws.
        aux: public images that every device has, or None.
        folder: the client's own files, for long work that must survive an interruption; None if nothing is kept.
        reports: the numbers that hooks recorded with `report`.
    """

    id: int
    round: int
    model: nn.Module
    start: Tensors
    data: Batch
    public: Tensors
    state: MutableMapping[str, Tensor]
    rng: SecretStream
    aux: Batch | None = None
    folder: PrivateFolder | None = None
    reports: Reports = field(default_factory=Reports)

    def report(self, name: str, value: float, weight: float = 1.0) -> None:
        """Record a number under a name that the defence declares in its ``reports``.

        Repeated values of a round become their weighted mean. The number is private: a simulation writes the mean over
        clients into its rows, a real site sends it only if its owner allows that.
        """
        self.reports.add(name, value, weight)


@dataclass(frozen=True)
class Server:
    """The server as its hooks see it.

    Attributes:
        round: number of the round, from 1.
        model: the global network as broadcast; hooks must not change it.
        public: tensors broadcast beside the model in this round (empty while ``public`` itself runs).
        state: server-side tensors that survive rounds and are part of the checkpoint.
        rng: public random stream of the server and round, on the CPU.
        lr: the clients' learning rate in this round.
    """

    round: int
    model: nn.Module
    public: Tensors
    state: MutableMapping[str, Tensor]
    rng: torch.Generator
    lr: float = 1.0


Rehearse = Callable[["Defence"], tuple[float, float]]
"""Train with a defence on public images; return the accuracy on other public images, and minus the loss."""


@dataclass(frozen=True)
class Defence(Component):
    """Base of all defences: every hook returns its input. A subclass overrides the hooks that it needs.

    A hook returns the type it was given and never edits its input. A defence that cannot protect its input raises
    `gradveil.errors.DefenceError`: then nothing is sent.

    Attributes:
        post_processing: whether its hooks read only the tensors that they replace, so that they keep an earlier
            guarantee of differential privacy.
        takes_own_gradient: whether ``on_gradient`` computes the gradient from the images again and ignores what
            earlier members of a chain did to it.
        uses_aux: whether its hooks can use public images, ``--aux``.
        needs_aux: whether it requires public images.
        aux_labels: whether its hooks read the public images' labels, which then must be classes of the task.
        fewest_images: the number of images that each client needs at least.
        hides_images: whether clients train on other images than their own, so that an attack's guesses need decoding.
        marked_only: whether it protects only images that are marked sensitive.
        adds_noise: whether it adds random noise to what is sent.
        budget_replaces: whether its budget holds for replacing all images of a client by others, not only for adding or
            removing some.
        reports: the numbers that its hooks may record with `Client.report`, each name with one line of help.
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
    adds_noise: ClassVar[bool] = False
    budget_replaces: ClassVar[bool] = False
    reports: ClassVar[Mapping[str, str]] = {}

    def on_model(self, model: nn.Module, rng: SecretStream) -> nn.Module:
        """Edit the architecture. Called once on the server and once per client, each with its own random stream.

        Clients receive the server's values of shared tensors; tensors named by ``private`` keep the values that this
        call gave them on their device.
        """
        return model

    def private(self, name: str) -> bool:
        """Return whether the parameter or buffer of this name never leaves the device."""
        return False

    def on_data(self, data: Batch, client: Client) -> Batch:
        """Replace all images of a client, once, before its first round. The result stays on the device."""
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

    def on_aggregate(self, total: Update, server: Server) -> Update:
        """Replace the weighted sum of a round's updates, which is about to be added to the model.

        The server has nothing else here, so that it works under secure aggregation too. Entries are float64, and the
        number of examples is that of all clients together.
        """
        return total

    def early_clients(self, num_clients: int) -> tuple[int, ...]:
        """Return the clients that train before the others in every round; ``public`` receives their updates."""
        return ()

    def public(self, early: Mapping[int, Update], server: Server) -> Tensors:
        """Return what the server broadcasts beside the model, given early clients' updates after ``on_server``."""
        return {}

    def sends(self, update: Update) -> Update | None:
        """Return an update with the names, shapes and types that a client sends in place of one like ``update``.

        A server checks with it what arrives; values do not matter. None means that it can't be told: a defence that
        overrides ``on_server`` should override this too. Not a hook.
        """
        return None if self.overrides("on_server") else update

    def training(self, settings: TrainSettings) -> TrainSettings:
        """Return the settings with which clients train under this defence, by default those asked for. Not a hook.

        Applied twice, it must return the same as once.
        """
        return settings

    def planned(self, settings: TrainSettings) -> "Defence":
        """Return this defence with what it needs to know of a training, or raise `ConfigError`. Not a hook.

        A defence whose noise depends on the number of rounds or clients learns both here; most return themselves.
        """
        return self

    @property
    def rehearses(self) -> bool:
        """Return whether settings are still to be chosen on public images, by `tuned`."""
        return False

    def tuned(self, rehearse: Rehearse, rounds: int, images: float) -> "Defence":
        """Return this defence with settings chosen by rehearsals on public images, by default itself. Not a hook.

        Args:
            rehearse: trains with a defence on public images and says how well that went.
            rounds: of the training.
            images: the number of private images per public one in a rehearsal.
        """
        return self

    def check(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        """Raise `ConfigError` before training if this network (after ``on_model``) can't be protected. Not a hook.

        ``shape`` is (C, H, W) of the images.
        """

    def check_training(self, network: nn.Module) -> None:
        """Raise `ConfigError` before training if a layer can't be trained under this defence. Not a hook.

        The layers of ``network`` (after ``on_model``) are in the mode in which clients train them.
        """

    def check_images(self, fewest: int, *, aux: bool) -> None:
        """Raise `ConfigError` if the smallest client has too few images, or public images are missing."""
        if fewest < self.fewest_images:
            raise ConfigError(
                f"Defence {self.spec!r} needs clients with {self.fewest_images} images or more, got one with {fewest}. "
                "Give clients more images (in an audit: --images), or let the defence mix fewer."
            )
        if self.needs_aux and not aux:
            raise ConfigError(f"Defence {self.spec!r} needs public images, got none. Give --aux.")

    def require_pixels(self, images: Tensor) -> None:
        """Raise `DefenceError` unless all pixels are in [0, 1]."""
        low, high = (float(images.min()), float(images.max())) if images.numel() else (0.0, 0.0)
        if not (low >= 0 and high <= 1):
            raise DefenceError(
                f"Defence {self.name!r} needs pixels in [0, 1], got {low:.3g} to {high:.3g}. Scale the images."
            )

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return countermoves by name: how an attacker who knows this defence adapts. The strongest is first.

        Not a hook.
        """
        return {}

    @property
    def counts_early(self) -> bool:
        """Return whether the early clients' updates are aggregated with the others."""
        return True

    @property
    def fewest_clients(self) -> int:
        """Return the number of clients without whom the sum of a round's updates must not be opened, or 0."""
        return 0

    @property
    def needs_gradient(self) -> bool:
        """Return whether ``on_gradient`` reads the gradient that it replaces, or only its names and shapes.

        If it does not, the gradient of the whole batch is not computed, and ``on_gradient`` gets zeros.
        """
        return True

    @property
    def draws_own_batch(self) -> bool:
        """Return whether a local step uses other images of the client than those of the batch that it was given."""
        return False

    def budget(self, releases: Releases) -> Budget | None:
        """Return the differential privacy that a training with these releases has, or None."""
        return None

    def certificate(self, network: nn.Module, batch: Batch, rng: SecretStream) -> Tensor | None:
        """Return a lower bound on each image's reconstruction error, (N,), or None.

        The defence's documentation says what is bounded, and when. Errors are Euclidean, of pixels in [0, 1].
        """
        return None

    def overrides(self, hook: str) -> bool:
        """Return whether this defence overrides a hook."""
        return getattr(type(self), hook) is not getattr(Defence, hook)


@dataclass(frozen=True)
class Perturbation(Defence, ABC):
    """Base of defences that change tensors and read nothing else: a subclass implements `perturb`.

    Attributes:
        where: ``update`` perturbs the update, once per round; ``gradient`` the gradient of every local step.
    """

    post_processing: ClassVar[bool] = True
    where: str = "update"

    def __post_init__(self) -> None:
        one_of("where", self.where, ["update", "gradient"])

    @abstractmethod
    def perturb(self, tensors: Tensors, rng: SecretStream) -> dict[str, Tensor]:
        """Return perturbed tensors with the same names, shapes and types."""

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Perturb the gradient if ``where`` is ``gradient``."""
        return self.perturb(gradient, client.rng) if self.where == "gradient" else gradient

    def on_update(self, update: Update, client: Client) -> Update:
        """Perturb the update if ``where`` is ``update``."""
        return replace(update, tensors=self.perturb(update.tensors, client.rng)) if self.where == "update" else update

    def overrides(self, hook: str) -> bool:
        """Return whether a hook is overridden; of the two hooks here, only the one that ``where`` names."""
        return hook == f"on_{self.where}" if hook in ("on_gradient", "on_update") else super().overrides(hook)
