"""Flower's SuperNode with shorter pauses: only its own loop sleeps less, and only its SuperExec is another."""

import importlib
import os
import subprocess
import sys
import time

import pytest

from gradveil.engines import quick_node
from gradveil.errors import ConfigError


@pytest.mark.parametrize("text", ["0", "3.5", "nan", "soon", ""])
def test_a_wrong_pause_is_refused(text):
    with pytest.raises(ConfigError, match=r"from 0\.01 to 3"):
        quick_node.longest_pause(text)


def test_only_the_loop_of_the_node_sleeps_less(monkeypatch):
    loop = importlib.import_module("flwr.supernode.start_client_internal")
    slept = []
    monkeypatch.setitem(vars(loop), "time", time)  # put back after the test
    monkeypatch.setitem(vars(loop), "subprocess", subprocess)
    monkeypatch.setenv(quick_node.SUPEREXEC_PAUSE, "1")
    monkeypatch.delenv(quick_node.SUPEREXEC_PAUSE)
    quick_node.hurry(0.25)
    monkeypatch.setattr(time, "sleep", slept.append)
    for seconds in (3, 0.5, 0.1):
        loop.time.sleep(seconds)
    assert slept == [0.25, 0.25, 0.1]
    assert os.environ[quick_node.SUPEREXEC_PAUSE] == "0.25"
    assert vars(importlib.import_module("flwr.superlink.grid.http_grid"))["time"] is time


def test_only_the_superexec_is_started_by_another_command(monkeypatch):
    loop = importlib.import_module("flwr.supernode.start_client_internal")
    started = []
    monkeypatch.setitem(vars(loop), "time", time)
    monkeypatch.setitem(vars(loop), "subprocess", subprocess)
    monkeypatch.setenv(quick_node.SUPEREXEC_PAUSE, "1")
    quick_node.hurry(0.25)
    monkeypatch.setattr(quick_node.subprocess, "Popen", started.append)
    loop.subprocess.Popen(["flower-superexec", "--insecure", "--parent-pid", "7"])
    loop.subprocess.Popen(["other", "--insecure"])
    ours = [sys.executable, "-P", "-m", "gradveil.engines.quick_exec"]
    assert started == [[*ours, "--insecure", "--parent-pid", "7"], ["other", "--insecure"]]
