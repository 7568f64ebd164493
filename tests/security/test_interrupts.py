"""Ctrl-C and kill -9 at any time: one line and exit code 130, and no private image left behind."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

SMALL = ["--dataset", "mnist-5k", "--clients", "4", "--partition", "iid:images=20"]
COMMANDS = {
    "train": ["train", *SMALL, "--model", "lenet5", "--rounds", "100000", "--workers", "2"],
    "audit": [
        "audit", *SMALL, "--model", "lenet-dlg", "--attacks", "gs:iterations=100000", "--rounds", "2", "--targets", "4",
    ],
    "score": ["score", "--model", "lenet-dlg", "--targets", "4"],
    "train-generator": ["train-generator", "--dataset", "mnist-5k", "--steps", "100000"],
    "list": ["list", "attacks"],
    "report": ["report", "nowhere"],
}  # fmt: skip
BEGIN = """
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
from gradveil import __main__, interrupts
listen = interrupts.stop_on_ctrl_c
def stop_on_ctrl_c():
    listen()
    pathlib.Path("listening").touch()
__main__.stop_on_ctrl_c = stop_on_ctrl_c
{more}
__main__.main()
"""
"""A command that says when it listens to Ctrl-C: before, Python itself is starting, and answers in its own way."""


def start(words, tmp_path, more="", **environment):
    out = [] if words[0] in ("score", "list", "report") else ["--out", str(tmp_path / "out.safetensors")]
    called = [sys.executable, "-c", BEGIN.format(more=more), *words, *out]
    return subprocess.Popen(
        called, env={**os.environ, **environment}, text=True, cwd=tmp_path, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_until_it_listens(process, tmp_path):
    while not (tmp_path / "listening").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def assert_stopped(process, sentence=""):
    """Assert that Ctrl-C ended a process as it should."""
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err + out
    assert process.returncode == 130, err
    assert len([line for line in err.splitlines() if line.startswith(f"Stopped. {sentence}")]) == 1, err
    assert "Aborted" not in err


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.15, 0.5, 2.0, 5.0])
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_ends_a_command_with_one_line(tmp_path, name, seconds):
    """The terminal sends it to the whole group, the workers included."""
    process = start(COMMANDS[name], tmp_path)
    wait_until_it_listens(process, tmp_path)
    time.sleep(seconds + random.Random(name).uniform(0, 0.3))
    os.killpg(process.pid, signal.SIGINT)
    if process.wait(120) in (0, 2) and name in ("score", "list", "report"):  # it was done before
        assert "Traceback" not in "".join(process.communicate())
    else:
        assert_stopped(process)


FAILING = """
import builtins
real = builtins.__import__
def odd(name, *rest, **more):
    if name == {name!r}:
        builtins.__import__ = real
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            raise ImportError("numpy failed") from error
    return real(name, *rest, **more)
builtins.__import__ = odd
"""


@pytest.mark.parametrize(
    ("name", "sentence"), [("gradveil.cli", "Nothing was started."), ("rich.table", "Nothing was saved.")]
)
def test_ctrl_c_counts_even_if_an_import_makes_another_error_of_it(tmp_path, name, sentence):
    assert_stopped(start(["list", "attacks"], tmp_path, FAILING.format(name=name)), sentence)


def test_ctrl_c_waits_until_a_module_is_imported(tmp_path):
    """An exception in the middle of torch's own import aborts the process, for C++ code calls Python there."""
    (tmp_path / "heavy.py").write_text(
        "import pathlib, signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(0.2)\n"
        "pathlib.Path('done').touch()\n"
    )
    more = """
import time
def run():
    sys.path.insert(0, ".")
    import heavy
    time.sleep(60)
import gradveil.cli
gradveil.cli.main = run
"""
    assert_stopped(start(["list"], tmp_path, more))
    assert (tmp_path / "done").exists()


def test_a_second_ctrl_c_ends_even_an_import(tmp_path):
    (tmp_path / "heavy.py").write_text(
        "import signal, time\nsignal.raise_signal(signal.SIGINT)\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)\n"
    )
    more = """
def run():
    sys.path.insert(0, ".")
    import heavy
import gradveil.cli
gradveil.cli.main = run
"""
    process = start(["list"], tmp_path, more)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_ctrl_c_counts_even_in_a_destructor(tmp_path):
    """Python prints and forgets what a destructor raises."""
    more = """
class Odd:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
import time
def run():
    Odd()
    time.sleep(60)
import gradveil.cli
gradveil.cli.main = run
"""
    assert_stopped(start(["list"], tmp_path, more))


AT_THE_END = {
    "before the modules go": "import atexit; atexit.register(signal.raise_signal, signal.SIGINT)",
    "while the modules go": """
import os
class Late:
    def __del__(self, kill=os.kill, me=os.getpid()):
        kill(me, 2)
keep = Late()
""",
}


@pytest.mark.parametrize("more", AT_THE_END.values(), ids=AT_THE_END)
def test_ctrl_c_does_nothing_after_the_end(tmp_path, more):
    process = start(["list", "attacks"], tmp_path, more)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "gs" in out
    assert "Traceback" not in err


def test_a_starting_child_never_hears_ctrl_c(tmp_path):
    """Python's own helper process, which the first child starts, must not undo it."""
    code = """
import multiprocessing, signal
from gradveil.interrupts import not_for_children
with not_for_children():
    multiprocessing.get_context("spawn").Process(target=print).start()
    print("blocked", signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
print("after", signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert {"blocked True", "after False"} <= set(ended.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_image_stays_behind_whenever_the_run_is_killed(tmp_path, seed):
    """Workers share the images in a file without a name, so there is no moment in which it could stay."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = start(COMMANDS["train"], tmp_path, TMPDIR=str(scratch))
    wait_until_it_listens(process, tmp_path)
    rng, seen = random.Random(seed), set()
    end = time.monotonic() + 1.5 + rng.uniform(0, 1.5)
    while time.monotonic() < end:
        seen |= {path.name for path in scratch.rglob("*") if path.is_file() and path.stat().st_size > 1000}
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not seen
    assert not [path for path in scratch.rglob("*") if path.is_file() and path.stat().st_size > 1000]


def test_the_shared_file_has_no_name(tmp_path, monkeypatch):
    import tempfile

    import numpy as np

    from gradveil.engines.shared_file import SharedFile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arrays = {"a": np.arange(1000.0), "empty": np.zeros((0, 3), np.uint8), "b": np.eye(5, dtype=bool)}
    shared = SharedFile(arrays)
    assert list(tmp_path.iterdir()) == []
    for name, array in arrays.items():
        assert np.array_equal(shared.array(name), array)
        assert shared.array(name).dtype == array.dtype
    shared.array("a", writable=True)[3] = -1
    assert shared.array("a")[3] == -1
    shared.close()
