"""Work out one cell of an audit; a cell that fails leaves rows that say why."""

from typing import Any

from torch import Tensor

from gradveil.audit.plan import Cell, Rows, facts_of
from gradveil.audit.privacy import PRIVACY, attack_cell
from gradveil.audit.settings import AuditSettings
from gradveil.audit.utility import UTILITY, price_cell
from gradveil.data import Dataset
from gradveil.engines.simulation import single_thread
from gradveil.errors import GradveilError

COLUMNS = list(dict.fromkeys([*PRIVACY, *UTILITY]))
"""Of rows.csv."""


def run_cell(cell: Cell, settings: AuditSettings, dataset: Dataset) -> tuple[Rows, dict[str, Tensor]]:
    """The cell's rows, and its pictures by name. They depend on the settings alone; it takes one torch thread."""
    try:
        with single_thread():
            if cell.kind == "utility":
                return price_cell(cell, settings, dataset), {}
            return attack_cell(cell, settings, dataset)
    except GradveilError as error:
        return failed_rows(cell, f"{type(error).__name__}: {error}"), {}
    except Exception as error:  # a user's own component, or torch's out of memory: the other cells go on
        first = (str(error).splitlines() or [""])[0]
        return failed_rows(cell, f"{type(error).__name__}: {first}"), {}


def failed_rows(cell: Cell, why: str) -> Rows:
    """The rows of a cell that could not be worked out: all is there but the figures."""
    keys = UTILITY if cell.kind == "utility" else PRIVACY
    common: dict[str, Any] = dict.fromkeys(keys) | facts_of(cell) | {"why": why, "failed": True}
    if cell.kind == "utility":
        return [common]
    return [common | {"target": target, "converged": False, "knows": []} for target in range(cell.first, cell.last)]
