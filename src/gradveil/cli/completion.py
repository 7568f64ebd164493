"""Completion in the shell: names of components and of their settings, read from the source without importing torch.

``gradveil --install-completion`` installs it. A list such as ``soteria:prune=0.6,gs`` is completed at its last piece.
Bash splits words at ``:`` and ``=``, so its answers are mended in `answer_bash`.
"""

import ast
import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import typer

from gradveil.catalogue import FOLDERS, catalogue
from gradveil.source import Unclear, read_module

COMPLETING = "_GRADVEIL_COMPLETE"
KINDS = {
    "attacks": "attacks",
    "aux": "datasets",
    "dataset": "datasets",
    "defence": "defences",
    "defences": "defences",
    "metrics": "metrics",
    "model": "models",
    "partition": "partitions",
}
"""The kind of component that each setting names."""
LISTS = ("attacks", "defences", "metrics")
"""Settings that may name several components."""


def completion_of(name: str) -> Callable[[str], list[str]] | None:
    """Return the function that completes the value of a setting, or None if its values have no names."""
    if name == "knows":
        return complete_knowledge
    if name not in KINDS:
        return None
    kind, several = KINDS[name], name in LISTS
    return lambda incomplete: complete(kind, incomplete, several=several)


def complete(kind: str, incomplete: str, *, several: bool = True) -> list[str]:
    """Return what a text could become that names components of a kind with settings.

    Example:
        >>> complete("defences", "none,sot"), complete("defences", "soteria:pru")
        (['none,soteria'], ['soteria:prune='])
    """
    begun, last = _cut(incomplete, several)
    entries = catalogue(kind).entries
    name, colon, settings = last.partition(":")
    if not colon:
        found = [begun + entry for entry in entries if entry.startswith(last)]
        owner = _owner(begun)  # a key may follow the settings before the comma
        return found + [begun + key for key in _keys(kind, owner) if last and key.startswith(last)]
    before, _, key = settings.rpartition(",")
    start = f"{begun}{name}:{before}{',' if before else ''}"
    return [start + setting for setting in _keys(kind, name) if setting.startswith(key)]


def complete_name(incomplete: str) -> list[str]:
    """Return the components of any kind whose name starts like this."""
    return sorted({name for kind in FOLDERS for name in catalogue(kind).entries if name.startswith(incomplete)})


def complete_kind(incomplete: str) -> list[str]:
    """Return the kinds of components whose name starts like this."""
    return [kind for kind in FOLDERS if kind.startswith(incomplete)]


def complete_knowledge(incomplete: str) -> list[str]:
    """Return what a list of granted facts could become.

    Example:
        >>> complete_knowledge("labels,num")
        ['labels,num-examples']
    """
    begun, comma, last = incomplete.rpartition(",")
    module = read_module("gradveil.threat.knowledge")
    facts = [module.value(node.value) for node in module.classes["Knowledge"].body if isinstance(node, ast.Assign)]
    return [f"{begun}{comma}{fact}" for fact in facts if fact.startswith(last)]


def answer_bash(run: Callable[[], Any]) -> None:
    """Answer bash, whose words end at ``:`` and ``=``: give ``run`` whole words, and bash only the rest of the last."""
    words, shown = whole_words(os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD", "0")))
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(words), str(len(words) - 1)
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer), contextlib.suppress(SystemExit):
        run()
    for line in answer.getvalue().splitlines():
        typer.echo(line.removeprefix(shown))


def whole_words(words: list[str], number: int) -> tuple[list[str], str]:
    """Return the words up to the one that is completed, rejoined, and the part of the last one that bash keeps.

    Example:
        >>> whole_words(["gradveil", "audit", "--defences", "soteria", ":", "pr"], 5)
        (['gradveil', 'audit', '--defences', 'soteria:pr'], 'soteria:')
        >>> whole_words(["gradveil", "describe", ""], 2)
        (['gradveil', 'describe', ''], '')
    """
    joined: list[str] = []
    ended = True
    for word in [*words, ""][: number + 1]:
        mark = re.fullmatch(r"[:=]+", word) is not None
        if joined and (mark or not ended):
            joined[-1] += word
        else:
            joined.append(word)
        ended = not mark
    last = joined[-1] if joined else ""
    place = max(last.rfind(":"), last.rfind("=")) + 1
    return joined, last[:place]


def _cut(text: str, several: bool) -> tuple[str, str]:
    """Return what of a text is done and its last piece: after ``+``, or after a comma that begins a new component."""
    place = text.rfind("+") + 1
    if several:
        place = max(place, text.rfind(",") + 1) if ":" not in text[text.rfind(",") + 1 :] else place
        for found in re.finditer(",", text):
            if ":" in text[found.end() :].partition(",")[0]:
                place = max(place, found.end())
    return text[:place], text[place:]


def _owner(begun: str) -> str:
    """Return the component whose settings end at the end of a text, or ""."""
    if not begun.endswith(",") or ":" not in begun:
        return ""
    return re.split(r"[,+]", begun.rpartition(":")[0])[-1]


def _keys(kind: str, name: str) -> Iterator[str]:
    """Yield the settings of a component, each with its equals sign."""
    entry = catalogue(kind).entries.get(name)
    with contextlib.suppress(Unclear):
        yield from (f"{key}=" for key in (entry.settings if entry else {}))
