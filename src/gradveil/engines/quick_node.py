"""Flower's SuperNode, with shorter pauses, and with processes that start faster.

    python -m gradveil.engines.quick_node --insecure --superlink SERVER:8000 --port 9094 --node-config "..."

takes the options of ``flower-supernode`` and does the same. A plain SuperNode sleeps 3 seconds whenever there is no
message, which is most of a short round. This one sleeps at most ``GRADVEIL_NODE_PAUSE`` seconds (0.1 by default), and
so does its SuperExec, which forks the process for each message (`gradveil.engines.quick_exec`). Use it for few nodes:
each asks ten times per second. It replaces the clock of one of Flower's modules, and the command of its SuperExec,
which is why the version of Flower is pinned.
"""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace

from gradveil.errors import ConfigError

PAUSE = "GRADVEIL_NODE_PAUSE"
SUPEREXEC_PAUSE = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"


def longest_pause(text: str) -> float:
    """Return the longest pause in seconds that a text states.

    Example:
        >>> longest_pause("0.5")
        0.5
    """
    try:
        pause = float(text)
    except ValueError:
        pause = float("nan")
    if not 0.01 <= pause <= 3:
        raise ConfigError(f"{PAUSE} must be a number of seconds from 0.01 to 3, got {text!r}.")
    return pause


def hurry(pause: float) -> None:
    """Let the loop of Flower's SuperNode in this process sleep at most ``pause`` seconds, and start our SuperExec."""
    loop = importlib.import_module("flwr.supernode.start_client_internal")

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, pause))

    def popen(command: Sequence[str]) -> "subprocess.Popen[bytes]":
        quick = command[0] == "flower-superexec" and hasattr(os, "fork")
        start = [sys.executable, "-P", "-m", "gradveil.engines.quick_exec"] if quick else [command[0]]
        return subprocess.Popen([*start, *command[1:]])  # noqa: S603 - Flower's own command, by this Python

    vars(loop)["time"] = SimpleNamespace(sleep=sleep)
    vars(loop)["subprocess"] = SimpleNamespace(Popen=popen)
    os.environ.setdefault(SUPEREXEC_PAUSE, f"{min(pause, 1.0):g}")


def main() -> None:
    """Run a SuperNode with the options on the command line."""
    hurry(longest_pause(os.environ.get(PAUSE, "0.1")))
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()


if __name__ == "__main__":
    main()
