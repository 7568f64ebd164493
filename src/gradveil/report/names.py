"""Components as people see them: the user's own by their file's name, without its folder. Rows keep the full path."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from gradveil.own import own_files
from gradveil.report.audit_folder import AuditFolder
from gradveil.report.sheets import Gallery
from gradveil.rows import Row

SPECS = ("defence", "attack")
"""Columns of component specs, which break between their settings only."""


def short_names(specs: Iterable[str]) -> dict[str, str]:
    """Return a shorter name for each spec with a user's file in a folder, unless two files have the same name.

    Example:
        >>> short_names(["none", "/home/me/top_k.py:TopK:keep=0.05"])
        {'/home/me/top_k.py:TopK:keep=0.05': 'top_k.py:TopK:keep=0.05'}
        >>> short_names(["a/mine.py:Mine", "b/mine.py:Mine"])
        {}
    """
    files = {spec: own_files(spec) for spec in dict.fromkeys(specs)}
    places: dict[str, set[str]] = {}
    for path in {path for paths in files.values() for path in paths}:
        places.setdefault(PurePath(path).name, set()).add(path)
    found = {}
    for spec, paths in files.items():
        text = spec
        for path in sorted(paths, key=len, reverse=True):
            if len(places[name := PurePath(path).name]) == 1:
                text = text.replace(path, name)
        if text != spec:
            found[spec] = text
    return found


def short_dataset(spec: str) -> str:
    """Return a data set's name without its folder.

    Example:
        >>> short_dataset("/home/me/scans.npz"), short_dataset("data/scans/:size=32"), short_dataset("mnist-5k")
        ('scans.npz', 'scans/:size=32', 'mnist-5k')
    """
    path, colon, settings = spec.partition(":")
    folder = "/" if path.endswith("/") else ""
    return f"{PurePath(path).name}{folder}{colon}{settings}" if "/" in path or "\\" in path else spec


def subject(settings: Mapping[str, Any]) -> str:
    """Return what was attacked or trained, without folders of the machine: the model and the data set."""
    model, dataset = (str(settings.get(key) or "?") for key in ("model", "dataset"))
    return f"{short_names([model]).get(model, model)} on {short_dataset(dataset)}"


def for_people(lines: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return rows or lines whose defences and attacks have short names."""
    lines = list(lines)
    names = short_names(line[key] for line in lines for key in SPECS if line.get(key))
    return [{**line, **{key: names[line[key]] for key in SPECS if line.get(key) in names}} for line in lines]


def named(audit: AuditFolder, gallery: Gallery) -> tuple[AuditFolder, Gallery]:
    """Return an audit and its pictures with short names; its settings and command keep the full ones."""
    things: Sequence[Any] = (*audit.cells, *gallery.lines)
    specs = [getattr(thing, key) for thing in things for key in SPECS]
    names = short_names([*audit.defences, *specs, *(row[key] or "" for row in audit.rows for key in SPECS)])
    if not names:
        return audit, gallery

    def short(thing: Any) -> Any:  # noqa: ANN401 - a cell of the plan, or a line of the gallery
        return replace(thing, **{key: names.get(getattr(thing, key), getattr(thing, key)) for key in SPECS})

    rows = tuple({**row, **{key: names[row[key]] for key in SPECS if row[key] in names}} for row in audit.rows)
    audit = replace(audit, rows=rows, cells=tuple(map(short, audit.cells)), names=names)
    return audit, replace(gallery, lines=tuple(map(short, gallery.lines)))


def failures(rows: Iterable[Mapping[str, Any]], most: int = 3) -> list[str]:
    """Return each reason why rows failed, with the defences and attacks that it stopped (at most ``most`` by name).

    Example:
        >>> row = {"defence": "none", "attack": "gs", "why": "no memory", "failed": True}
        >>> failures([row, row, row | {"attack": "dlg"}])
        ['none, gs; none, dlg: no memory (3 rows)']
    """
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row["failed"]:
            name = f"{row['defence']}, {row.get('attack') or 'training'}"
            groups.setdefault(row["why"] or "no reason given", []).append(name)
    found = []
    for why, every in groups.items():
        names = list(dict.fromkeys(every))
        rest = f" and {len(names) - most} more" if len(names) > most else ""
        found.append(f"{'; '.join(names[:most])}{rest}: {why}{f' ({len(every)} rows)' if len(every) > 1 else ''}")
    return found
