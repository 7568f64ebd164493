"""The command by which sites compare what a server sent them."""

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.display import Json, print_json, say


def compare_command(
    files: Annotated[list[Path], typer.Argument(help="broadcasts-NUMBER.jsonl of two sites or more.", metavar="FILE")],
    as_json: Json = False,
) -> None:
    """Compare what the sites of a training over Flower received: one victim may have got another model.

    Each site keeps digests of all broadcasts in its private folder. Exit code 3 if any differ.
    """
    from gradveil.engines.site_broadcasts import disagreements, read_heard
    from gradveil.errors import ConfigError

    if len(set(files)) < 2:
        raise ConfigError(
            f"compare needs the files of two sites or more, got {len(set(files))}. Name each site's file."
        )
    sites = {str(file): read_heard(file) for file in files}
    found = disagreements(sites)
    rounds = len({(heard.run, heard.round, heard.work) for lines in sites.values() for heard in lines})
    if as_json:
        print_json({"files": list(sites), "broadcasts": rounds, "differences": found})
    else:
        for sentence in found:
            say(sentence)
        if not found:
            say(f"All {len(sites)} sites received the same in {rounds} broadcasts.")
    if found:
        raise typer.Exit(3)
