"""The command line. stdout carries results (with --json exactly one document), stderr progress and warnings.

Exit codes: 0 done, 1 failed during the run, 2 bad usage or bad input, 3 what was asked does not hold (a criterion of
--fail-on is met, what was compared differs, settings give less privacy than they state), 130 ended by Ctrl-C. Nothing
heavy is imported here: each command imports what it needs when it runs.
"""

import os
import sys

import typer

from gradveil.cli.attack import attack_command
from gradveil.cli.check import check_command
from gradveil.cli.compare import compare_command
from gradveil.cli.completion import COMPLETING, answer_bash
from gradveil.cli.data import data_app
from gradveil.cli.diagnose import diagnose_command
from gradveil.cli.doctor import doctor_command
from gradveil.cli.generator import train_generator_command
from gradveil.cli.init import init_command
from gradveil.cli.ledger import ledger_command
from gradveil.cli.lint import lint_command
from gradveil.cli.lists import describe, list_components
from gradveil.cli.options import with_options
from gradveil.cli.recommend import recommend_command
from gradveil.cli.runs import audit_command, report_command, reproduce_command, train_command
from gradveil.cli.score import score_command
from gradveil.errors import ConfigError, GradveilError, TrainingError, UnknownNameError, printable
from gradveil.interrupts import ending_with, stopping_on_ctrl_c

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train federated models, see what their shared updates leak, and stop it.",
)
app.command("list")(list_components)
app.command("describe")(describe)
app.command("doctor")(doctor_command)
app.command("init")(init_command)
app.command("train")(with_options(train_command, "gradveil.config:TrainSettings"))
app.command("attack")(attack_command)
app.command("check")(check_command)
app.command("diagnose")(diagnose_command)
app.command("audit")(with_options(audit_command, "gradveil.audits.settings:AuditSettings"))
app.command("train-generator")(
    with_options(train_generator_command, "gradveil.generators.training:GeneratorSettings", "File for the weights.")
)
app.command("score")(score_command)
app.command("compare")(compare_command)
app.command("ledger")(ledger_command)
app.command("recommend")(with_options(recommend_command, "gradveil.runs.wish:Wish"))
app.command("lint")(lint_command)
app.command("report")(report_command)
app.command("reproduce")(reproduce_command)
app.add_typer(data_app, name="data")

AGAIN = {"reproduce": "run it again", "recommend": "run it again"} | dict.fromkeys(
    ("train", "audit", "train-generator"), "run again with --resume"
)
"""How commands go on that Ctrl-C ended; all others save nothing before they are done."""


def main() -> None:
    """Run the command line; errors that gradveil raises on purpose become one line and an exit code."""
    if os.environ.get(COMPLETING) == "complete_bash":
        answer_bash(app)
        return
    with ending_with(_saved), stopping_on_ctrl_c():
        try:
            with ending_with(_saved):  # errors after Ctrl-C are not shown
                app()
        except TrainingError as error:
            _fail(error, 1)
        except GradveilError as error:
            _fail(error, 2)


def _saved() -> str:
    """Return what is left of a command that Ctrl-C ended."""
    again = AGAIN.get(" ".join(sys.argv[1:2]), "")
    return f"What was finished is saved: {again}." if again else "Nothing was saved."


def _fail(error: GradveilError, code: int) -> None:
    from rich.console import Console

    kind = ConfigError if isinstance(error, UnknownNameError) else type(error)
    text = printable(f"{kind.__name__}: {error}")
    Console(stderr=True, soft_wrap=True).print(text, style="red", markup=False, highlight=False)
    sys.exit(code)
