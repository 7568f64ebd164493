"""The embedded engine in this process: one client after the other. Required for a GPU and for live objects."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor, nn

from gradveil.config import TrainSettings
from gradveil.data.federated import FederatedData
from gradveil.defences.base import Defence
from gradveil.engines.devices import Devices, chunks
from gradveil.federated.client import Broadcast, Score
from gradveil.federated.server import ScoreRequest, Sent
from gradveil.threat.tap import Tap
from gradveil.types import Tensors


class InProcess:
    """Plays each client in turn in this process."""

    fewest = 0

    def __init__(
        self,
        settings: TrainSettings,
        data: FederatedData,
        defence: Defence,
        network: Callable[[], nn.Module],
        folder: Path,
    ) -> None:
        self._data = data
        self._devices = Devices(settings, data, defence, network, folder)

    def attach(self, tap: Tap) -> None:
        """Let a tap record its clients from now on."""
        self._devices.tap = tap

    def train(
        self, round_number: int, clients: Sequence[int], model: Tensors, public: Tensors, lr: float
    ) -> Iterator[Sent]:
        """Let clients train one after the other."""
        broadcast = Broadcast(self._vector(model), lr, round_number, public)
        for client in clients:
            played = self._devices.train(client, broadcast)
            yield Sent(client, played.update, played.reports)

    def score(self, round_number: int, requests: Sequence[ScoreRequest], model: Tensors) -> list[Score]:
        """Score models, chunk by chunk."""
        received = self._vector(model)
        return [
            sum(
                (self._devices.score(request, start, round_number, received) for start in chunks(self._data, request)),
                Score(),
            )
            for request in requests
        ]

    def _vector(self, model: Tensors) -> Tensor:
        return self._devices.net.shared_vector(model)
