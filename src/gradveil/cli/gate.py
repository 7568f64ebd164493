"""The option --fail-on, and the exit code that it gives."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from gradveil.cli.display import say

if TYPE_CHECKING:
    from gradveil.report.criteria import Verdict

MET = 3
"""Exit code if a criterion of --fail-on is met."""
NOT_MEASURED = 1
"""Exit code if a criterion could not be checked."""
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on", help='Criterion with exit code 3 if it is met: "identified>0.01", "psnr>blind+1"; may be repeated.'
    ),
]


def close(verdicts: "Iterable[Verdict]", *, failed: bool = False) -> None:
    """Say each verdict on stderr, and end with the exit code that they give: 3 met, 1 failed or not measured.

    ``failed`` says whether a part of the run failed, so that it shows less than it should.
    """
    verdicts = list(verdicts)
    for verdict in verdicts:
        say(f"Criterion {verdict.sentence}", err=True)
    if any(verdict.met for verdict in verdicts):
        raise typer.Exit(MET)
    if failed or any(verdict.met is None for verdict in verdicts):
        raise typer.Exit(NOT_MEASURED)
