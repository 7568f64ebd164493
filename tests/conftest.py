"""Shared fixtures: the real data, where they were laid out, and settings that train in a second."""

import os
from pathlib import Path

import pytest

from gradveil.config import TrainSettings

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
