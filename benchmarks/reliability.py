"""Measure how gradveil behaves when files are damaged, runs are killed and disks are full; write docs/reliability.md.

::

    python benchmarks/reliability.py --inputs 200000 --kills 200 --disk 40 --minutes 5
    python benchmarks/reliability.py --page          # only write the page again from results/reliability.json

Every part adds to what results/reliability.json holds, so that it can be stopped at any time and continued, and every
random choice comes from the number of the input. Children are forked from this process, which has imported everything.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import fuzzing
from gradveil import cli
from gradveil.errors import GradveilError

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results" / "reliability.json", ROOT / "docs" / "reliability.md"
BATCH = 1000
"""Inputs of one child process at most."""
SLOWEST = 20
"""Seconds that one input may take before it counts as hanging."""
MORE_MEMORY = 1 << 30
"""Bytes of address space that a child may add; the resident memory that it added is measured."""
MOST_KILLS = 12
"""Kills of one run before it is left alone."""
SMALL = "--dataset mnist-5k --clients 3 --partition iid:images=20 --batch-size 8 --workers 0"
RUNS = {
    "train": f"train {SMALL} --model lenet5 --rounds 12",
    "train, private states": f"train {SMALL} --model lenet5 --rounds 6 --defence fedkl",
    "train, noise": f"train {SMALL} --model mlp --rounds 8 --algorithm fedsgd --defence dp-sgd",
    "audit": f"audit {SMALL} --model lenet-dlg --targets 1 --rounds 2 --tap 1/2 --defences prune "
    "--attacks gs:iterations=4",
}
"""Runs that are killed; every one is short, so that a kill meets every phase."""
TIMES = {"seconds", "round_seconds", "round_seconds_undefended", "overhead"}


def in_child(work: Callable[[], None], **limits: int) -> int:
    """Start a process that does some work and ends; return its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.setpgid(0, 0)
        for name, most in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


# --- fuzzing ----------------------------------------------------------------------------------------------------------


def fuzz(results: dict[str, Any], inputs: int, save: Callable[[], None]) -> None:
    """Read mutated files until every target has had its share of the inputs."""
    targets = fuzzing.TARGETS
    whole = sum(target.share for target in targets.values())
    wanted = {name: max(50, math.ceil(inputs * target.share / whole)) for name, target in targets.items()}
    known = results.setdefault("fuzzing", {})
    while True:
        open_ = [name for name in targets if known.get(name, {}).get("inputs", 0) < wanted[name]]
        if not open_:
            return
        for name in open_:
            line = known.setdefault(name, {"inputs": 0, "read": 0, "refused": 0, "findings": [], "peak_mib": 0})
            size = max(10, round(BATCH * min(1.0, targets[name].share)))
            _add(line, _batch(name, line["inputs"], min(size, wanted[name] - line["inputs"])))
            save()


def _add(line: dict[str, Any], batch: Mapping[str, Any]) -> None:
    for key in ("inputs", "read", "refused"):
        line[key] += batch[key]
    line["findings"] += batch["findings"]
    line["peak_mib"] = max(line["peak_mib"], batch["peak_mib"])


