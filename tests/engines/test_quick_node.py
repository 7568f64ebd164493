"""Flower's SuperNode with shorter pauses: only its own loop sleeps less."""

import importlib
import os
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
    monkeypatch.setenv(quick_node.SUPEREXEC_PAUSE, "1")
    monkeypatch.delenv(quick_node.SUPEREXEC_PAUSE)
    quick_node.hurry(0.25)
    monkeypatch.setattr(time, "sleep", slept.append)
    for seconds in (3, 0.5, 0.1):
        loop.time.sleep(seconds)
    assert slept == [0.25, 0.25, 0.1]
    assert os.environ[quick_node.SUPEREXEC_PAUSE] == "0.25"
    assert vars(importlib.import_module("flwr.superlink.grid.http_grid"))["time"] is time
