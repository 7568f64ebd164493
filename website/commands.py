"""A page of all commands and options, made from the command line itself."""

import re
from collections.abc import Iterator

import typer.main

from gradveil.cli import app


def page() -> str:
    """Return the Markdown of the page."""
    parts = [
        "# All options of all commands",
        "Made from the command line itself; `gradveil COMMAND --help` says the same.",
    ]
    for name, command in _leaves(typer.main.get_command(app), "gradveil"):
        parts += _part(name, command)
    return "\n\n".join(parts) + "\n"


def _leaves(command: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield every command that does something, with its full name."""
    below = getattr(command, "commands", None)
    if below is None:
        yield name, command
    for word, inner in (below or {}).items():
        yield from _leaves(inner, f"{name} {word}")


def _part(name: str, command: object) -> list[str]:
    """Return a command's heading, its help and a table of its options."""
    help_text = re.sub(r"[ \t]*\n[ \t]*(?=\S)", " ", getattr(command, "help", None) or "")
    lines = ["| option | meaning |", "|---|---|"]
    for option in getattr(command, "params", []):
        typed = ", ".join([*option.opts, *option.secondary_opts]) if option.param_type_name == "option" else option.name
        lines.append(f"| `{typed}` | {(getattr(option, 'help', '') or '').replace('|', chr(92) + '|')} |")
    return [f"## {name}", help_text, "\n".join(lines)]
