"""Flower's SuperExec, whose ClientApp processes start in no time: they are forked from one that has imported Flower.

    python -m gradveil.engines.quick_exec --runtime-api-address HOST:PORT ...

takes the options of ``flower-superexec``, and is started by `gradveil.engines.quick_node`. Flower starts a Python
process for each message, which imports about a thousand modules of Flower before it reads the message. Here one process
imports them (the starter) and forks a child per message. The child runs ``flwr-clientapp`` as Flower does, in a process
of its own that ends with its message, so that no message finds anything of another one. The starter itself runs no code
that came with a run, has one thread, and ends when its SuperExec ends, because its input ends then.

It replaces how one of Flower's modules starts processes, which is why the version of Flower is pinned.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

COMMAND = "flwr-clientapp"
STARTER = "starter"


class Starter:
    """The process that forks, and how to ask it; if it has ended, processes are started as Flower starts them."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "gradveil.engines.quick_exec", STARTER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603 - this Python

    def popen(
        self, command: Sequence[str], stdout: int | None = None, stderr: int | None = None
    ) -> "subprocess.Popen[bytes] | None":
        """Start a process as ``subprocess.Popen`` does; one of a ClientApp is forked, and nothing is returned."""
        if command[0] == COMMAND and stdout is stderr is None and self._asked(command[1:]):
            return None
        return subprocess.Popen(command, stdout=stdout, stderr=stderr)  # noqa: S603 - Flower's own command

    def _asked(self, arguments: Sequence[str]) -> bool:
        pipe = self._process.stdin
        if pipe is None or self._process.poll() is not None:
            return False
        try:
            pipe.write(json.dumps(list(arguments)).encode() + b"\n")
            pipe.flush()
        except OSError:
            return False
        return True

    def end(self) -> None:
        """End the process; children that it has forked go on."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def fork_for_each(lines: Iterable[bytes], work: Callable[[list[str]], object]) -> None:
    """Do some work with the arguments in each line, in a child process for each."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets children that have ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the node, which then ends this process
    for line in lines:
        arguments = json.loads(line)
        if os.fork() == 0:
            _be_child(work, arguments)


def _be_child(work: Callable[[list[str]], object], arguments: list[str]) -> None:
    code = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0)  # noqa: SIM115 - for the whole process
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # anew, from the system; Python's own generator does so by itself
        work(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def main() -> None:
    """Run a SuperExec with the options on the command line, or the process that forks for it."""
    if sys.argv[1:] == [STARTER]:
        importlib.import_module("gradveil.engines.warm_site")
        from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

        def run(arguments: list[str]) -> None:
            sys.argv = [COMMAND, *arguments]
            flwr_clientapp()

        with open(0, "rb", buffering=0) as lines:  # unbuffered, so that no child has the lines of others
            fork_for_each(lines, run)
        return
    starting = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    vars(starting)["subprocess"] = SimpleNamespace(Popen=Starter().popen, DEVNULL=subprocess.DEVNULL)
    from flwr.supercore.cli.flower_superexec import flower_superexec

    sys.argv[0] = "flower-superexec"
    flower_superexec()


if __name__ == "__main__":
    main()
