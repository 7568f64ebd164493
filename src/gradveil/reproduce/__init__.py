"""Experiments from papers, one name per paper: the paper's figures beside ours."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from gradveil.errors import UnknownNameError
from gradveil.reproduce.base import SCALES, Lab, Paper, run_experiment
from gradveil.validate import one_of

__all__ = ["SCALES", "Lab", "Paper", "papers", "reproduce"]


def papers() -> dict[str, Paper]:
    """Return all papers by name, one for each module in this folder that defines ``PAPER``."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = [paper for module in modules if isinstance(paper := getattr(module, "PAPER", None), Paper)]
    return {paper.name: paper for paper in found}


def reproduce(paper: str, table: str = "", *, out: Path, scale: str = "small", **lab: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - passed to Lab
    """Run one experiment of a paper, or all of them, each in its own folder below ``out``.

    Finished experiments are not run again, and experiments of one paper share the parts that they have in common.
    Return one document per experiment, with its title, rows and notes.
    """
    known = papers()
    if paper not in known:
        raise UnknownNameError("paper", paper, known)
    chosen = known[paper]
    if table and table not in chosen.experiments:
        raise UnknownNameError(f"table of {paper}", table, chosen.experiments)
    one_of("scale", scale, SCALES)
    names = [table] if table else list(chosen.experiments)
    parts = out / "parts" / paper
    return [run_experiment(chosen, name, Lab(out / name, scale, parts=parts, **lab)) for name in names]
