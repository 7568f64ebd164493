"""The notebooks run from top to bottom, and show what is stored in them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
NAMES = ["check_your_training", "compare_defences"]


def stored(path):
    """Return the texts that the cells of a notebook show."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(out["data"]["text/plain"]) for cell in cells for out in cell.get("outputs", ()) if "data" in out]


def test_there_are_two():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_rich_and_of_no_machine(name):
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert "data:image/png" in text
    assert "<table" in text
    assert not any(path in text for path in ("/home/", "/tmp/", "/root/", "/work/"))  # noqa: S108 - looked for only


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_shows_the_same(name, tmp_path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    copy = tmp_path / f"{name}.ipynb"
    copy.write_text((FOLDER / f"{name}.ipynb").read_text())
    source = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "GRADVEIL_OFFLINE": "1"}
    command = [sys.executable, "-m", "website.run_notebooks", str(copy)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    kinds = [[re.split(r"[\[(]", text)[0] for text in stored(path)] for path in (copy, FOLDER / copy.name)]
    assert kinds[0] == kinds[1]
    if name == "check_your_training":
        assert "'fails'" in stored(copy)
        assert "'passes'" in stored(copy)
