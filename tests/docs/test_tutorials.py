"""The first page and the tutorial on Flower are followed as they stand: files are written and commands are run."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import gradveil
from tests.docs.test_guides import commands_of
from tests.docs.test_own_model import shell  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]
DIGIT = 7
"""The image that the client of the tutorial on Flower trains on."""


def files_of(text):
    """Return the files that a page tells to write: a block of Python below a line that begins with the file's name."""
    return dict(re.findall(r"^`([\w.]+)`[^\n]*:\n\n```python\n(.*?)```", text, re.DOTALL | re.MULTILINE))


@pytest.fixture
def follow(shell, tmp_path):  # noqa: F811 - the fixture
    """Return a function that writes the files of a page, and returns its blocks of commands."""

    def follow(page):
        text = (ROOT / "docs" / page).read_text()
        files = files_of(text)
        assert len(files) == text.count("```python")
        for name, content in files.items():
            (tmp_path / name).write_text(content)
        return commands_of(text)

    return follow


@pytest.mark.slow
def test_start_in_five_minutes(follow, shell, tmp_path):  # noqa: F811 - the fixture
    doctor, leak, own = follow("start.md")
    assert "torch" in shell(doctor)
    shell(leak)
    assert "Recognisable" in (tmp_path / "first" / "report.html").read_text()
    assert "Estimate" in shell(own + "\n")
    assert tomllib.loads((tmp_path / "audit.toml").read_text())["dataset"] == "scans.npz"


def likeness(folder):
    """Return the correlation of the recovered picture with the private digit."""
    private = gradveil.load_dataset("mnist-5k").train.images[DIGIT, 0].astype(float)
    (picture,) = sorted((folder / "images").glob("*.png"))[:1]
    seen = np.asarray(Image.open(picture).convert("L").resize((28, 28), Image.Resampling.BOX), float)
    return np.corrcoef(private.ravel(), seen.ravel())[0, 1]


@pytest.mark.slow
def test_protect_a_flower_app(follow, shell, tmp_path):  # noqa: F811 - the fixture
    pytest.importorskip("flwr")
    plain, noisy = follow("tutorials/protect-a-flower-app.md")
    shell(plain)
    shell(noisy)
    assert likeness(tmp_path / "seen") > 0.95
    assert likeness(tmp_path / "hidden") < 0.5
