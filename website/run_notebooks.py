"""Run the notebooks in examples/notebooks and store what they show: ``python -m website.run_notebooks [FILE ...]``."""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from website.notebooks import FOLDER


def run(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Return a notebook that was run in a folder, without what differs from machine to machine."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    os.environ.setdefault("GRADVEIL_OFFLINE", "1")
    for name in sys.argv[1:] or sorted(map(str, FOLDER.glob("*.ipynb"))):
        with tempfile.TemporaryDirectory() as scratch:
            nbformat.write(run(Path(name), Path(scratch)), name)
