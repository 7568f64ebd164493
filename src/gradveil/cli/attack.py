"""The command that attacks saved updates."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.completion import completion_of
from gradveil.cli.display import Json, bar, figure, print_json, say, show
from gradveil.cli.gate import FailOn, close
from gradveil.cli.options import Device, Seed, TrustCode
from gradveil.own import trusting_code
from gradveil.progress import listening

STANDARD = "mse,psnr,ssim,lpips"
"""The metrics of rows, unless others are chosen."""


def attack_command(  # noqa: PLR0913 - its arguments are the options of the command
    model_file: Annotated[Path, typer.Option(help="The weights that the server broadcast (safetensors).")],
    update: Annotated[
        list[Path], typer.Option(help="Update of a client, tensors by name (safetensors or .npz); may be repeated.")
    ],
    spec: Annotated[Path, typer.Option(help="TOML file with model, shape, num_classes, kind, and other known facts.")],
    attack: Annotated[
        str,
        typer.Option(
            help="An attack with its settings, name:key=value (gradveil list attacks).",
            autocompletion=completion_of("attacks"),
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results, new or empty.")],
    seed: Seed = 0,
    device: Device = "cpu",
    truth: Annotated[Path | None, typer.Option(help="The private images (.npz with `images`), for scores.")] = None,
    metrics: Annotated[
        str,
        typer.Option(
            help="Metrics, a list (gradveil list metrics), or your own file.py:Class.",
            autocompletion=completion_of("metrics"),
        ),
    ] = STANDARD,
    fail_on: FailOn = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Rebuild private images from updates that any framework saved; write pictures and rows to the folder OUT."""
    from rich.table import Table

    from gradveil.metrics.columns import build_metric, metric_column
    from gradveil.registry import split_specs
    from gradveil.report.criteria import fields_of, judge_rows, parse_criteria
    from gradveil.runs.attack import Scoring, attack_files
    from gradveil.runs.update_spec import read_spec

    scoring = Scoring(truth, tuple(split_specs(metrics)))
    criteria = parse_criteria(fail_on or (), fields_of(scoring.schema, ("attack",)))
    doing = f"attacking {len(update)} update{'s' * (len(update) > 1)} with {attack}"
    with (
        bar("") as move,
        listening(lambda share: move(share, 1, doing)),
        contextlib.redirect_stdout(sys.stderr),
        trusting_code(trust_code),
    ):
        move(0, 1, doing)
        rows = attack_files(
            model_file,
            update,
            read_spec(spec),
            attack,
            out,
            seed=seed,
            device=device,
            scoring=scoring,
            told=lambda text: say(f"Diagnosis: {text}", err=True),
        )
    verdicts = judge_rows(criteria, rows)
    if as_json:
        found = [{"criterion": v.criterion, "met": v.met, "reason": v.reason} for v in verdicts]
        print_json({"out": str(out), "verdicts": found, "rows": rows})
        close(verdicts)
        return
    labels = "known labels" if "labels" in rows[0]["knows"] else "guessed labels"
    chosen = [metric_column(build_metric(name)) for name in scoring.metrics] if metrics != STANDARD else []
    shown = [column.key for column in chosen] or ["psnr"]
    heads = ("target", labels, "attacker's loss", "converged", *shown)
    table = Table(*heads, title=attack, title_justify="left")
    for row in rows:
        table.add_row(
            str(row["target"]),
            shortened(row["labels"]),
            figure(row["attacker_loss"]),
            "yes" if row["converged"] else "attack did not converge",
            *(figure(row[key]) for key in shown),
        )
    show(table)
    for why in dict.fromkeys(filter(None, (row["why"] for row in rows))):
        targets = [str(row["target"]) for row in rows if row["why"] == why]
        say(f"Target{'s' * (len(targets) > 1)} {', '.join(targets)}: {why}")
    for note in dict.fromkeys(note for row in rows for note in row["unmeasured"]):
        say(f"Not measured: {note}", err=True)
    say(f"Look at them: {out / 'images'}")
    close(verdicts)


def shortened(labels: Sequence[int], most: int = 12) -> str:
    """Return labels for a table: only the first of many, a question mark for each that was not guessed (-1).

    Example:
        >>> shortened(range(100), most=3), shortened([4, -1]), shortened([-1] * 8)
        ('0 1 2 ... (100)', '4 ?', 'none')
    """
    if all(label < 0 for label in labels):
        return "none"
    shown = " ".join("?" if label < 0 else str(label) for label in labels[:most])
    return shown if len(labels) <= most else f"{shown} ... ({len(labels):,})"
