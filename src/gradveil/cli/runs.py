"""The commands that leave a folder of a run: train, audit, report and reproduce."""

import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from gradveil.cli.display import DataRoot, Json, bar, print_json, show
from gradveil.cli.tables import audit_table, membership_table
from gradveil.config import make_train_settings, read_settings, with_absolute_paths
from gradveil.errors import ConfigError, RunFolderError


def train_command(
    out: Path,
    config: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    data_root: Path | None = None,
    as_json: bool = False,
    **options: Any,  # noqa: ANN401 - one for each field of TrainSettings
) -> None:
    """Train a federated model; the folder OUT gets rows, curves, checkpoints and a page to look at."""
    from gradveil.report.training import warnings_of
    from gradveil.runs.train import train

    settings = with_absolute_paths(make_train_settings(_given("train", options, config, out, resume)))
    with bar("rounds") as move, contextlib.redirect_stdout(sys.stderr):

        def progress(done: int, row: Mapping[str, Any] | None, doing: str) -> None:
            accuracy = row["accuracy"] if row else None
            move(done, settings.rounds, doing, "" if accuracy is None else f"accuracy {accuracy:.2%}")

        result = train(settings, out, resume=resume, workers=workers, data_root=data_root, progress=progress)
    last = result.rows[-1]
    warned = [row["tripwire_warnings"] for row in result.rows if "tripwire_warnings" in row]
    summary = {
        "out": str(out),
        "rounds": last["round"],
        "accuracy": last["accuracy"],
        "accuracy_sensitive": last["accuracy_sensitive"],
        "loss": last["loss"],
        "accuracy_own_worst_client": min(row["accuracy_own"] for row in result.clients),
        "tripwire_warnings": sum(warned) if warned else None,
        "seconds": round(result.seconds, 2),
        "data": result.note or None,
        "report": str(out / "report.html"),
    }
    if as_json:
        print_json({**summary, "rows": result.rows})
        return
    table = Table("what", "value", title=f"{settings.model} on {settings.dataset}", title_justify="left")
    for key, value in summary.items():
        if value is not None:
            share = key.startswith("accuracy") and isinstance(value, float)
            number = f"{value:.2%}" if share else f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(key.replace("_", " "), number)
    if any(warned):
        typer.echo(warnings_of(result.rows))
    show(table)


def audit_command(
    out: Path | None = None,
    config: Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    data_root: Path | None = None,
    as_json: bool = False,
    **options: Any,  # noqa: ANN401 - one for each field of AuditSettings
) -> None:
    """Set defences against attacks and measure what each defence costs; ends in a page that shows what leaked.

    Exit code 1 where a cell failed: its reason is in the rows, and --resume tries it again.
    """
    from gradveil.audits import audit, make_audit_settings
    from gradveil.report.summary import membership, summarise, utility

    out = out or _fresh(resume)
    settings = make_audit_settings(_given("audit", options, config, out, resume))
    with bar("cells") as move, contextlib.redirect_stdout(sys.stderr):
        result = audit(settings, out, resume=resume, workers=workers, data_root=data_root, progress=move)
    summary, prices, told = summarise(result.rows), utility(result.rows), membership(result.rows)
    if as_json:
        document = {
            "out": str(out),
            "report": str(result.report),
            "seconds": round(result.seconds, 2),
            "data": result.note or None,
            "failed": result.failed,
            "summary": summary,
            "utility": prices,
            **({"membership": told} if told else {}),
            "rows": result.rows,
        }
        print_json(document)
    else:
        title = f"{settings.model} on {settings.dataset}"
        if summary or not told:
            show(audit_table(title, summary, prices))
        if told:
            show(membership_table(f"{title}: membership", told, prices))
        typer.echo(f"Look at it: {result.report.resolve()}")
    for title in dict.fromkeys(result.failed.values()):
        typer.echo(f"Failed: {title}", err=True)
    if result.failed:
        raise typer.Exit(1)


