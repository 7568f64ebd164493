"""There is one way to do each of these things, and it lives in one file."""

import re
from pathlib import Path

import gradveil

SOURCE = Path(gradveil.__file__).parent


def files_with(pattern):
    """Return the names of all source files in which a pattern occurs."""
    found = (path for path in SOURCE.rglob("*.py") if re.search(pattern, path.read_text()))
    return {path.relative_to(SOURCE).as_posix() for path in found}


def test_layers_are_watched_by_one_function():
    """models/base.py normalises a network's input by a hook, which is no watching."""
    assert files_with("register_(module_)?forward") == {"networks/watch.py", "models/base.py"}


def test_pixels_are_scaled_in_one_file():
    """The others do not scale images: they work on the 8-bit scale of an operation, of a grid or of drawn pictures."""
    own_scale = {"defences/parts/transforms.py", "attacks/parts/analytic.py", "report/sheets.py"}
    scaling = r"/ ?255|\* ?255|div_?\(255|mul_?\(255"
    assert files_with(scaling) == {"data/pixels.py"} | own_scale


def test_clients_are_assembled_in_one_file():
    assert files_with(r"(?<![\w.])Client\(") == {"federated/client.py"}
