"""The embedded engine in this process: one client after the other. The only choice for a GPU or for live objects."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor, nn

from gradveil.config import TrainSettings
from gradveil.data.federated import FederatedData
from gradveil.defences.base import Defence
from gradveil.engines.devices import Devices, chunks
from gradveil.federated.client import Score
from gradveil.federated.server import ScoreRequest
from gradveil.types import Tensors, Update


class InProcess:
    """Runs each client in turn, with what was broadcast in memory."""

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

    def train(
        self, round_number: int, clients: Sequence[int], model: Tensors, public: Tensors, lr: float
    ) -> Iterator[tuple[int, Update]]:
        """Let clients train one after the other."""
        received = self._vector(model)
        for client in clients:
            yield client, self._devices.train(client, round_number, received, public, lr)

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
