"""The command line. stdout carries results (with --json exactly one document), stderr progress and warnings.

Exit codes: 0 done, 1 failed on the way, 2 bad usage or bad input.
"""

import contextlib
import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from gradveil.config import TrainSettings, make_train_settings, read_settings, with_absolute_paths
from gradveil.data import NamedSet, data_root, load_dataset, verify
from gradveil.errors import ConfigError, GradveilError, TrainingError, UnknownNameError
from gradveil.registry import FOLDERS, build, components

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train federated models, see what their shared updates leak, and stop it.",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets: what there is, where it lies, whether it is whole.")
app.add_typer(data_app, name="data")

DataRoot = Annotated[
    Path | None, typer.Option("--data-root", help="Folder of the data sets; else GRADVEIL_DATA, else the user's cache.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


INTERRUPTED = 130
"""What typer makes of Ctrl-C."""


def main() -> None:
    """Entry point: errors that gradveil raises on purpose become one line and an exit code."""
    try:
        app()
    except TrainingError as error:
        _fail(error, 1)
    except GradveilError as error:
        _fail(error, 2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            saved = "Nothing was saved" if sys.argv[1:2] == ["attack"] else "What was finished is saved"
            again = "" if sys.argv[1:2] == ["attack"] else ": run again with --resume"
            typer.echo(f"Stopped. {saved}{again}.", err=True)
        raise


def _fail(error: GradveilError, code: int) -> None:
    kind = ConfigError if isinstance(error, UnknownNameError) else type(error)
    Console(stderr=True, soft_wrap=True).print(f"{kind.__name__}: {error}", style="red", markup=False, highlight=False)
    sys.exit(code)


def _print(document: object) -> None:
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def _show(table: Table) -> None:
    for column in table.columns:
        column.overflow = "fold"
    Console(width=None if sys.stdout.isatty() else 1000).print(table)


@app.command("list")
def list_components(
    kind: Annotated[str, typer.Argument(help=f"One of: {', '.join(FOLDERS)}; all if left out.")] = "",
    as_json: Json = False,
) -> None:
    """List components by kind, each with what it does."""
    if kind and kind not in FOLDERS:
        raise UnknownNameError("kind", kind, FOLDERS)
    found = {k: {name: _first_line(cls) for name, cls in components(k).items()} for k in ([kind] if kind else FOLDERS)}
    if as_json:
        _print(found)
        return
    for k, entries in found.items():
        table = Table("name", "what it does", title=k, title_justify="left")
        for name, text in entries.items():
            table.add_row(name, text)
        _show(table)


@app.command()
def describe(name: Annotated[str, typer.Argument(help="Name of any component.")], as_json: Json = False) -> None:
    """Show a component's documentation and its settings with their defaults."""
    every = {n: (kind, cls) for kind in FOLDERS for n, cls in components(kind).items()}
    if name not in every:
        raise UnknownNameError("component", name, every)
    kind, cls = every[name]
    settings = {field.name: field.default for field in dataclasses.fields(cls) if field.init}
    if as_json:
        _print({"name": name, "kind": kind, "doc": inspect.getdoc(cls), "settings": settings})
        return
    typer.echo(f"{name} ({kind.removesuffix('s')})\n\n{inspect.getdoc(cls)}\n")
    if settings:
        pairs = ", ".join(f"{key}={value}" for key, value in settings.items())
        typer.echo(f"Settings and defaults: {pairs}")


def _first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").splitlines()[0]


@data_app.command("list")
def list_data(root: DataRoot = None, as_json: Json = False) -> None:
    """List the named data sets and whether their files are there."""
    place = data_root(root)
    rows = []
    for name, cls in components("datasets").items():
        files = build(NamedSet, name).expected(place)
        there = sum(file.path.exists() for file in files)
        state = "there" if there == len(files) else "partly there" if there else "missing"
        rows.append({"name": name, "state": state, "what": _first_line(cls)})
    if as_json:
        _print({"root": str(place), "datasets": rows})
        return
    table = Table("name", "state", "what it is", title=f"data root: {place}", title_justify="left")
    for row in rows:
        table.add_row(*row.values())
    _show(table)


@data_app.command("path")
def data_path(root: DataRoot = None) -> None:
    """Print the folder where data sets are looked for."""
    typer.echo(data_root(root))


@data_app.command("verify")
def verify_data(
    name: Annotated[str, typer.Argument(help="A named set, a .npz file or a folder; all named sets if left out.")] = "",
    root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Check the files of a data set: checksums where the authors publish them, structure elsewhere.

    Exit code 2 where a file is corrupt, or where nothing of the named set is there.
    """
    place = data_root(root)
    if name and name not in components("datasets") and ("." in name or "/" in name):
        dataset = load_dataset(name, place)
        rows = [{"dataset": name, "file": name, "status": "ok", "detail": f"{len(dataset.train)} training images"}]
    else:
        names = [name] if name else list(components("datasets"))
        rows = [
            {"dataset": n, "file": _below(finding.file, place), "status": finding.status, "detail": finding.detail}
            for n in names
            for finding in verify(build(NamedSet, n), place)
        ]
    if as_json:
        _print({"root": str(place), "files": rows})
    else:
        table = Table("data set", "file", "status", "detail", title=f"data root: {place}", title_justify="left")
        for column in table.columns:
            column.overflow = "fold"
        for row in rows:
            table.add_row(*row.values())
        _show(table)
    states = {row["status"] for row in rows}
    if "corrupt" in states or (name and states == {"missing"}):
        raise typer.Exit(2)


def _below(path: Path, root: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _train(
    out: Path,
    config: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    data_root: Path | None = None,
    as_json: bool = False,
    **options: Any,  # noqa: ANN401 - one for each field of TrainSettings
) -> None:
    """Train a federated model; the folder OUT gets rows, curves, checkpoints and a page to look at."""
    from gradveil.train import train

    given = {key: value for key, value in options.items() if value is not None}
    saved = read_settings(out / "settings.toml") if resume and os.path.exists(out / "settings.toml") else {}
    if resume and not (saved or given or config):
        raise ConfigError(f"--resume alone needs a run in {out}, got none there. Check --out, or give the settings.")
    settings = make_train_settings({**saved, **(read_settings(config) if config else {}), **given})
    settings = with_absolute_paths(settings)
    with _progress(settings.rounds) as progress, contextlib.redirect_stdout(sys.stderr):
        result = train(settings, out, resume=resume, workers=workers, data_root=data_root, progress=progress)
    last = result.rows[-1]
    summary = {
        "out": str(out),
        "rounds": last["round"],
        "accuracy": last["accuracy"],
        "accuracy_sensitive": last["accuracy_sensitive"],
        "loss": last["loss"],
        "accuracy_own_worst_client": min(row["accuracy_own"] for row in result.clients),
        "seconds": round(result.seconds, 2),
        "data": result.note or None,
        "report": str(out / "report.html"),
    }
    if as_json:
        _print({**summary, "rows": result.rows})
        return
    table = Table("what", "value", title=f"{settings.model} on {settings.dataset}", title_justify="left")
    for key, value in summary.items():
        if value is not None:
            share = key.startswith("accuracy") and isinstance(value, float)
            number = f"{value:.2%}" if share else f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(key.replace("_", " "), number)
    _show(table)


def _train_signature() -> inspect.Signature:
    """The options of ``train``: those of `_train`, and one for each field of `TrainSettings`."""
    own = {
        "out": Annotated[Path, typer.Option(help="Folder of the run.")],
        "config": Annotated[Path | None, typer.Option(help="TOML file with the same settings; options win.")],
        "resume": Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT, with its settings.")],
        "workers": Annotated[int | None, typer.Option(help="Processes; 0 is this one only. Never changes results.")],
        "data_root": DataRoot,
        "as_json": Json,
    }
    parameters = [
        parameter.replace(annotation=own[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(_train).parameters.items()
        if name in own
    ]
    for field in dataclasses.fields(TrainSettings):
        option = f"--{field.name.replace('_', '-')}"
        flag = isinstance(field.default, bool)
        default = "none" if field.default in ("", ()) else field.default
        text = f"{field.metadata['help']} [default: {default}]"
        kind: Any = bool if flag else str
        annotation = Annotated[kind | None, typer.Option(f"{option}/--no-{option[2:]}" if flag else option, help=text)]
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    return inspect.Signature(parameters)


_train.__signature__ = _train_signature()  # type: ignore[attr-defined]
_train.__annotations__ = {name: p.annotation for name, p in _train_signature().parameters.items()}
app.command("train")(_train)


@app.command()
def attack(
    model_file: Annotated[Path, typer.Option(help="The weights as they were broadcast (safetensors).")],
    update: Annotated[
        list[Path], typer.Option(help="A client's update, tensors by name (safetensors or .npz); may be repeated.")
    ],
    spec: Annotated[Path, typer.Option(help="TOML file: model, shape, num_classes, kind, and what else is known.")],
    attack: Annotated[str, typer.Option(help="An attack with its settings, name:key=value (gradveil list attacks).")],
    out: Annotated[Path, typer.Option(help="Folder for the results, new or empty.")],
    seed: Annotated[int, typer.Option(help="Every random draw comes from this seed.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    truth: Annotated[Path | None, typer.Option(help="The private images (.npz with `images`), for scores.")] = None,
    as_json: Json = False,
) -> None:
    """Rebuild private images from updates that any framework saved; the folder OUT gets pictures and rows."""
    from gradveil.attack_files import attack_files
    from gradveil.update_spec import read_spec

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, contextlib.redirect_stdout(sys.stderr):
        progress.add_task(f"attacking {len(update)} update{'s' * (len(update) > 1)} with {attack}", total=None)
        rows = attack_files(model_file, update, read_spec(spec), attack, out, seed=seed, device=device, truth=truth)
    if as_json:
        _print({"out": str(out), "rows": rows})
        return
    labels = "known labels" if "labels" in rows[0]["knows"] else "guessed labels"
    table = Table("target", labels, "attacker's loss", "converged", "psnr", "why", title=attack, title_justify="left")
    for row in rows:
        table.add_row(
            str(row["target"]),
            " ".join(map(str, row["labels"])),
            _figure(row["attacker_loss"]),
            "yes" if row["converged"] else "attack did not converge",
            _figure(row["psnr"]),
            row["why"],
        )
    _show(table)
    typer.echo(f"Look at them: {out / 'images'}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@contextmanager
def _progress(rounds: int) -> Iterator[Any]:
    """A live display of the rounds on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("setting up", total=rounds, figures="")

        def show(done: int, row: Mapping[str, Any] | None, doing: str) -> None:
            figures = f"accuracy {row['accuracy']:.2%}" if row and row["accuracy"] is not None else ""
            progress.update(task, completed=done, description=doing)
            if figures:
                progress.update(task, figures=figures)

        yield show


if __name__ == "__main__":
    main()
