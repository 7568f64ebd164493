"""Fixtures: a random generator, no internet, and the folder of the real data sets."""

import os
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Keep tests off the internet; those of the download use 127.0.0.1 and override this."""
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)


@pytest.fixture(scope="session")
def real_root():
    place = os.environ.get("GRADVEIL_TEST_DATA")
    if not place:
        pytest.skip("needs real data: set GRADVEIL_TEST_DATA to a data root")
    return Path(place)