def _batch(name: str, first: int, count: int) -> dict[str, Any]:
    """Try inputs in a child process; return the counts, with a finding for the input that ended it, if one did."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as place:
        report = Path(place, "report.jsonl")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        child = in_child(
            lambda: _try_all(name, first, count, Path(place), report), AS=pages * 4096 + MORE_MEMORY + (1 << 29)
        )
        _, status = os.waitpid(child, 0)
        lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    done = Counter(line["what"] for line in lines)
    findings = [line for line in lines if line["what"] not in ("read", "refused")]
    peak = max([0, *(line["mib"] for line in lines)])
    tried = len(lines)
    if tried < count:  # the process ended by itself
        findings.append({"what": f"ended by {os.waitstatus_to_exitcode(status)}", "input": first + tried})
        tried += 1
    short = [{"what": f["what"], "input": f["input"], "target": name} for f in findings]
    return {"inputs": tried, "read": done["read"], "refused": done["refused"], "findings": short, "peak_mib": peak}


def _try_all(name: str, first: int, count: int, place: Path, report: Path) -> None:
    warnings.simplefilter("ignore")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    target, folder = fuzzing.TARGETS[name], place / "files"
    folder.mkdir()
    seeds = target.seeds()
    signal.signal(signal.SIGALRM, _hangs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with report.open("w", buffering=1) as lines:
        for number in range(first, first + count):
            fuzzing.empty(folder)
            signal.alarm(SLOWEST)
            try:
                fuzzing.try_one(target, seeds, random.Random(f"{name}:{number}"), folder)
                what = "read"
            except GradveilError:
                what = "refused"
            except BaseException as error:
                what = f"{type(error).__name__}: {str(error)[:100]}"
            signal.alarm(0)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            lines.write(json.dumps({"what": what, "input": number, "mib": grown >> 10}) + "\n")


def _hangs(_signal: int, _frame: object) -> None:
    raise TimeoutError(f"took more than {SLOWEST} s")


# --- kills and full disks ---------------------------------------------------------------------------------------------


def play(command: str, out: Path, log: Path, **limits: int) -> int:
    """Start a command in a child process; it continues what is in its folder."""

    def work() -> None:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.argv = ["gradveil", *command.split(), "--out", str(out), "--resume"]
        cli.main()

    return in_child(work, **limits)


def outcome(out: Path) -> str:
    """Return a digest of everything that must be the same: rows without times, weights, guesses."""
    digest = hashlib.sha256()
    for name in ("rows.jsonl", "clients.jsonl"):
        if (out / name).exists():
            for line in (out / name).read_text().splitlines():
                row = {key: value for key, value in json.loads(line).items() if key not in TIMES}
                digest.update(json.dumps(row, sort_keys=True).encode())
    for path in sorted([*out.glob("*.safetensors"), *out.glob("cells/*.safetensors")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def references(place: Path) -> dict[str, tuple[str, float]]:
    """Run every command without any harm; return what it gives and how long it takes."""
    found = {}
    for name, command in RUNS.items():
        started = time.monotonic()
        _, status = os.waitpid(play(command, place / "whole", place / "log"), 0)
        if status:
            raise SystemExit(f"{name} failed:\n{(place / 'log').read_text()[-2000:]}")
        found[name] = outcome(place / "whole"), time.monotonic() - started
        shutil.rmtree(place / "whole")
    return found


def kill(results: dict[str, Any], kills: int, save: Callable[[], None]) -> None:
    """Kill runs at random moments, resume them, and compare what they end with."""
    known = results.setdefault("kills", {})
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        place = Path(folder)
        whole = references(place)
        while sum(line["kills"] for line in known.values()) < kills:
            for name, command in RUNS.items():
                line = known.setdefault(name, {"kills": 0, "runs": 0, "identical": 0, "findings": []})
                rng, out, before = random.Random(f"{name}:{line['runs']}"), place / "run", line["kills"]
                expected, seconds = whole[name]
                while True:
                    child = play(command, out, place / "log")
                    patience = rng.uniform(0, seconds / 2) if line["kills"] - before < MOST_KILLS else 600
                    ended = _wait(child, patience)
                    if ended is not None:
                        break
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    line["kills"] += 1
                _compare(line, ended, out, expected, place / "log")
                save()


def _wait(child: int, seconds: float) -> int | None:
    """Return how a process ended within some seconds, or None if it still runs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _compare(line: dict[str, Any], code: int, out: Path, expected: str, log: Path) -> None:
    """Count a finished run, and clear its folder."""
    same = code == 0 and outcome(out) == expected
    line["runs"] += 1
    line["identical"] += same
    if not same:
        said = log.read_text().strip().splitlines()[-1:] if log.exists() else []
        line["findings"].append({"code": code, "run": line["runs"] - 1, "said": " ".join(said)[:200]})
    left = [path.name for path in out.rglob(".*.part")]
    if left:
        line["findings"].append({"code": code, "run": line["runs"] - 1, "said": f"left {left[0]}"})
    shutil.rmtree(out, ignore_errors=True)
    log.unlink(missing_ok=True)


