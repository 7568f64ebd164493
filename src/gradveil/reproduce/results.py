"""Results as data: ``results/PAPER/EXPERIMENT.json`` holds all runs of one experiment, of any scale and seed."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from gradveil.reproduce.base import SCALES
from gradveil.reproduce.claims import Run, at_largest_scale, mean_and_spread
from gradveil.reproduce.provenance import as_one, source_digests
from gradveil.storage import write_atomic

MOST_PIXELS = 800
"""The longer side of a kept picture."""


@dataclass(frozen=True)
class Record:
    """All runs of one experiment.

    Attributes:
        title: what the experiment shows.
        runs: the documents of its runs, which name their sources by one digest.
        sources: the digests of all source files by that digest.
    """

    title: str
    runs: Sequence[Run]
    sources: Mapping[str, Mapping[str, str]]

    @property
    def largest(self) -> list[Run]:
        """The runs of the largest scale, by seed."""
        return at_largest_scale(self.runs)

    def changed(self, paper: str) -> list[str]:
        """Return the source files that changed since any of the largest runs."""
        now = source_digests(f"gradveil.reproduce.{paper}")
        then = [self.sources[run["sources"]] for run in self.largest]
        return sorted(
            name
            for name in {*now, *(key for one in then for key in one)}
            if any(now.get(name) != one.get(name) for one in then)
        )


def record_of(documents: Sequence[Mapping[str, Any]]) -> Record:
    """Return the record of several documents of one experiment."""
    sources = {as_one(document["sources"]): document["sources"] for document in documents}
    runs = [{**document, "sources": as_one(document["sources"])} for document in documents]
    return Record(documents[0]["title"], runs, sources)


def read_records(folder: Path) -> dict[str, Record]:
    """Return the records of one paper's folder by the name of the experiment."""
    found = {path.stem: json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))}
    return {name: Record(**content) for name, content in found.items()}


def keep(document: Mapping[str, Any], made: Path, results: Path) -> Path:
    """Add a document to the record of its experiment, in place of one of the same scale and seed; return the file.

    The pictures of the run with the lowest seed of the largest scale are kept beside it.

    Args:
        document: what `gradveil.reproduce.base.run_experiment` returned.
        made: the folder that it wrote.
        results: the folder of all results.
    """
    path = results / str(document["paper"]) / f"{document['table']}.json"
    old = Record(**json.loads(path.read_bytes())) if path.exists() else Record("", [], {})
    new = record_of([document])
    others = [run for run in old.runs if (run["scale"], run["seed"]) != (document["scale"], document["seed"])]
    runs = sorted([*others, *new.runs], key=lambda run: (SCALES.index(run["scale"]), run["seed"]))
    used = {run["sources"] for run in runs}
    sources = {name: files for name, files in {**old.sources, **new.sources}.items() if name in used}
    lines = ",\n".join(json.dumps(run, allow_nan=False) for run in runs)
    content = f'{{"title": {json.dumps(new.title)},\n"runs": [\n{lines}\n],\n"sources": {json.dumps(sources)}}}\n'
    write_atomic(path, content.encode())
    if at_largest_scale(runs)[0]["seed"] == document["seed"] and runs[-1]["scale"] == document["scale"]:
        for figure in document["figures"]:
            _small_copy(made / f"{figure}.png", path.with_name(f"{path.stem}-{figure}.png"))
    return path


def _small_copy(source: Path, target: Path) -> None:
    """Copy a picture with fewer pixels and colours, since it is kept with the sources."""
    with Image.open(source) as picture:
        drawn = picture.convert("RGB")
    drawn.thumbnail((MOST_PIXELS, MOST_PIXELS))
    drawn.quantize(64).save(target, optimize=True)


def rows_over_seeds(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the rows of several seeds as one table: means with their spread where rows differ in a number.

    Runs whose rows don't correspond, since texts in them differ, can't be merged: then the rows of the first seed are
    returned, and a column says so.
    """
    tables = [run["rows"] for run in runs]
    if len({len(rows) for rows in tables}) > 1:
        return [{**row, "seeds": "first only"} for row in tables[0]]
    return [_merged(rows) for rows in zip(*tables, strict=True)]


def _merged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: _over([row.get(key) for row in rows]) for key in keys}


def _over(values: Sequence[Any]) -> Any:  # noqa: ANN401 - cells of rows
    """Return one cell for the cells of several seeds.

    Example:
        >>> _over([1.0, 2.0]), _over(["a", "a"]), _over([None, 3.0]), _over(["7 of 8", "8 of 8"])
        ('1.5 (1 to 2)', 'a', '3 (1 of 2 seeds)', '7 of 8; 8 of 8')
    """
    known = [value for value in values if value is not None]
    if not known or all(value == values[0] for value in values):
        return values[0]
    if any(isinstance(value, (str, bool, list)) for value in known):
        return "; ".join(map(str, known))
    few = f" ({len(known)} of {len(values)} seeds)" if len(known) < len(values) else ""
    return (mean_and_spread(known) if len(known) > 1 else f"{statistics.fmean(known):.3g}") + few
