"""CPU seconds of the commands that only look something up, and whether they import something heavy.

Run it with ``python benchmarks/front_door.py``; ``--out results/front-door.json`` also writes the figures to a file.
Each command runs in a process of its own; the least of ``--repeats`` counts, since the first run may have to compile
the modules.
"""

import argparse
import datetime
import json
import platform
import resource
import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "matplotlib", "cma", "opacus", "scipy", "numpy")
COMMANDS = ("--help", "list", "list attacks", "describe soteria", "train --help", "audit --help")
CODE = """
import sys
from gradveil.cli import main
sys.argv = ["gradveil", *sys.argv[1:]]
try:
    main()
finally:
    print(*sorted(set(sys.modules) & {heavy!r}), file=sys.stderr)
"""


def run(command: str) -> tuple[float, str]:
    """Return the CPU seconds of a command, and the heavy modules that it imported."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = CODE.replace("{heavy!r}", repr(set(HEAVY)))
    ended = subprocess.run([sys.executable, "-c", code, *command.split()], check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended.stderr.strip()


def main() -> None:
    """Print a line per command, and write the figures to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="Runs per command.")
    parser.add_argument("--out", type=Path, help="JSON file for the figures.")
    options = parser.parse_args()
    figures = {}
    for command in COMMANDS:
        seconds, imported = min(run(command) for _ in range(options.repeats))
        figures[f"gradveil {command}"] = {"cpu_seconds": round(seconds, 2), "heavy_imports": imported.split()}
        print(f"gradveil {command:<18} {seconds:5.2f} s of CPU   heavy imports: {imported or 'none'}")
    if options.out:
        document = {
            "command": f"python benchmarks/front_door.py --repeats {options.repeats} --out {options.out}",
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "figures": figures,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