def fill_disk(results: dict[str, Any], trials: int, save: Callable[[], None]) -> None:
    """Let files end at a random size, as on a full disk; then make room, resume, and compare."""
    known = results.setdefault("disk", {})
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        place = Path(folder)
        whole = references(place)
        while sum(line["runs"] for line in known.values()) < trials:
            for name, command in RUNS.items():
                line = known.setdefault(name, {"full": 0, "runs": 0, "identical": 0, "findings": []})
                rng, out, log = random.Random(f"{name}:{line['runs']}"), place / "run", place / "log"
                most = int(10 ** rng.uniform(2, 6))
                code = os.waitstatus_to_exitcode(os.waitpid(play(command, out, log, FSIZE=most), 0)[1])
                said = log.read_text(errors="replace") if log.exists() else ""
                line["full"] += code != 0
                if code not in (0, 1, 2) or "Traceback" in said:
                    last = " ".join(said.strip().splitlines()[-1:])[:200]
                    line["findings"].append({"code": code, "run": line["runs"], "said": f"limit {most}: {last}"})
                log.unlink(missing_ok=True)
                code = os.waitstatus_to_exitcode(os.waitpid(play(command, out, log), 0)[1])
                _compare(line, code, out, whole[name][0], log)
                save()


# --- soak -------------------------------------------------------------------------------------------------------------


def soak(results: dict[str, Any], minutes: float, save: Callable[[], None]) -> None:
    """Train and attack again and again in one process; record its memory and open files at the beginning and end."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        place = Path(folder)
        child = in_child(lambda: _repeat(place, minutes))
        status = os.waitpid(child, 0)[1]
        lines = [json.loads(line) for line in (place / "soak.jsonl").read_text().splitlines()]
    start = lines[min(2, len(lines) - 1)]  # after the first runs of each kind, which import things
    results["soak"] = {
        "minutes": round(lines[-1]["seconds"] / 60, 1), "runs": len(lines), "code": os.waitstatus_to_exitcode(status),
        "mib_start": start["mib"], "mib_end": lines[-1]["mib"], "files_start": start["files"],
        "files_end": lines[-1]["files"], "outcomes": len({line["outcome"] for line in lines}), "kinds": 2,
    }  # fmt: skip
    save()


def _repeat(place: Path, minutes: float) -> None:
    started, number = time.monotonic(), 0
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    with (place / "soak.jsonl").open("w", buffering=1) as lines:
        while time.monotonic() - started < 60 * minutes or number < 6:
            out = place / "run"
            sys.argv = ["gradveil", *RUNS[("train", "audit")[number % 2]].split(), "--out", str(out)]
            with contextlib.suppress(SystemExit):
                cli.main()
            kib = int(Path("/proc/self/statm").read_text().split()[1]) * 4
            facts = {"mib": kib >> 10, "files": len(os.listdir("/proc/self/fd")), "outcome": outcome(out)}
            lines.write(json.dumps({**facts, "seconds": time.monotonic() - started}) + "\n")
            shutil.rmtree(out)
            number += 1


# --- the page ---------------------------------------------------------------------------------------------------------


def page(results: Mapping[str, Any]) -> str:
    """Return docs/reliability.md."""
    head = f"""# Reliability

