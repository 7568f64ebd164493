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
    **options: Any,  # noqa: ANN401 - one for each field of Wish
) -> None:
    """Search for the protection that keeps a wish and costs least, verify it, and write its settings.

    The same command again goes on where a killed one stopped. Exit code 3 if nothing that was tried keeps the wish, or
    if the verification does not confirm it.
    """
    import typer

    from gradveil.config import read_settings, refuse_code
    from gradveil.registry import convert
    from gradveil.runs.recommend import recommend
    from gradveil.runs.wish import Wish

    typed = {key: value for key, value in options.items() if value is not None}
    written = read_settings(config) if config else {}
    if config:
        refuse_code(written, config, typed)
    wish = Wish(**convert(Wish, {**written, **typed}, owner="a recommendation"))
    with bar("") as move, contextlib.redirect_stdout(sys.stderr):
        found = recommend(
            wish, out, workers=workers, data_root=data_root, progress=lambda share, doing: move(share, 1.0, doing)
        )
    if as_json:
        print_json(
            {"out": str(out), "report": str(out / "report.html"), "confirmed": found.confirmed, **found.document}
        )
    else:
        _tell(found.document, out)
    if not found.confirmed:
        raise typer.Exit(3)


def _tell(document: dict[str, Any], out: Path) -> None:
    """Print the table and what to do next."""
    from rich.table import Table

    from gradveil.report.recommendation import HEADS, cell, headline, nearest_text

    table = Table(*HEADS.values(), title=f"{document['model']} on {document['dataset']}", title_justify="left")
    for line in document["lines"]:
        table.add_row(*(cell(key, line) for key in HEADS))
    show(table)
    say(f"The wish: {document['promise']}, at a loss of at most {document['max_loss']:g} points.")
    say(headline(document))
    if not document["chosen"]:
        say(nearest_text(document))
    if document["advice"]:
        for what, key in (("Use it", "train"), ("Attack it", "attack"), ("Over Flower", "flower")):
            if document["advice"][key]:
                say(f"{what}: {document['advice'][key]}")
        say("Not protected: " + "; ".join(document["advice"]["unprotected"]) + ".")
    say(f"Look at it: {(out / 'report.html').resolve()}")
