"""The command that says which epsilon settings of differential privacy really give."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.display import Json, print_json, say, show


def lint_command(
    file: Annotated[Path, typer.Argument(help="A .py, .toml or .json file with settings; it is read, never run.")],
    rounds: Annotated[int, typer.Option(help="Rounds of the training.")] = 1,
    images: Annotated[int, typer.Option(help="Images of the smallest client; 0 if unknown.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Images per step; 0 if unknown.")] = 0,
    epochs: Annotated[int, typer.Option(help="Local epochs per round.")] = 1,
    entries: Annotated[int, typer.Option(help="Numbers in the model; 0 if unknown.")] = 0,
    as_json: Json = False,
) -> None:
    """Say which epsilon settings of differential privacy really give, per round and per training.

    Reads those of gradveil, Flower, NVFlare and Opacus. Exit code 3 if any gives less privacy than it states.
    """
    from rich.table import Table

    from gradveil.defences.parts.gaussian_dp import MOST_EPSILON
    from gradveil.runs.lint import Use
    from gradveil.runs.lint_files import lint

    found = lint(file, Use(rounds, images, batch_size, epochs, entries))

    def figure(value: float | None) -> str:
        return "-" if value is None else "no bound" if value >= MOST_EPSILON else f"{value:,.4g}"

    if as_json:
        print_json({"findings": [{**asdict(one), "weaker": one.weaker} for one in found]})
    else:
        table = Table("where", "mechanism", "ε stated", "ε a round", f"ε of {rounds} rounds", "δ", "what is hidden")
        for one in found:
            numbers = [figure(value) for value in (one.stated, one.round, one.training)]
            table.add_row(one.where, one.mechanism, *numbers, f"{one.delta:g}", one.unit)
        show(table)
        for one in found:
            if one.why:
                say(f"{'Weaker than stated: ' if one.weaker else ''}{one.where}, {one.mechanism}: {one.why}.")
    if any(one.weaker for one in found):
        raise typer.Exit(3)
