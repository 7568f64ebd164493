import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from gradveil.engines.simulation import Simulation
from gradveil.errors import DefenceError, WorkerError
from tests.conftest import PROBES


def test_an_error_in_a_worker_keeps_its_class_and_message(tiny):
    with (
        pytest.raises(DefenceError, match="refuse must not be asked"),
        Simulation(replace(tiny, defence=f"{PROBES}:Refuse"), workers=2) as simulation,
    ):
        simulation.step(1)


def test_a_bug_in_a_worker_shows_its_traceback(tiny):
    with (
        pytest.raises(RuntimeError, match=r"probes\.py"),
        Simulation(replace(tiny, defence=f"{PROBES}:Bug"), workers=2) as simulation,
    ):
        simulation.step(1)


def test_a_lost_worker_is_noticed(tiny):
    with (
        pytest.raises(WorkerError, match="exit code -9"),
        Simulation(replace(tiny, defence=f"{PROBES}:Crash"), workers=2) as simulation,
    ):
        simulation.step(1)


def test_more_clients_than_rows_of_shared_memory(tiny):
    settings = replace(tiny, clients=40, rounds=1)
    with Simulation(settings, workers=2) as simulation:
        _, played = simulation.step(1)
    assert sorted(played.clients) == list(range(40))


def test_a_killed_parent_leaves_no_images_in_the_scratch_folder(tmp_path):
    code = (
        "import os, signal\n"
        "from gradveil import Simulation, TrainSettings\n"
        "if __name__ == '__main__':\n"
        "    s = TrainSettings(model='logistic', clients=2, rounds=1, partition='iid:images=5')\n"
        "    simulation = Simulation(s, workers=2)\n"
        "    simulation.step(1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    subprocess.run([sys.executable, script], env={**os.environ, "TMPDIR": str(scratch)}, check=False, timeout=120)
    end = time.monotonic() + 30
    while list(scratch.glob("gradveil-*/*.npy")) and time.monotonic() < end:
        time.sleep(0.1)
    assert not list(scratch.glob("gradveil-*/*.npy"))


def test_a_script_without_main_guard_is_told_what_to_do(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from gradveil import Simulation, TrainSettings\n"
        "s = TrainSettings(model='logistic', clients=2, rounds=1, partition='iid:images=5')\n"
        "with Simulation(s, workers=2) as simulation:\n"
        "    simulation.step(1)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1
    assert "if __name__ == '__main__'" in ended.stderr.splitlines()[-1]
