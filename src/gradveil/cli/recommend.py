"""The command that recommends a protection."""

import contextlib
import sys
from pathlib import Path
from typing import Any

from gradveil.cli.display import bar, print_json, say, show


def recommend_command(
    out: Path,
    config: Path | None = None,
    workers: int | None = None,
    data_root: Path | None = None,
    as_json: bool = False,
    **options: Any,  # noqa: ANN401 - one for each field of RecommendSettings
) -> None:
    """Find the protection that keeps a wish and costs least, check it with another seed, and write its settings.

    The same command again goes on where a killed one stopped. Exit code 3 if nothing that was tried keeps the wish.
    """
    import typer
    from rich.table import Table

    from gradveil.config import read_settings
    from gradveil.registry import convert
    from gradveil.report.recommendation import HEADS, headline
    from gradveil.runs.recommend import RecommendSettings, recommend

    given = {**(read_settings(config) if config else {}), **{k: v for k, v in options.items() if v is not None}}
    settings = RecommendSettings(**convert(RecommendSettings, given, owner="a recommendation"))
    with bar("") as move, contextlib.redirect_stdout(sys.stderr):
        found = recommend(
            settings, out, workers=workers, data_root=data_root, progress=lambda share, doing: move(share, 1.0, doing)
        )
    document = {
        "out": str(out), "report": str(out / "report.html"), "promise": settings.promise, "chosen": found.chosen,
        "reference": found.reference, "confirmed": found.confirmed, "lines": found.lines, "check": found.check,
        "nearest": [] if found.chosen else found.nearest,
    }  # fmt: skip
    if as_json:
        print_json(document)
    else:
        table = Table(*HEADS.values(), title=f"{settings.model} on {settings.dataset}", title_justify="left")
        for line in found.lines:
            table.add_row(*(_cell(line[key]) for key in HEADS))
        show(table)
        say(f"The wish: {settings.promise}, at a loss of at most {settings.max_loss:g} points.")
        say(headline(document))
        if found.chosen:
            say(f"Use it: gradveil train --config {out / 'recommended.toml'} --out runs/protected")
        elif found.nearest:
            say("Nearest: " + "; ".join(f"{line['candidate']} ({line['loss']:.1f} points)" for line in found.nearest))
        say(f"Look at it: {(out / 'report.html').resolve()}")
    if not found.chosen:
        raise typer.Exit(3)


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
