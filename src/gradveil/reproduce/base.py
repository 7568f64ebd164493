"""The building blocks of a reproduced experiment, and the folder that receives its results."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure
from torch import Tensor

from gradveil.engines.run_folder import RunFolder
from gradveil.errors import DataError, RunFolderError
from gradveil.report.files import save_figure
from gradveil.reproduce.provenance import as_one, versions
from gradveil.storage import load_tensors, save_tensors, write_atomic
from gradveil.types import Tensors

SCALES = ("smoke", "small", "full")
"""smoke takes under a minute, small takes minutes to an hour on two cores, full is the scale of the paper."""

V = TypeVar("V")


@dataclass(frozen=True)
class Lab:
    """The place and the scale of an experiment.

    An experiment consists of parts, for example a training or an attack. The result of each finished part is kept.
    An interrupted experiment therefore resumes with the missing parts, and experiments of one paper share parts.

    Attributes:
        out: the folder of this experiment.
        scale: smoke, small or full.
        seed: the seed of every random draw.
        data_root: the folder that holds the data sets.
        workers: number of processes; None starts one per core.
        progress: called with the finished share of the work and a description of the current step.
        parts: the folder that keeps the results of finished parts; None keeps them below ``out``.
        sources: digests of the source files that the paper's experiments depend on, by path in the package.
        data: digests of the data files that they can read, by path below the data root.
    """

    out: Path
    scale: str = "small"
    seed: int = 0
    data_root: Path | None = None
    workers: int | None = None
    progress: Callable[[float, str], None] = lambda share, doing: None
    parts: Path | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)

    def pick(self, smoke: V, small: V, full: V) -> V:
        """Return the value that belongs to this scale."""
        return {"smoke": smoke, "small": small, "full": full}[self.scale]

    def telling(self, doing: str, number: int = 0, parts: int = 1) -> Callable[[float], None]:
        """Return a function that reports the progress of part ``number`` out of ``parts`` equal parts."""
        return lambda share: self.progress((number + share) / parts, doing)

    def once(self, part: object, work: Callable[[], V]) -> V:
        """Return the kept result of a part, or call ``work`` and keep what it returns.

        Args:
            part: the part's name and everything that it depends on besides the lab; its `repr` identifies it.
            work: computes the result, which JSON must be able to hold: numbers, texts, lists, dicts with text keys.
        """
        path = self._part(part).with_suffix(".json")
        try:
            result: V = json.loads(path.read_bytes())["result"]
        except (OSError, ValueError, KeyError, TypeError):
            content = json.dumps({"part": repr(part), "result": work()})
            write_atomic(path, content.encode())
            result = json.loads(content)["result"]
        return result

    def tensors_once(self, part: object, work: Callable[[], Tensors]) -> Tensors:
        """Do the same as `once` for a mapping of tensors by name."""
        return load_tensors(self.tensors_file(part, work))

    def tensors_file(self, part: object, work: Callable[[], Tensors]) -> Path:
        """Do the same as `tensors_once`, but return the path of the file."""
        path = self._part(part).with_suffix(".safetensors")
        try:
            load_tensors(path)
        except DataError:
            save_tensors(path, work(), {"part": repr(part)})
        return path

    @property
    def kept(self) -> Path:
        """The folder that keeps the results of finished parts."""
        return self.parts or self.out / "parts"

    @property
    def origin(self) -> str:
        """One digest of the sources and the data."""
        return as_one({**self.sources, **{f"data {name}": own for name, own in self.data.items()}})

    def _part(self, part: object) -> Path:
        """Return a part's path without suffix; it depends on sources, data, scale and seed as well."""
        facts = repr((self.origin, self.scale, self.seed, part))
        return self.kept / hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Result:
    """The result of an experiment.

    Attributes:
        rows: one per line of the table; keys that start with ``paper`` hold the paper's own figures.
        notes: facts to know before comparing, such as what is smaller than in the paper or differs from it.
        figures: plots by name.
    """

    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper.

    Attributes:
        title: what the table or figure shows.
        run: computes the result.
    """

    title: str
    run: Callable[[Lab], Result]


@dataclass(frozen=True)
class Paper:
    """A paper and its experiments by the name that users type, such as ``1`` for Table 1 or ``fig3``."""

    name: str
    reference: str
    experiments: Mapping[str, Experiment]


def run_experiment(paper: Paper, name: str, lab: Lab) -> dict[str, Any]:
    """Run one experiment in its folder, unless the folder holds its result already, and return its document.

    A result counts as long as the sources and the data are the same. The folder receives results.md, results.json and
    the figures; results.json is written last.
    """
    settings = {"paper": paper.name, "table": name, "scale": lab.scale, "seed": lab.seed}
    finished = _finished(lab.out, settings)
    if finished is not None and all(finished.get(name) == vars(lab)[name] for name in ("sources", "data")):
        return finished
    experiment = paper.experiments[name]
    started = time.monotonic()
    with RunFolder(lab.out):
        result = experiment.run(lab)
        document = {
            **settings,
            "title": experiment.title,
            "command": command(paper.name, name, lab.scale, lab.seed),
            "date": datetime.now(UTC).date().isoformat(),
            "seconds": round(time.monotonic() - started),
            "versions": versions(),
            "sources": dict(lab.sources),
            "data": dict(lab.data),
            "notes": list(result.notes),
            "rows": [dict(r) for r in result.rows],
            "figures": sorted(result.figures),
        }
        for figure_name, figure in result.figures.items():
            for kind in ("png", "svg"):
                save_figure(figure, lab.out / f"{figure_name}.{kind}")
        write_atomic(lab.out / "results.md", to_markdown(document).encode())
        write_atomic(lab.out / "results.json", json.dumps(document, indent=1, allow_nan=False).encode())
    return document


def command(paper: str, table: str, scale: str = "small", seed: int = 0) -> str:
    """Return the command that runs an experiment.

    Example:
        >>> command("loda", "5")
        'gradveil reproduce loda --table 5 --scale small --data-root DIR --out runs/loda'
    """
    seeded = f" --seed {seed}" if seed else ""
    return f"gradveil reproduce {paper} --table {table} --scale {scale}{seeded} --data-root DIR --out runs/{paper}"


def to_markdown(document: Mapping[str, Any]) -> str:
    """Format a document as a Markdown table with its notes."""
    title = f"## {document['paper']}, {document['table']}: {document['title']}"
    head = f"{title}\n\nScale {document['scale']}, seed {document['seed']}.\n"
    notes = "".join(f"\n- {note}" for note in document["notes"])
    return "\n".join([head, rows_table(document["rows"])]) + "\n" + (f"{notes}\n" if notes else "")


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as a Markdown table with a column for each key."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(column.replace("_", " ") for column in columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def picture_lines(lines: Mapping[str, Tensor], most: int = 8) -> Figure:
    """Draw one row of at most ``most`` images for each name, (N, C, H, W) in [0, 1]; NaN pixels are grey."""
    count = min(most, len(next(iter(lines.values()))))
    figure = Figure(figsize=(2.4 + 0.9 * count, 0.95 * len(lines)), layout="constrained")
    grid = figure.subplots(len(lines), count, squeeze=False)
    for line, (name, images) in zip(grid, lines.items(), strict=True):
        for axes, image in zip(line, images, strict=False):
            picture = image.nan_to_num(0.5).clamp(0, 1).permute(1, 2, 0).squeeze(-1).numpy()
            axes.imshow(picture, cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    return figure


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Round a number to ``digits`` significant digits; return None if it is None or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _finished(out: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the document of a finished run, or None; raise RunFolderError if it is of another experiment."""
    path = out / "results.json"
    if not path.exists():
        return None
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError:
        return None
    changed = [
        f"{key} = {value!r} (was {document.get(key)!r})"
        for key, value in settings.items()
        if document.get(key) != value
    ]
    if changed:
        raise RunFolderError(
            f"{out} must be new or hold the same experiment, but {'; '.join(changed)}. Choose another --out."
        )
    return document
