"""The command that says why an inversion of saved updates would fail."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.display import Json, print_json, say
from gradveil.cli.options import TrustCode
from gradveil.own import trusting_code


def diagnose_command(
    model_file: Annotated[Path, typer.Option(help="The weights that the server broadcast.")],
    update: Annotated[list[Path], typer.Option(help="Update of a client, tensors by name; may be repeated.")],
    spec: Annotated[Path, typer.Option(help="TOML file with what is stated about the updates.")],
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Say why an inversion of updates would fail or be wrong, and what to change in the spec; nothing is attacked."""
    from gradveil.runs.diagnose import diagnose_files
    from gradveil.runs.update_spec import read_spec

    with contextlib.redirect_stdout(sys.stderr), trusting_code(trust_code):
        found = diagnose_files(model_file, update, read_spec(spec))
    if as_json:
        updates = [
            {"update": str(path), "diagnoses": [vars(each) for each in diagnoses]}
            for path, diagnoses in zip(update, found, strict=True)
        ]
        print_json({"updates": updates})
        return
    for path, diagnoses in zip(update, found, strict=True):
        for each in diagnoses:
            say(f"{path}: {each}")
        if not diagnoses:
            say(f"{path}: nothing found that contradicts the specification.")
