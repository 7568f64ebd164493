"""`gradveil.flower` is found without an import of its own, and loads Flower only when it is used."""

import subprocess
import sys

import gradveil

ALONE = """
import sys
import gradveil
assert "flwr" not in sys.modules
sys.modules["flwr"] = None  # as if it were not installed
try:
    gradveil.flower.protect
except ImportError as error:
    print(error)
"""


def test_flower_is_imported_on_first_use_and_its_absence_explained():
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert ended.stdout == "gradveil over Flower needs Flower. Run `pip install 'gradveil[flower]'`.\n"


def test_every_public_name_is_there():
    assert sorted(gradveil.flower.__all__) == list(gradveil.flower.__all__)
    assert all(hasattr(gradveil.flower, name) for name in gradveil.flower.__all__)
    assert {"protect", "train", "Tap"} <= set(gradveil.flower.__all__)