What happens when files are damaged or hostile, runs are killed, and disks are full, measured by
`benchmarks/reliability.py`. This page is made from `results/reliability.json`; a test checks that they agree.
Measured {results["date"]} with Python {results["python"]}, torch {results["torch"]}:
`{results["command"]}`.
"""
    parts = {"fuzzing": _fuzzing_text, "kills": _kills_text, "disk": _disk_text, "soak": _soak_text}
    notes = ["## How these numbers came about\n", *(f"- {note}" for note in results.get("notes", [])), ""]
    written = [write(results[key]) for key, write in parts.items() if key in results]
    return "\n".join([head, *written, *(notes if results.get("notes") else [])])


def _table(head: str, rows: Iterable[Iterable[object]]) -> str:
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for row in rows:
        cells = (f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _sum(lines: Mapping[str, Mapping[str, Any]], key: str) -> int:
    return sum(len(line[key]) if isinstance(line[key], list) else line[key] for line in lines.values())


def _fuzzing_text(lines: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (name, *(line[key] for key in ("inputs", "read", "refused")), len(line["findings"]), line["peak_mib"])
        for name, line in lines.items()
    ]
    peak = max(line["peak_mib"] for line in lines.values())
    return f"""## Damaged files

{_sum(lines, "inputs"):,} mutated files were read by child processes. A file must be read, or refused with an error of
gradveil; anything else is a finding: another error, a process that ends, more than {SLOWEST} s. There were
{_sum(lines, "findings")} findings. The memory of a process grew by at most {peak:,} MiB (1,024 are allowed).

{_table("| target | inputs | read | refused | findings | memory, MiB |", rows)}"""


def _kills_text(lines: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [(n, line["kills"], line["runs"], line["identical"], len(line["findings"])) for n, line in lines.items()]
    return f"""## Kills

{_sum(lines, "kills"):,} times `kill -9` at random moments, each within the first half of the time that a whole run
takes, and at most {MOST_KILLS} times per run. Runs were resumed, killed again, and at last left alone;
{_sum(lines, "identical")} of {_sum(lines, "runs")} finished runs gave the same rows (without times), weights and
guesses as a run that nobody killed, bit for bit.

{_table("| run | kills | finished runs | identical | findings |", rows)}"""


def _disk_text(lines: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [(n, line["runs"], line["full"], line["identical"], len(line["findings"])) for n, line in lines.items()]
    return f"""## Full disks

The system refused every write beyond a random size of a file (100 bytes to 1 MB), as a full disk does. The run must end
with one line and no traceback. Then there was room again, and it was resumed.

{_table("| run | runs | ended by the full disk | identical after resuming | findings |", rows)}"""


def _soak_text(found: Mapping[str, Any]) -> str:
    return f"""## Soak

{found["runs"]} trainings and audits in one process during {found["minutes"]} minutes. After the first runs, resident
memory went from {found["mib_start"]:,} to {found["mib_end"]:,} MiB, and open files from {found["files_start"]} to
{found["files_end"]}.
The runs had {found["outcomes"]} different results; {found["kinds"]} kinds of run were repeated.
"""


def main() -> None:
    """Run the chosen parts and write results and page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=0, help="mutated files in all, those of earlier calls included")
    parser.add_argument("--kills", type=int, default=0, help="kills in all, those of earlier calls included")
    parser.add_argument("--disk", type=int, default=0, help="runs on a full disk in all")
    parser.add_argument("--minutes", type=float, default=0.0, help="minutes of the soak")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}

    def save() -> None:
        results["date"] = datetime.now(UTC).date().isoformat()
        results["python"], results["torch"] = platform.python_version(), torch.__version__
        part = options.results.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1) + "\n")
        part.replace(options.results)

    if not options.page:
        torch.set_num_threads(1)
        words = {key: getattr(options, key) for key in ("inputs", "kills", "disk", "minutes") if getattr(options, key)}
        results.setdefault("commands", {}).update(words)
        asked = " ".join(f"--{key} {value}" for key, value in results["commands"].items())
        results["command"] = f"python benchmarks/reliability.py {asked}"
        parts = ((kill, options.kills), (fill_disk, options.disk), (fuzz, options.inputs), (soak, options.minutes))
        for part, budget in parts:
            if budget:
                part(results, budget, save)
    if options.results == RESULTS:
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
