"""Flower's SuperNode, with shorter pauses between its questions to the SuperLink.

    python -m gradveil.engines.quick_node --insecure --superlink SERVER:8000 --port 9094 --node-config "..."

takes the options of ``flower-supernode`` and does the same. A plain SuperNode sleeps 3 seconds whenever there is no
message, which is most of a short round. This one sleeps at most ``GRADVEIL_NODE_PAUSE`` seconds (0.2 by default), and
so does its SuperExec. Use it for few nodes: each asks five times per second. It replaces the clock of one of Flower's
modules, which is why the version of Flower is pinned.
"""

import importlib
import os
import time
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
    """Let the loop of Flower's SuperNode in this process sleep at most ``pause`` seconds at a time."""
    loop = importlib.import_module("flwr.supernode.start_client_internal")

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, pause))

    vars(loop)["time"] = SimpleNamespace(sleep=sleep)
    os.environ.setdefault(SUPEREXEC_PAUSE, f"{min(pause, 1.0):g}")


def main() -> None:
    """Run a SuperNode with the options on the command line."""
    hurry(longest_pause(os.environ.get(PAUSE, "0.2")))
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()


if __name__ == "__main__":
    main()
