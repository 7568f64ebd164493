"""What ``gradveil audit`` says before it works: what can't run, how long the rest takes, and whether to go on."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gradveil.cli.display import print_json, say

if TYPE_CHECKING:
    from gradveil.audits import AuditSettings
    from gradveil.audits.estimate import Estimate


def look_ahead(settings: "AuditSettings", out: Path, workers: int | None, data_root: Path | None) -> "Estimate":
    """Return how long an audit takes; say on stderr what has no effect or can't run; raise if the audit itself can't.

    Cells that are finished in ``out`` take no time.
    """
    from gradveil.audits.cells import check
    from gradveil.audits.estimate import estimate
    from gradveil.audits.plan import plan
    from gradveil.audits.scale import left_out
    from gradveil.data import load_dataset
    from gradveil.engines.simulation import num_workers, usable_device

    on_cpu = usable_device(settings.device).type == "cpu"
    dataset = load_dataset(settings.dataset, data_root)
    check(settings, dataset, data_root)
    without = left_out(settings, dataset)
    if settings.unused:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in settings.unused)
        say(f"No effect with --protocol {settings.protocol}: {options}.", err=True)
    for spec, why in without.items():
        say(f"Not run: {spec}: {why}", err=True)
    cells = [cell for cell in plan(settings, without) if not (out / "cells" / f"{cell.name}.json").exists()]
    count = num_workers(workers, len(cells)) if on_cpu and cells else 0
    return estimate(settings, dataset, cells, workers=count, root=data_root)


def goes_on(found: "Estimate", *, yes: bool, only: bool, as_json: bool) -> bool:
    """Tell an estimate, and return whether to begin: always, unless it is long and someone at a terminal says no.

    Args:
        found: the estimate.
        yes: whether not to ask (``--yes``).
        only: whether only the estimate was asked for (``--estimate``); then it is the result, and stands on stdout.
        as_json: whether results are JSON.
    """
    if only:
        if as_json:
            print_json(found.document())
        else:
            say("\n".join(found.lines()))
        return False
    say("\n".join(found.lines(every=False)), err=True)
    if not found.is_long or yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    begins = typer.confirm("Go on?", default=True, err=True)
    if not begins:
        say("Nothing was run.", err=True)
    return begins
