"""The command that shows what a site has answered."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gradveil.cli.display import Json, print_json, say


def ledger_command(
    file: Annotated[Path, typer.Argument(help="history-NUMBER.jsonl in a site's private folder.", metavar="FILE")],
    as_json: Json = False,
) -> None:
    """Show what a site of a training over Flower has answered, and what it cost in all runs together.

    Fails if a line was changed, removed or inserted.
    """
    from gradveil.engines.site_history import read_history
    from gradveil.errors import ConfigError

    if not file.is_file():
        raise ConfigError(f"ledger needs the history of a site, history-NUMBER.jsonl, got no file {file}.")
    answers = read_history(file)
    if as_json:
        print_json({"file": str(file), "answers": [asdict(answer) for answer in answers]})
        return
    for answer in answers:
        cost, total = (f"{value:.4g}" if value is not None else "none" for value in (answer.epsilon, answer.total))
        say(
            f"{answer.time}  run {answer.run[:12]}  round {answer.round:<4}  {answer.work:<12}  "
            f"model {answer.model[:12]}  ε {cost:<8}  all runs {total}"
        )
    say(f"{len(answers)} answers in {len({answer.run for answer in answers})} runs.")
