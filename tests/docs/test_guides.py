"""Each guide is followed as it stands, in a scratch copy: its files are written and its commands are run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("adding-*.md"))


def files_of(text):
    """Return the files that a guide tells to write: a block of Python below a line that names the file."""
    return dict(re.findall(r"^`([\w.]+)`:\n\n```python\n(.*?)```", text, re.DOTALL | re.MULTILINE))


def commands_of(text):
    """Return the blocks of shell commands."""
    return re.findall(r"^```sh\n(.*?)```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Copy the parts of the repository that the guides mention; ``gradveil`` and ``python`` use the copy."""
    here, tools = tmp_path / "gradveil", tmp_path / "bin"
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, here / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", here)
    tools.mkdir()
    for name, start in (("python", ""), ("gradveil", "-m gradveil.cli")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {start} "$@"\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(here / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return here


@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_guide_works_as_it_stands(guide, checkout):
    text = guide.read_text()
    files, blocks = files_of(text), commands_of(text)
    assert len(files) >= 2
    assert len(blocks) >= 3
    for name, content in files.items():
        (checkout / name).write_text(content)
    for block in blocks:
        ended = subprocess.run(  # noqa: S602 - our own documentation
            f"set -e\n{block}", shell=True, cwd=checkout, capture_output=True, text=True, check=False, timeout=600
        )
        assert ended.returncode == 0, f"{block}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
        assert "Warning:" not in ended.stderr


def test_there_is_a_guide_for_every_kind_that_users_add():
    assert [path.stem for path in GUIDES] == [
        "adding-a-data-set", "adding-a-defence", "adding-a-metric", "adding-a-model", "adding-an-attack",
    ]  # fmt: skip


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_every_python_block_is_a_whole_file(guide):
    text = guide.read_text()
    assert len(files_of(text)) == text.count("```python")
    for name, content in files_of(text).items():
        compile(content, name, "exec")
        assert content.startswith('"""')
