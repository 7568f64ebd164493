"""The device side of a simulation: many clients take turns on one network in one process."""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.config import TrainSettings
from gradveil.data.federated import FederatedData
from gradveil.defences.base import Client, Defence
from gradveil.engines.feature_store import FeatureStore
from gradveil.engines.tripwire import guard
from gradveil.errors import ConfigError, RunFolderError
from gradveil.federated.client import Broadcast, Device, Played, Score, Streams, batch_positions, play_client, score
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.federated.server import ScoreRequest
from gradveil.models import create_model, load_weights
from gradveil.models.base import Normalisation
from gradveil.randomness import global_stream
from gradveil.secret_stream import SecretStream
from gradveil.storage import PrivateFolder
from gradveil.threat.tap import Tap
from gradveil.types import Batch, Tensors


def chunk_size(shape: tuple[int, int, int]) -> int:
    """Return the number of images scored together: 500 up to 3x64x64, fewer if they are larger.

    It depends on nothing else, so that sums of losses have the same bits for any number of workers.
    """
    return max(1, min(500, 500 * 3 * 64 * 64 // math.prod(shape)))


def chunks(data: FederatedData, request: ScoreRequest) -> range:
    """Return the start of each chunk of a request's images."""
    return range(0, data.count(request.images, request.client), chunk_size(data.shape))


def make_network(
    settings: TrainSettings,
    shape: tuple[int, int, int],
    num_classes: int,
    normalisation: Normalisation | None,
    aux: Batch | None = None,
) -> nn.Module:
    """Return the undefended network of a run, the same in every process; some models are made of public images."""
    public = None if aux is None else aux.images
    network = create_model(settings.model, shape, num_classes, settings.seed, normalisation, public)
    if settings.weights:
        load_weights(network, Path(settings.weights))
    return network


def defended(network: nn.Module, defence: Defence, seed: int, owner: str) -> nn.Module:
    """Return the network after ``on_model`` with the owner's random stream; torch's global generator is restored."""
    with global_stream(seed, "on_model", owner, "global"):
        return defence.on_model(network, SecretStream(seed, "on_model", owner))


def refuse_in_part(defence: Defence, settings: TrainSettings) -> None:
    """Raise if only some clients defend, but the defence changes the network or involves the server."""
    common = [
        hook
        for hook in ("on_model", "private", "on_server", "on_aggregate", "early_clients")
        if defence.overrides(hook)
    ]
    if settings.defended and common:
        raise ConfigError(
            f"defended must be empty for a defence that server and clients share, got it with {defence.spec!r} "
            f"({', '.join(common)}). Drop --defended, so that all clients defend."
        )


def is_private(network: nn.Module, defence: Defence, settings: TrainSettings) -> Callable[[str], bool]:
    """Return the test for tensors that stay on the device: the defence's, and BatchNorm statistics if ``local``."""
    statistics = {
        f"{layer_name}.{name}" if layer_name else name
        for layer_name, layer in network.named_modules()
        if settings.batch_norm == "local" and isinstance(layer, _BatchNorm)
        for name, _ in layer.named_buffers()
    }
    return lambda name: name in statistics or defence.private(name)


def draws_own_images(defence: Defence, how: LocalSettings) -> bool:
    """Return whether the images behind an update are those that the defence drew, as the network saw them.

    FedSGD's single batch can be known this way; a defence that also changes the images hides which they were.
    """
    return defence.draws_own_batch and not defence.hides_images and how.algorithm == "fedsgd"


def images_behind(num_images: int, how: LocalSettings, seed: int, client: int, round_number: int) -> Tensor:
    """Return the positions of the images behind a client's update: all, or those that FedSGD drew for its batch."""
    if how.algorithm == "fedavg":
        return torch.arange(num_images)
    return next(batch_positions(num_images, how, Streams.of(seed, client, round_number).order))


@contextmanager
def _explain_single_image() -> Iterator[None]:
    """Explain the error that BatchNorm raises for a batch of one image whose feature map is a single pixel."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            f"Batches must hold two images or more for this model's BatchNorm, got one ({error}). "
            "Choose a batch_size that leaves no single image at the end of an epoch, or --batch-norm freeze."
        ) from error


class Devices:
    """Plays any client's round; holds no client's data or state between calls.

    All random numbers of a client come from ``seed``, by default the run's seed. A real site draws a secret seed, as
    whoever knows the seed can draw the same noise, batches and keys. ``tap`` records chosen clients' rounds, if set.
    """

    def __init__(
        self,
        settings: TrainSettings,
        data: FederatedData,
        defence: Defence,
        network: Callable[[], nn.Module],
        folder: Path,
        seed: int | None = None,
    ) -> None:
        self._settings, self._data, self._defence = settings, data, defence
        self.tap: Tap | None = None
        self._network, self._folder = network, folder
        self._how = Protocol.of(settings).local
        self._seed = settings.seed if seed is None else seed
        self._net = self._flat("server", settings.seed)
        self._server_private = self._net.private_tensors()
        hooks = ("on_data", "on_batch", "on_gradient", "on_update")
        aux = data.aux if defence.uses_aux else None
        self._aux = None if aux is None else aux.to(settings.device)
        self._features = FeatureStore(self._net.module)
        self._stateful = bool(self._server_private) or any(defence.overrides(hook) for hook in hooks)

    def _flat(self, owner: str, seed: int) -> FlatModel:
        module = defended(self._network(), self._defence, seed, owner).to(self._settings.device)
        return FlatModel(module, is_private(module, self._defence, self._settings))

    @property
    def net(self) -> FlatModel:
        """Return the network that all clients take turns on."""
        return self._net

    def train(self, number: int, broadcast: Broadcast) -> Played:
        """Play one client's round with its data and private state, and save its new state."""
        folder = self._private_folder(number)
        saved = self._restore(number, broadcast.round, folder)
        defends = not self._settings.defended or number in self._settings.defended
        defence = self._defence if defends else Defence()
        device = self._device(number, folder, defence, saved)

        def ready(client: Client) -> None:
            if not device.prepared:
                _keep_data(client)
            if self._settings.tripwire != "off":
                guard(self._settings.tripwire, client)
            self._features.use(f"client {number}", client.data.images, folder)

        streams = replace(
            Streams.of(self._seed, number, broadcast.round),
            data=SecretStream(self._seed, "on_data", number),
            layers=global_stream(self._seed, "layers", number, "round", broadcast.round),
        )
        tap = self.tap if self.tap is not None and self.tap.wants(number, broadcast.round) else None
        shown: list[Batch] = []
        watch = None if tap is None else shown.append
        with _explain_single_image(), self._features.released():
            played = play_client(self._net, device, broadcast, defence, self._how, streams, ready=ready, watch=watch)
        if tap is not None:
            behind = self._private(number, broadcast.round)
            if draws_own_images(defence, self._how):
                behind = shown[0]
            tap.trained(number, behind, shown, played, device.state)
        private = {f"model.{name}": tensor for name, tensor in played.after.items()}
        state = {f"state.{key}": value for key, value in device.state.items()}
        if private or state or saved or folder.begins_anew:
            folder.save_state(broadcast.round, {**private, **state})
        return played

    def _private(self, number: int, round_number: int) -> Batch:
        """Return the client's images behind its update of a round, before any hook changed them."""
        data = self._data.client(number).to(self._settings.device)
        return data[images_behind(len(data), self._how, self._seed, number, round_number)]

    def score(self, request: ScoreRequest, start: int, after_round: int, received: Tensor) -> Score:
        """Score the chunk of images that begins at ``start``, with the server's private tensors or a client's."""
        self._net.receive(received)
        if self._server_private:
            if request.client is None:
                self._net.set_private(self._server_private)
            else:
                self._restore(request.client, after_round + 1, self._private_folder(request.client))
        batch = self._data.images(request.images, request.client, start, start + chunk_size(self._data.shape))
        batch = batch.to(self._settings.device)
        with self._features.released():
            if request.images == "test":
                self._features.use(f"test {start}", batch.images)
            elif request.client is not None:
                self._features.recall(f"client {request.client}")
            return score(self._net.module, batch)

    def inspect(self, number: int, after_round: int, received: Tensor) -> None:
        """Let a client check a model with its tripwire before it is scored on its own images."""
        if self._settings.tripwire != "off":
            self._net.receive(received)
            device = self._device(number, self._private_folder(number), Defence(), None)
            client = device.client(self._net.module, Streams.of(self._seed, number, after_round).hooks)
            guard(self._settings.tripwire, replace(client, round=after_round))

    def require_state(self, number: int, round_number: int) -> None:
        """Raise if a client that trained in this round has lost the private parts of its model since."""
        if self._server_private:
            self._private_folder(number).require_state(round_number)

    def _private_folder(self, number: int) -> PrivateFolder:
        return PrivateFolder(self._folder / str(number) / "private")

    def _restore(self, number: int, round_number: int, folder: PrivateFolder) -> dict[str, Tensor] | None:
        """Load a client's private tensors into the network. Return the rest of its state, or None for a new client."""
        saved = folder.load_state(round_number) if self._stateful else None
        if self._server_private:
            if saved is None:
                # the run's seed draws the same tensors as before
                seed = secrets.randbits(256) if folder.begins_anew else self._seed
                self._net.set_private(self._flat(f"client {number}", seed).private_tensors())
            else:
                self._set_private(saved, number, folder)
        return None if saved is None else _without_prefix(saved, "state.")

    def _set_private(self, saved: Tensors, number: int, folder: PrivateFolder) -> None:
        try:
            self._net.set_private(_without_prefix(saved, "model."))
        except ConfigError as error:
            raise RunFolderError(
                f"The private state of client {number} in {folder.path} does not fit its model. {error}"
            ) from error

    def _device(self, number: int, folder: PrivateFolder, defence: Defence, saved: Tensors | None) -> Device:
        """Return a client's data and state; the data are those that ``on_data`` made, if it has run before."""
        state = dict(saved or {})
        prepares = defence.overrides("on_data")
        kept = folder.load("data") if prepares else None
        if kept is None:
            data = self._data.client(number)
        else:
            data = Batch(kept["images"], kept["labels"], kept["sensitive"])
            if saved is None:  # killed after its data were made, and before its first round was over
                state.update(_without_prefix(kept, "state."))
        prepared = not prepares or kept is not None
        return Device(data.to(self._settings.device), number, prepared, state, self._aux, folder)


def _keep_data(client: Client) -> None:
    """Save the data that ``on_data`` made, with the state that it left, in the client's private folder."""
    if client.folder is not None:
        data = client.data
        kept = {"images": data.images, "labels": data.labels, "sensitive": data.sensitive}
        client.folder.save("data", kept | {f"state.{key}": value for key, value in client.state.items()})


def _without_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
