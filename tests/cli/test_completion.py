"""Completion in the shell: names and settings of components, in lists and chains, and in bash, which splits words."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradveil as package
from gradveil.cli.completion import complete, complete_kind, complete_name, completion_of, whole_words
from gradveil.registry import components
from gradveil.threat import Knowledge

SOURCE = Path(package.__file__).parents[1]


@pytest.mark.parametrize("kind", ["defences", "attacks", "metrics", "models", "datasets", "partitions"])
def test_every_component_is_offered(kind):
    assert complete(kind, "") == sorted(components(kind))


@pytest.mark.parametrize(
    ("begun", "offered"),
    [
        ("sot", ["soteria"]),
        ("none,sot", ["none,soteria"]),
        ("soteria:pru", ["soteria:prune="]),
        ("soteria:prune=0.6,pro", ["soteria:prune=0.6,probes="]),
        ("soteria:prune=0.6,qua", ["soteria:prune=0.6,quantise"]),
        ("soteria:prune=0.6,dcs2:ste", ["soteria:prune=0.6,dcs2:steps="]),
        ("clip:norm=1+gaus", ["clip:norm=1+gaussian"]),
        ("clip:norm=1+gaussian:st", ["clip:norm=1+gaussian:std="]),
        ("nothing:x", []),
        ("xyz", []),
    ],
)
def test_lists_settings_and_chains(begun, offered):
    assert complete("defences", begun) == offered


def test_a_setting_of_one_component_is_no_list():
    assert complete("defences", "none,sot", several=False) == []


def test_other_names():
    assert complete_kind("at") == ["attacks"]
    assert "soteria" in complete_name("so")
    assert completion_of("knows")("") == [fact.value for fact in Knowledge]
    assert completion_of("rounds") is None


@pytest.mark.parametrize("number", range(4))
def test_words_are_whole_wherever_the_cursor_is(number):
    words = ["gradveil", "audit", "--defences=a:b=c,d:", "x"]
    split = ["gradveil", "audit", "--defences", "=", "a", ":", "b", "=", "c,d", ":", "x"]
    assert whole_words(words, number)[0] == words[: number + 1]
    assert whole_words(split, len(split) - 1) == (["gradveil", "audit", "--defences=a:b=c,d:x"], "--defences=a:b=c,d:")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("doc",), ["doctor"]),
        (("describe", "sot"), ["soteria"]),
        (("audit", "--defences", "soteria", ":", "pru"), ["prune="]),
        (("train", "--model", "len"), ["lenet-dlg", "lenet5"]),
    ],
)
def test_in_a_real_bash(tmp_path, words, offered):
    tool = tmp_path / "gradveil"
    code = "import sys; sys.argv[0] = 'gradveil'; from gradveil.cli import main; main()"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    tool.chmod(0o755)
    script = tmp_path / "complete.sh"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCE)}
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"
    shown = subprocess.run(
        [tool, "--show-completion", "bash"], env=environment, capture_output=True, text=True, check=True
    )
    function = shown.stdout.split("()")[0].split()[-1]
    quoted = " ".join(f"'{word}'" for word in ("gradveil", *words))
    script.write_text(
        f"{shown.stdout}\nCOMP_WORDS=({quoted})\nCOMP_CWORD={len(words)}\n{function} gradveil\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True)  # noqa: S607
    assert done.stdout.split() == offered
