"""The commands that leave a folder of a run: train, audit, report and reproduce."""

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gradveil.cli.before import goes_on, look_ahead
from gradveil.cli.display import DataRoot, Json, bar, print_json, say, show
from gradveil.cli.gate import close
from gradveil.cli.options import Seed, Workers
from gradveil.config import make_train_settings, read_settings, with_absolute_paths
from gradveil.own import trusting_code
from gradveil.runs.given import fresh_folder, given_settings


def train_command(
    out: Path,
    config: Path | None = None,
    resume: bool = False,
    trust_code: bool = False,
    workers: int | None = None,
    data_root: Path | None = None,
    as_json: bool = False,
    **options: Any,  # noqa: ANN401 - one for each field of TrainSettings
) -> None:
    """Train a federated model; write rows, curves, checkpoints and a page to the folder OUT."""
    from rich.table import Table

    from gradveil.federated.learning import warning_of
    from gradveil.metrics.epsilon_hat import MEASURED, exceeding
    from gradveil.models.frozen import random_trunk
    from gradveil.report.names import subject
    from gradveil.report.training import warnings_of
    from gradveil.runs.train import train

    given = given_settings("train", options, config, out, resume, trust_code=trust_code)
    settings = with_absolute_paths(make_train_settings(given))
    if warning := random_trunk(settings.model):
        say(f"Warning: {warning}", err=True)
    said: list[str] = []
    with bar("rounds") as move, contextlib.redirect_stdout(sys.stderr), trusting_code(trust_code):

        def progress(done: int, row: Mapping[str, Any] | None, doing: str) -> None:
            warning = warning_of(row, settings) if row else ""
            if warning and not said and done < settings.rounds:
                said.append(warning)
                say(f"Warning: {warning}", err=True)
            accuracy = row["accuracy"] if row else None
            move(done, settings.rounds, doing, "" if accuracy is None else f"accuracy {accuracy:.2%}")

        result = train(settings, out, resume=resume, workers=workers, data_root=data_root, progress=progress)
    last = result.rows[-1]
    warned = [row["tripwire_warnings"] for row in result.rows if "tripwire_warnings" in row]
    summary = {
        "out": str(out),
        "rounds": last["round"],
        "accuracy": last["accuracy"],
        "accuracy_balanced": last.get("accuracy_balanced"),
        "accuracy_majority": last.get("accuracy_majority"),
        "accuracy_sensitive": last["accuracy_sensitive"],
        "loss": last["loss"],
        **{key: last.get(key) for key in ("epsilon", "mu", "identified_bound")},
        **{key: last.get(key) for key in MEASURED},
        "accuracy_own_worst_client": min(row["accuracy_own"] for row in result.clients),
        "tripwire_warnings": sum(warned) if warned else None,
        "seconds": round(result.seconds, 2),
        "data": result.note or None,
        "report": str(out / "report.html"),
    }
    if result.warning:
        say(f"Warning: {result.warning}", err=True)
    if last.get("canaries_exceed"):
        say(f"Warning: {settings.defence}: {exceeding(last)}", err=True)
    if as_json:
        print_json({**summary, "warning": result.warning or None, "rows": result.rows})
        return
    table = Table("what", "value", title=subject(vars(settings)), title_justify="left")
    for key, value in summary.items():
        if value is not None:
            share = key.startswith("accuracy") and isinstance(value, float)
            number = f"{value:.2%}" if share else f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(key.replace("_", " "), number)
    if any(warned):
        say(warnings_of(result.rows))
    show(table)


