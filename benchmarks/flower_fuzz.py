"""Let nodes of a real federation send broken answers (see benchmarks/flower_processes.py), a thousand by default.

The app is examples/flower with the client app of benchmarks/flower_fuzz_app. Every broken answer must be left out of
its round, by its client's name, and the server must go on. Only random changes of bytes can leave an answer valid: they
may merely change a number in it. Without max-norm such a number can be so large that the test loss is infinite, which
ends the run, with the client named.
"""

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flower_processes import federation, has_rows, rows_of, until

APP, HERE = Path("examples/flower"), Path(__file__).parent
SITES, PORT, MINUTES, NORM = 8, 8960, 9, 10.0
"""All sites but the first break their answers. Rounds after these minutes are not played, larger updates not used."""


def fuzz(folder: Path, save: Callable[[Any], None], most: int) -> None:
    """Play rounds until enough broken answers were sent or the time is over, and count what the server said of each."""
    rounds, out, end = -(-(most or 1000) // (SITES - 1)), folder / "run", time.monotonic() + 60 * MINUTES
    app = shutil.copytree(APP, folder.parent / "fuzz-app", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (HERE / "flower_fuzz_app" / "client.py", HERE / "mutations.py"):
        shutil.copy(path, app)
    settings = {
        "dataset": "mnist-5k", "model": "logistic", "defence": "prune", "clients": SITES, "rounds": rounds,
        "batch-size": 256, "min-clients": 1, "round-seconds": 60, "max-norm": NORM, "seed": 0,
    }  # fmt: skip
    os.environ.setdefault("GRADVEIL_NODE_PAUSE", "0.3")
    with federation(folder, PORT, SITES, f"defence='prune' max-rounds={rounds} repeatable=true") as all_:
        run = all_.run(app, out, settings)
        for number in range(1, rounds + 1):
            until(f"round {number} is saved", lambda n: has_rows(out, n, run) or time.monotonic() > end, number)
            figures = counted(folder, out)
            save(figures | {"asked": rounds, "server alive": bool(all_.of_link("flwr-serverapp"))})
            if run.poll() is not None or time.monotonic() > end:
                break
        if len(rows_of(out)) == rounds:
            run.wait(120)
            save(counted(folder, out) | {"asked": rounds, "finished": (out / "model.safetensors").exists()})


def counted(folder: Path, out: Path) -> dict[str, Any]:
    """Return how many answers of each kind were sent in finished rounds, and left out by name, and the reasons."""
    rows, named = rows_of(out), dict[tuple[int, int], str]()
    for row in rows:
        for reason in row.get("dropped", []):
            named[row["round"], int(re.findall(r"[Cc]lient (\d+)", reason)[0])] = reason
    done, sent, refused = {row["round"] for row in rows}, Counter[str](), Counter[str]()
    reasons = Counter[str]()
    for path in sorted(folder.glob("site-*/broken.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["round"] in done:
                sent[line["way"]] += 1
                reason = named.get((line["round"], line["client"]))
                refused[line["way"]] += reason is not None
                if reason is not None:
                    reasons[re.sub(r"\d[\d,]*|'[^']*'", "…", reason)] += 1
    ways = {way: {"sent": count, "left out by name": refused[way]} for way, count in sorted(sent.items())}
    return {"sites": SITES, "rounds": len(rows), "ways": ways, "reasons": dict(reasons.most_common())}


def fuzz_table(figures: Mapping[str, Any]) -> str:
    """Return how many broken answers were left out, by kind."""
    lines = ["| what is wrong | answers | left out, with the client's name |", "|---|---|---|"]
    for way, each in figures["ways"].items():
        lines.append(f"| {way} | {each['sent']} | {each['left out by name']} |")
    return "\n".join([*lines, f"| all | {played(figures):,} | {played(figures, 'left out by name'):,} |"])


def played(figures: Mapping[str, Any], key: str = "sent") -> int:
    """Return the number of broken answers in finished rounds."""
    return sum(each[key] for each in figures["ways"].values())


def fuzz_sentence(figures: Mapping[str, Any]) -> str:
    """Return how many broken answers were played, with and without a bound on the norm."""
    count, used, other = played(figures), played(figures) - played(figures, "left out by name"), figures["unbounded"]
    return (
        f"{count:,} broken answers were played, in {figures['rounds']} rounds. {count - used:,} were left out, "
        f"{used} used. "
        f"An earlier run with the same seeds but without `max-norm` ended after {other['rounds']} rounds and "
        f"{played(other)} such answers: `{other['ended']}`"
    )


PLAY = {"fuzz": fuzz}
TABLES = {"fuzz": fuzz_table}
