"""Write README's table and picture from the audit of ``make demo``, and keep its figures in results/demo.json.

Run it behind ``make demo``: ``.venv/bin/python benchmarks/demo.py``. A test compares README with results/demo.json.
"""

import datetime
import json
import platform
import shutil
import time
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
RUN, KEPT, README = ROOT / "runs" / "demo", ROOT / "results" / "demo.json", ROOT / "README.md"
BEGIN, END = "$ gradveil audit", "```\n"


def measured() -> dict[str, Any]:
    """Return the figures of the demo's folder, as the audit printed them."""
    audit = read_audit(RUN)
    summary, costs = summarise(audit.rows, audit.schema), utility(audit.rows, audit.schema)
    lines = with_costs([*blind_lines(audit.rows, audit.schema), *summary], costs, audit.schema)
    return {
        "command": audit.settings["command"],
        "date": datetime.datetime.fromtimestamp(RUN.stat().st_mtime, datetime.UTC).date().isoformat(),
        "seeds": [audit.settings["seed"]],
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "lines": lines,
        "flags": explained(for_people(summary)),
        "recovered": recovered(audit.rows, audit.schema, {}),
    }


def block(data: dict[str, Any]) -> str:
    """Return what README shows of the demo: the command, the table and the sentences below it."""
    text = StringIO()
    Console(file=text, width=WIDTH, markup=False).print(
        audit_table("lenet-dlg on mnist-5k", data["lines"], schema_of())
    )
    command = data["command"].replace("--out DIR", "--out runs/demo").replace("none,", "", 1)
    shown = "$ " + command.replace(" --attacks ", " \\\n    --attacks ")
    table = [line.rstrip() for line in text.getvalue().splitlines()]
    told = [f"{name}: {sentence}" for name, sentence in data["recovered"].items()]
    return "\n".join([shown, *table, *data["flags"], *told, "Look at it: runs/demo/report.html", ""])


def main() -> None:
    """Write results/demo.json, README's block and its picture."""
    data = measured()
    KEPT.write_text(json.dumps(data, indent=1) + "\n")
    readme = README.read_text()
    start = readme.index(BEGIN)
    end = readme.index(END, start)
    README.write_text(readme[:start] + block(data) + readme[end:])
    shutil.copyfile(RUN / "figures" / "gallery.png", ROOT / "docs" / "images" / "demo.png")
    print(f"README.md, results/demo.json and docs/images/demo.png written at {time.strftime('%H:%M')}")


if __name__ == "__main__":
    main()
