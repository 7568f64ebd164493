"""A defence's own tests must fail if one of its hooks does nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradveil.defences import HOOKS
from gradveil.registry import components

ROOT = Path(__file__).parents[2]


def sabotage(*arguments):
    command = [sys.executable, "-m", "tests.contracts.sabotage", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(components("defences")))
def test_a_disabled_hook_breaks_the_defences_own_tests(name):
    result = sabotage(name)
    assert result.returncode == 0, result.stderr[-300:]


def test_the_check_itself_finds_an_untested_hook(tmp_path):
    toothless = tmp_path / "test_toothless.py"
    toothless.write_text("def test_nothing():\n    assert True\n")
    result = sabotage("chain", toothless)
    assert result.returncode == 1
    assert all(hook in result.stderr for hook in HOOKS)
