"""Ctrl-C: it ends a command with exit code 130 and no traceback; worker processes never answer it themselves."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""


class Stopped(SystemExit):
    """Ctrl-C was pressed. It passes all handlers of errors, and `finally` blocks still run.

    Attributes:
        told: whether the user was told so.
    """

    told = False


class _CtrlC:
    """What has happened so far in this process: only signals change it, and they are handled by the main thread."""

    pressed = False
    ending = False
    retrying = False

    def __call__(self, _signal: int, frame: FrameType | None) -> None:
        """Raise `Stopped`, end the process at once the second time, or do nothing if the command is over anyway.

        While a module is being imported, wait until it is: torch's C++ code aborts the process if Python raises there.
        """
        if self.pressed and not self.retrying:
            os._exit(INTERRUPTED)
        self.pressed, self.retrying = True, False
        if self.ending:
            return
        if _importing(frame):
            self._retry()
        else:
            raise Stopped(INTERRUPTED)

    def again(self, lost: "sys.UnraisableHookArgs") -> None:
        """Press once more if Python raised `Stopped` where nothing can be raised, as in a destructor."""
        if isinstance(lost.exc_value, Stopped):
            self._retry()
        else:
            sys.__unraisablehook__(lost)

    def _retry(self) -> None:
        def press() -> None:
            self.retrying = True
            os.kill(os.getpid(), signal.SIGINT)

        timer = threading.Timer(0.01, press)
        timer.daemon = True
        timer.start()


def _importing(frame: FrameType | None) -> bool:
    """Tell whether a frame is, or was called from, the import of a module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


_ctrl_c = _CtrlC()


def stop_on_ctrl_c() -> None:
    """Let the first Ctrl-C raise `Stopped` in the main thread, and a second one end the process at once.

    While Python itself ends, Ctrl-C is ignored, for then nothing could answer it.
    """
    _listen()
    sys.unraisablehook = _ctrl_c.again
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the first to be registered is called last


def _listen() -> None:
    _ctrl_c.pressed = _ctrl_c.ending = _ctrl_c.retrying = False
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _ctrl_c)


@contextmanager
def ending_with(sentence: Callable[[], str]) -> Iterator[None]:
    """If Ctrl-C was pressed and the block fails, print that it was stopped, and end with code 130.

    Any failure counts: a library may turn `Stopped` into an error of its own, as numpy does while it is imported. An
    inner block that has printed its sentence raises `Stopped` again, which is passed on.

    Args:
        sentence: returns what becomes of the work so far.
    """
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if getattr(error, "told", False) or not code or not (_ctrl_c.pressed or code == INTERRUPTED):
            raise
        sys.stderr.write(f"Stopped. {sentence()}\n")
        stop = Stopped(INTERRUPTED)
        stop.told = True
        raise stop from None


def work_is_over() -> None:
    """Let a first Ctrl-C from here on do nothing: the process is about to end."""
    _ctrl_c.ending = True


@contextmanager
def stopping_on_ctrl_c() -> Iterator[None]:
    """Do the same until the block ends; if the program handles Ctrl-C in its own way, leave that as it is."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    _listen()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextmanager
def not_for_children() -> Iterator[None]:
    """Let processes that are started inside ignore Ctrl-C from their first instruction on.

    A terminal sends Ctrl-C to all processes of a command at once. One that is still importing torch would print a
    traceback. Children inherit blocked signals; here a Ctrl-C in the meantime arrives when the block ends.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows, where children don't inherit it either
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # unblocks SIGINT when it starts, which must not happen inside
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
