"""The command that writes a first audit.toml for the user's own data."""

from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.completion import completion_of
from gradveil.cli.display import DataRoot, Json, print_json, say
from gradveil.errors import ConfigError


def init_command(
    dataset: Annotated[
        str,
        typer.Argument(
            help="A .npz file, a folder of pictures or a named set.", autocompletion=completion_of("dataset")
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("audit.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Look at your data, and write a commented file of settings for gradveil audit --config."""
    from gradveil.data import load_dataset
    from gradveil.runs.first_config import first_config
    from gradveil.storage import write_atomic

    if out.exists() and not force:
        raise ConfigError(f"{out} must be a new file, but it is there. Choose another --out, or add --force.")
    text = first_config(load_dataset(dataset, data_root))
    write_atomic(out, text.replace("THIS", str(out)).encode())
    if as_json:
        print_json({"out": str(out)})
    else:
        say(f"Wrote {out}. Read it, change it, then: gradveil audit --config {out} --out runs/own --estimate")