def audit_command(  # noqa: PLR0913 - one parameter per option of the command line
    out: Path | None = None,
    config: Path | None = None,
    resume: bool = False,
    trust_code: bool = False,
    workers: int | None = None,
    data_root: Path | None = None,
    as_json: bool = False,
    fail_on: list[str] | None = None,
    yes: bool = False,
    only_estimate: bool = False,
    **options: Any,  # noqa: ANN401 - one for each field of AuditSettings
) -> None:
    """Run attacks against defences, measure what each defence costs, and write a page that shows what leaked.

    Exit code 3 if a criterion of --fail-on is met; 1 if a cell failed: its reason is in the rows, and --resume tries it
    again.
    """
    from gradveil.audits import audit, make_audit_settings
    from gradveil.cli.tables import WIDTH, audit_table, canary_sentence, membership_table
    from gradveil.models.frozen import random_trunk
    from gradveil.report.blind import blind_lines
    from gradveil.report.criteria import fields_of, parse_criteria
    from gradveil.report.flags import explained
    from gradveil.report.names import failures, for_people, subject
    from gradveil.report.recovered import recovered
    from gradveil.report.summary import with_costs
    from gradveil.runs.check import verdicts_of

    out = out or fresh_folder("audit", resume)
    settings = make_audit_settings(given_settings("audit", options, config, out, resume, trust_code=trust_code))
    parse_criteria(fail_on or (), fields_of(settings.schema))
    if warning := random_trunk(settings.model):
        say(f"Warning: {warning}", err=True)
    with trusting_code(trust_code):
        ahead = look_ahead(settings, out, workers, data_root)
    if not goes_on(ahead, yes=yes, only=only_estimate, as_json=as_json):
        return
    with bar("cells") as move, contextlib.redirect_stdout(sys.stderr), trusting_code(trust_code):
        result = audit(settings, out, resume=resume, workers=workers, data_root=data_root, progress=move)
    verdicts = verdicts_of(result, fail_on or ())
    summary, prices, told = result.summary, result.utility, result.membership
    told_apart = recovered(result.rows, result.schema, result.left_out)
    if as_json:
        document = {
            "out": str(out),
            "report": str(result.report),
            "seconds": round(result.seconds, 2),
            "data": result.note or None,
            "failed": result.failed,
            "left_out": result.left_out,
            "recovered": told_apart,
            "blind": blind_lines(result.rows, result.schema),
            "verdicts": [{"criterion": v.criterion, "met": v.met, "reason": v.reason} for v in verdicts],
            "summary": summary,
            "utility": prices,
            **({"membership": told} if told else {}),
            "rows": result.rows,
        }
        print_json(document)
    else:
        title = subject(vars(settings))
        if summary or not told:
            lines = [*blind_lines(result.rows, result.schema), *summary]
            show(audit_table(title, with_costs(lines, prices, result.schema), result.schema), WIDTH)
            for sentence in explained(for_people(summary)):
                say(sentence)
        if told:
            show(membership_table(f"{title}: membership", told, result.schema), WIDTH)
        if measured := canary_sentence(for_people(prices), result.schema):
            say(measured)
        for name, text in told_apart.items():
            say(f"{name}: {text}")
        say(f"Look at it: {result.report.resolve()}")
    alarms = [x for x in for_people(prices) if x["at_chance"] or x["canaries_exceed"]]
    warnings = [f"Warning: {x['defence']}: {x['why']}" for x in alarms]
    not_run = [f"Not run: {spec}: {why}" for spec, why in result.left_out.items()]
    failed = [f"Failed: {reason}" for reason in failures(for_people(result.rows))]
    for text in (*warnings, *not_run, *failed):
        say(text, err=True)
    close(verdicts, failed=bool(result.failed))


def report_command(
    folder: Annotated[Path, typer.Argument(help="Folder of an audit or a training.")],
    pdf: Annotated[bool, typer.Option("--pdf", help="Also print the page as report.pdf (Chromium or Chrome).")] = False,
    as_json: Json = False,
) -> None:
    """Write the page of a run again from the files in its folder, also for a run that is not finished.

    What is missing or does not fit together is said on stderr and on the page.
    """
    from gradveil.report.audit import write_report
    from gradveil.report.audit_folder import read_audit
    from gradveil.report.browser import print_pdf
    from gradveil.report.training import rewrite_page
    from gradveil.report.training_folder import read_training

    settings = read_settings(folder / "settings.toml") if (folder / "settings.toml").is_file() else {}
    trained = "defence" in settings
    page = rewrite_page(folder) if trained else write_report(folder)
    notes = read_training(folder).notes if trained else read_audit(folder).notes
    printed = print_pdf(page) if pdf else None
    if as_json:
        print_json({"report": str(page), "pdf": str(printed) if printed else None, "notes": list(notes)})
    else:
        say(f"Look at it: {printed or page}")
    for note in notes:
        say(f"Note: {note}", err=True)


def reproduce_command(  # noqa: PLR0913 - one argument for each option
    paper: Annotated[str, typer.Argument(help="A paper; all of its experiments run unless --table names one.")],
    out: Annotated[Path, typer.Option(help="Folder for the results, with a subfolder per experiment.")],
    table: Annotated[str, typer.Option(help="One table or figure: 1, fig3, ...")] = "",
    scale: Annotated[
        str, typer.Option(help="smoke (a minute), small (minutes to an hour) or full (the paper's).")
    ] = "small",
    seed: Seed = 0,
    results: Annotated[
        Path | None, typer.Option(help="Also add the results to this folder, as results/ has them.")
    ] = None,
    workers: Workers = None,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Repeat a paper's experiments, and print its figures beside ours and a verdict on each claim.

    Finished experiments are not run again unless their sources or data changed.
    """
    from gradveil.reproduce import papers, reproduce
    from gradveil.reproduce.base import to_markdown
    from gradveil.reproduce.pages import counted, judged, records_below

    with bar("") as move, contextlib.redirect_stdout(sys.stderr):
        documents = reproduce(
            paper,
            table,
            out=out,
            scale=scale,
            seed=seed,
            results=results,
            workers=workers,
            data_root=data_root,
            progress=lambda share, doing: move(share, 1, doing),
        )
    chosen = papers()[paper]
    verdicts = judged(chosen, records_below(chosen, out))
    if as_json:
        told = [{"claim": one.claim.id, "verdict": one.verdict, "why": one.why} for one in verdicts]
        print_json({"out": str(out), "experiments": documents, "verdicts": told})
        return
    for document in documents:
        say(to_markdown(document))
    say(f"{counted(verdicts)}.")
    say(f"Look at them: {out / f'{paper}.html'}")
