"""A SuperExec that forks: one child per message, with nothing of another one, and Flower's own way if that fails."""

import json
import os
import subprocess
import sys

import pytest

from gradveil.engines import quick_exec

CHILDREN = """
import os, sys, numpy
from gradveil.engines.quick_exec import fork_for_each

def work(arguments):
    if arguments == ["fail"]:
        raise ValueError("child")
    if arguments == ["end"]:
        sys.exit(7)
    global seen
    seen = globals().get("seen", 0) + 1
    line = f"{arguments[0]} {seen} {os.getpid()} {numpy.random.random()} {sys.stdin.read()!r}"
    os.write(1, line.encode() + bytes([10]))

fork_for_each(open(0, "rb", buffering=0), work)
import time; time.sleep(1)
print("starter", os.getpid())
"""


def test_each_line_is_worked_on_in_a_process_of_its_own():
    lines = "".join(json.dumps([text]) + "\n" for text in ("a", "fail", "end", "b"))
    ran = subprocess.run([sys.executable, "-c", CHILDREN], input=lines, capture_output=True, text=True, check=True)
    told = [line.split() for line in ran.stdout.splitlines()]
    found = {line[0]: line[1:] for line in told}
    assert found.keys() == {"a", "b", "starter"}
    assert (found["a"][0], found["b"][0]) == ("1", "1"), "a child found what another one left"
    assert len({found["a"][1], found["b"][1], found["starter"][0]}) == 3
    assert found["a"][2] != found["b"][2], "both children drew the same random numbers"
    assert found["a"][3] == found["b"][3] == "''", "a child read the messages of others"
    assert "ValueError: child" in ran.stderr


@pytest.fixture
def starter(tmp_path, monkeypatch):
    """Return a starter that writes what it is asked to a file, and the file."""
    asked = tmp_path / "asked"
    program = f"import sys; open({str(asked)!r}, 'w').write(sys.stdin.read())"
    real = subprocess.Popen
    monkeypatch.setattr(
        quick_exec.subprocess, "Popen", lambda _, **options: real([sys.executable, "-c", program], **options)
    )
    found = quick_exec.Starter()
    monkeypatch.setattr(quick_exec.subprocess, "Popen", real)
    return found, asked


def test_only_client_apps_are_forked(starter):
    ask, asked = starter
    assert ask.popen(["flwr-clientapp", "--token", "t"]) is None
    other = ask.popen([sys.executable, "-c", "raise SystemExit(5)"])
    assert other is not None
    assert other.wait() == 5
    ask.end()
    assert json.loads(asked.read_text()) == ["--token", "t"]


def test_without_a_starter_processes_start_as_flower_starts_them(starter, tmp_path, monkeypatch):
    ask, _ = starter
    ask._process.kill()
    ask._process.wait()
    command = tmp_path / "flwr-clientapp"
    command.write_text("#!/bin/sh\nexit 9\n")
    command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    started = ask.popen(["flwr-clientapp"])
    assert started is not None
    assert started.wait() == 9
    ask._process.stdin.close()
