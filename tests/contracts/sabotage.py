"""Run a defence's own tests once per overridden hook, with that hook disabled: each run must fail.

As a program: ``python -m tests.contracts.sabotage NAME`` prints hooks whose absence no test noticed, and exits with 1.
"""

import sys
from pathlib import Path

import pytest

from gradveil.defences import HOOKS, Defence
from gradveil.registry import components

TESTS = Path(__file__).parents[1] / "defences"


def unnoticed(name, tests=None):
    """Return the overridden hooks whose absence the defence's tests do not notice; the tests must pass otherwise."""
    cls = components("defences")[name]
    file = tests or TESTS / f"test_{name.replace('-', '_')}.py"
    quiet = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--no-summary", str(file)]
    survivors = []
    for hook in HOOKS:
        if getattr(cls, hook) is not vars(Defence)[hook]:  # its own, or that of a base class in between
            kept = vars(cls).get(hook)
            setattr(cls, hook, vars(Defence)[hook])
            try:
                if pytest.main(quiet) != pytest.ExitCode.TESTS_FAILED:
                    survivors.append(hook)
            finally:
                if kept is None:
                    delattr(cls, hook)
                else:
                    setattr(cls, hook, kept)
    return survivors


if __name__ == "__main__":
    survivors = unnoticed(sys.argv[1], *(Path(path) for path in sys.argv[2:]))
    sys.stderr.write(f"unnoticed: {survivors}\n")
    sys.exit(1 if survivors else 0)
