"""Experiments from papers, one name per paper: the paper's figures beside ours."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from gradveil.errors import UnknownNameError
from gradveil.reproduce.base import SCALES, Lab, Paper, run_experiment
from gradveil.reproduce.provenance import data_digests, source_digests
from gradveil.validate import one_of

__all__ = ["SCALES", "Lab", "Paper", "papers", "reproduce"]


def papers() -> dict[str, Paper]:
    """Return all papers by name, one for each module in this folder that defines ``PAPER``."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = [paper for module in modules if isinstance(paper := getattr(module, "PAPER", None), Paper)]
    return {paper.name: paper for paper in found}


def reproduce(
    paper: str,
    table: str = "",
    *,
    out: Path,
    scale: str = "small",
    results: Path | None = None,
    **lab: Any,  # noqa: ANN401 - passed to Lab
) -> list[dict[str, Any]]:
    """Run one experiment of a paper, or all of them, each in its own folder below ``out``, and write PAPER.html there.

    Finished experiments are not run again unless their sources or data changed, and experiments of one paper share the
    parts that they have in common. ``results`` is a folder to add the documents to, see `gradveil.reproduce.results`.
    Return one document per experiment, with its title, rows and notes.
    """
    from gradveil.reproduce.pages import write_html  # it asks for all papers, and so for this module
    from gradveil.reproduce.results import keep

    known = papers()
    if paper not in known:
        raise UnknownNameError("paper", paper, known)
    chosen = known[paper]
    if table and table not in chosen.experiments:
        raise UnknownNameError(f"table of {paper}", table, chosen.experiments)
    one_of("scale", scale, SCALES)
    names = [table] if table else list(chosen.experiments)
    module, parts = f"{__name__}.{paper}", out / "parts" / paper
    lab |= {"sources": source_digests(module), "data": data_digests(module, lab.get("data_root"))}
    documents = []
    for name in names:
        documents.append(run_experiment(chosen, name, Lab(out / name, scale, parts=parts, **lab)))
        if results is not None:
            keep(documents[-1], out / name, results)
    write_html(chosen, out)
    return documents
