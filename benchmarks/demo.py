"""Write README's table and picture from the two audits of ``make demo``, and keep their figures in results/demo.json.

Run it after ``make demo``: ``.venv/bin/python benchmarks/demo.py``. A test compares README with results/demo.json.
"""

import argparse
import datetime
import json
import platform
import shutil
import time
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gradveil.cli.tables import WIDTH, audit_table
from gradveil.metrics import schema_of
from gradveil.report.audit_folder import read_audit
from gradveil.report.blind import blind_lines
from gradveil.report.flags import explained
from gradveil.report.names import for_people
from gradveil.report.recovered import recovered
from gradveil.report.summary import summarise, utility, with_costs

ROOT = Path(__file__).parents[1]
KEPT, README = ROOT / "results" / "demo.json", ROOT / "README.md"
AUDITS = ("demo", "demo-veil")
"""The folders of the audits below ``runs``; the second one has another model, and only its defence is shown."""
BEGIN, END = "$ make demo", "```\n"


def measured(runs: Path) -> dict[str, Any]:
    """Return the figures of both audits, as they were printed."""
    first = read_audit(runs / AUDITS[0])
    return {
        "command": "make demo && .venv/bin/python benchmarks/demo.py",
        "date": datetime.datetime.fromtimestamp((runs / AUDITS[0]).stat().st_mtime, datetime.UTC).date().isoformat(),
        "seeds": [first.settings["seed"]],
        "version": version("gradveil"),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "audits": {name: _audit(runs / name) for name in AUDITS},
    }


def _audit(folder: Path) -> dict[str, Any]:
    audit = read_audit(folder)
    summary, costs = summarise(audit.rows, audit.schema), utility(audit.rows, audit.schema)
    return {
        "command": audit.settings["command"],
        "model": audit.settings["model"],
        "lines": with_costs([*blind_lines(audit.rows, audit.schema), *summary], costs, audit.schema),
        "flags": explained(for_people(summary)),
        "recovered": recovered(audit.rows, audit.schema, {}),
    }


def shown(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of README's table: all of the first audit, then those of the second one's defence.

    The column "guessed" is left out, to have room for ε.
    """
    first, second = (data["audits"][name] for name in AUDITS)
    last = [line for line in second["lines"] if line["defence"] not in ("blind guess", "none")]
    return [line | {"guessed": None} for line in (*first["lines"], *last)]


def block(data: dict[str, Any]) -> str:
    """Return what README shows of the demo: the table and the paths of both pages."""
    text = StringIO()
    Console(file=text, width=WIDTH, markup=False).print(audit_table("mnist-5k", shown(data), schema_of()))
    table = [line.rstrip() for line in text.getvalue().splitlines()]
    flags = [flag.partition(":")[0] for name in AUDITS for flag in data["audits"][name]["flags"]]
    pages = "Look at it: " + ", ".join(f"runs/{name}/report.html" for name in AUDITS)
    return "\n".join([BEGIN, *table, *dict.fromkeys(flags), pages, ""])


def main() -> None:
    """Write results/demo.json, README's block and its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="Folder with the demo's folders.")
    runs = parser.parse_args().runs
    data = measured(runs)
    KEPT.write_text(json.dumps(data, indent=1) + "\n")
    readme = README.read_text()
    start = readme.index(BEGIN)
    end = readme.index(END, start)
    README.write_text(readme[:start] + block(data) + readme[end:])
    shutil.copyfile(runs / AUDITS[0] / "figures" / "gallery.png", ROOT / "docs" / "images" / "demo.png")
    print(f"README.md, results/demo.json and docs/images/demo.png written at {time.strftime('%H:%M')}")


if __name__ == "__main__":
    main()
