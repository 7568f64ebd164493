"""The trainings of a recommendation, each in a folder of its own, so that a killed search goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.errors import ConfigError, DefenceError, DivergedError
from gradveil.runs.train import train

Progress = Callable[[float, str], None]
"""Called with the share done and what is being done."""


@dataclass
class TrialRuns:
    """Runs trainings and counts them.

    Attributes:
        out: the recommendation's folder.
        held: the data set whose test images are held-out training images.
        whole: the data set with all training images, and the true test images.
        workers: processes that train clients.
        data_root: the folder of named data sets.
        progress: told how far all of it is.
    """

    out: Path
    held: Dataset
    whole: Dataset
    workers: int | None
    data_root: Path | None
    progress: Progress
    _done: int = field(default=0, init=False)
    _total: int = field(default=1, init=False)

    def expect(self, pieces: int) -> None:
        """State how many pieces of work there will be, about."""
        self._total = max(pieces, 1)

    def compared(self, training: TrainSettings, name: str, doing: str) -> dict[str, Any]:
        """Return the last row of a training that is scored on held-out training images."""
        return self._trained(replace(training, eval_every=max(training.rounds, 1)), name, doing, self.held)

    def verified(self, training: TrainSettings, name: str, doing: str) -> dict[str, Any]:
        """Return the last row of a training on all training images, scored on the test images."""
        return self._trained(training, name, doing, self.whole)

    def tried(self, training: TrainSettings, name: str, doing: str) -> dict[str, Any]:
        """Return the last row of a training as `compared` does, or the reason (``why``) if it can't be trained."""
        try:
            return self.compared(training, name, doing)
        except (ConfigError, DefenceError, DivergedError) as error:
            self._done += 1
            return {"why": str(error)}

    def _trained(self, training: TrainSettings, name: str, doing: str, dataset: Dataset) -> dict[str, Any]:
        folder = self.out / "trainings" / name
        with self.counting(doing) as move:
            rows = train(
                training, folder, resume=folder.exists(), workers=self.workers, data_root=self.data_root,
                dataset=dataset, progress=lambda rounds, row, text: move(rounds / max(training.rounds, 1)),
            ).rows  # fmt: skip
        return {key: value for key, value in rows[-1].items() if key != "seconds"}

    @contextmanager
    def counting(self, doing: str) -> Iterator[Callable[[float], None]]:
        """Count a piece of work; yields a function that takes the share of it that is done."""
        self.progress(min(self._done / self._total, 1.0), doing)
        yield lambda share: self.progress(min((self._done + share) / self._total, 1.0), doing)
        self._done += 1