def report_command(
    folder: Annotated[Path, typer.Argument(help="Folder of an audit or a training.")], as_json: Json = False
) -> None:
    """Write the page of a run again, from what is in its folder; an unfinished audit's says how far it is."""
    from gradveil.report.audit import write_report
    from gradveil.report.training import rewrite_page

    settings = read_settings(folder / "settings.toml") if (folder / "settings.toml").is_file() else {}
    page = rewrite_page(folder) if "defence" in settings else write_report(folder)
    if as_json:
        print_json({"report": str(page)})
    else:
        typer.echo(f"Look at it: {page}")


def reproduce_command(
    paper: Annotated[str, typer.Argument(help="A paper's name; without --table all of its experiments.")],
    out: Annotated[Path, typer.Option(help="Folder; each experiment has one of its own in it.")],
    table: Annotated[str, typer.Option(help="One table or figure: 1, fig3, ...")] = "",
    scale: Annotated[
        str, typer.Option(help="smoke (a minute), small (minutes to an hour) or full (the paper's).")
    ] = "small",
    seed: Annotated[int, typer.Option(help="Every random draw comes from this seed.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes; 0 is this one only. Never changes results.")] = None,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Run a paper's experiments again, with the paper's figures beside; finished ones are not run twice."""
    from gradveil.reproduce import reproduce
    from gradveil.reproduce.base import to_markdown

    with bar("") as move, contextlib.redirect_stdout(sys.stderr):
        documents = reproduce(
            paper,
            table,
            out=out,
            scale=scale,
            seed=seed,
            workers=workers,
            data_root=data_root,
            progress=lambda share, doing: move(share, 1, doing),
        )
    if as_json:
        print_json({"out": str(out), "experiments": documents})
        return
    for document in documents:
        typer.echo(to_markdown(document))
    typer.echo(f"Look at them: {out}")


def _fresh(resume: bool) -> Path:
    """The folder of an audit that was not given one."""
    if resume:
        raise ConfigError("--resume goes on with a run, got no --out that says which.")
    return Path("runs") / f"audit-{datetime.now():%Y%m%d-%H%M%S-%f}"


def _given(kind: str, options: Mapping[str, Any], config: Path | None, out: Path, resume: bool) -> dict[str, Any]:
    """The settings of a run: those it was begun with, those of the file, and the options; the later win."""
    given = {key: value for key, value in options.items() if value is not None}
    saved = read_settings(out / "settings.toml") if resume and os.path.exists(out / "settings.toml") else {}
    if resume and not (saved or given or config):
        raise ConfigError(f"--resume alone needs a run in {out}, got none there. Check --out, or give the settings.")
    if saved and ("kind" in saved) != (kind == "audit"):
        raise RunFolderError(
            f"{out} must hold a run of gradveil {kind} to go on with, got another. Choose another --out."
        )
    return {**saved, **(read_settings(config) if config else {}), **given}


NEW = " By default a new one below runs, named by the time."


def with_options(command: Callable[..., None], settings: type, out: str = "Folder of the run.") -> Callable[..., None]:
    """The command with an option for each field of a settings class, beside its own; ``out`` explains --out."""
    optional = inspect.signature(command).parameters["out"].default is None
    own = {
        "out": Annotated[Path | None if optional else Path, typer.Option(help=out + NEW if optional else out)],
        "config": Annotated[Path | None, typer.Option(help="TOML file with the same settings; options win.")],
        "resume": Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT, with its settings.")],
        "workers": Annotated[int | None, typer.Option(help="Processes; 0 is this one only. Never changes results.")],
        "data_root": DataRoot,
        "as_json": Json,
    }
    parameters = [
        parameter.replace(annotation=own[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name in own
    ]
    for field in dataclasses.fields(settings):
        option = f"--{field.name.replace('_', '-')}"
        flag = isinstance(field.default, bool)
        text = f"{field.metadata['help']} (default: {_default(field.default)})"
        kind: Any = bool if flag else str
        name, shown = f"{option}/--no-{option[2:]}" if flag else option, None if flag else _metavar(field.default)
        annotation = Annotated[kind | None, typer.Option(name, help=text, metavar=shown)]
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _metavar(value: object) -> str:
    """What kind of value an option takes, by its default."""
    return {int: "INTEGER", float: "NUMBER", tuple: "LIST"}.get(type(value), "TEXT")


def _default(value: object) -> object:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value == "" else value
