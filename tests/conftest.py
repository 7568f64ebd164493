"""Shared fixtures: the real data if available, and settings that train in a second."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from gradveil import cli
from gradveil.config import TrainSettings
from tests.engines import fake_nvflare

fake_nvflare.use_if_missing()  # before any module that needs NVFlare is imported, also by doctests
PROBES = Path(__file__).parent / "probes.py"


@pytest.fixture(scope="session")
def real_data() -> Path:
    root = os.environ.get("GRADVEIL_TEST_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("GRADVEIL_TEST_DATA names no folder with the real data sets")
    return Path(root)


@pytest.fixture
def tiny() -> TrainSettings:
    return TrainSettings(model="logistic", clients=4, rounds=2, partition="iid:images=20", lr=0.5, momentum=0.0)


class Ended(NamedTuple):
    """The outcome of a command."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        return self.err.rstrip("\n").splitlines()[-1]


@pytest.fixture
def gradveil(monkeypatch, capsys):
    """Return a function that runs the command line with arguments and returns the outcome."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gradveil", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return Ended(end.value.code or 0, captured.out, captured.err)

    return run
