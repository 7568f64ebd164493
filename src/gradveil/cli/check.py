"""The command that checks one's own model on one's own data."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.completion import completion_of
from gradveil.cli.display import DataRoot, Json, bar, print_json, say
from gradveil.cli.gate import FailOn, close
from gradveil.cli.options import Device, Seed, Workers

AUDITED = ("attacks", "targets", "images", "rounds", "clients", "lr", "batch_norm", "knows", "seeds")
"""Settings of an audit that are options of a check; unless given, they have the check's own defaults."""


def check_command(  # noqa: PLR0913 - one parameter per option of the command line
    model: Annotated[
        str,
        typer.Argument(help="A model of the zoo or your own file.py:factory.", autocompletion=completion_of("model")),
    ],
    dataset: Annotated[
        str,
        typer.Option(help="A named set, a .npz file or a folder of pictures.", autocompletion=completion_of("dataset")),
    ],
    defence: Annotated[
        str, typer.Option(help="A defence with its settings, name:key=value.", autocompletion=completion_of("defence"))
    ] = "none",
    protocol: Annotated[str, typer.Option(help="lab (single gradients) or fedavg (local training).")] = "lab",
    attacks: Annotated[
        str | None,
        typer.Option(help="Attacks, a list (gradveil list attacks).", autocompletion=completion_of("attacks")),
    ] = None,
    targets: Annotated[int | None, typer.Option(help="Attacked clients per tapped round.")] = None,
    images: Annotated[int | None, typer.Option(help="Images behind each update, with --protocol lab.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training; first and last are attacked.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the clients' SGD.")] = None,
    batch_norm: Annotated[str | None, typer.Option(help="average, local or freeze.")] = None,
    knows: Annotated[str | None, typer.Option(help="What the attacker knows, a list.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds.")] = None,
    normalise: Annotated[str, typer.Option(help="dataset, imagenet, none, or mean/std as 0.5/0.5.")] = "none",
    fail_on: FailOn = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default a new one below runs.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    workers: Workers = None,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Check whether updates of your model leak your data: a short audit, a page, a privacy card and a verdict.

    Exit code 3 if a criterion of --fail-on is met (identified>0.01 by default), 1 if it could not be checked.
    """
    values = dict(zip(AUDITED, (attacks, targets, images, rounds, clients, lr, batch_norm, knows, seeds), strict=True))
    from gradveil.runs.check import LEAKS, check

    with bar("cells") as move, contextlib.redirect_stdout(sys.stderr):
        result = check(
            model,
            dataset,
            protocol=protocol,
            defence=defence,
            fail_on=fail_on or LEAKS,
            normalise=normalise,
            out=out,
            workers=workers,
            data_root=data_root,
            progress=move,
            seed=seed,
            device=device,
            **{key: value for key, value in values.items() if value is not None},
        )
    if as_json:
        verdicts = [{"criterion": v.criterion, "met": v.met, "reason": v.reason} for v in result.verdicts]
        document = {"verdict": result.verdict, "verdicts": verdicts, "out": str(result.audit.out)}
        print_json({**document, "page": str(result.page), "card": str(result.card), "rows": result.rows})
    else:
        say(f"Verdict: {result.verdict}.")
        say(f"Look at it: {result.page.resolve()}")
        say(f"Privacy card: {result.card.resolve()}")
    for reason in result.audit.failed.values():
        say(f"Failed: {reason}", err=True)
    close(result.verdicts, failed=bool(result.audit.failed))
