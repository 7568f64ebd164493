"""Kill nodes, and the server, of a secure training over Flower with SIGKILL (see benchmarks/flower_processes.py)."""

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flower_processes import Processes, federation, has_rows, kill, rows_of, until
from gradveil.storage import load_tensors

APP = Path("examples/flower")
RUN = {
    "dataset": "mnist-5k", "model": "lenet5", "defence": "prune", "aggregation": "secure", "sum-bits": 22,
    "sum-range": 1.0, "seed": 0,
}  # fmt: skip
POLICY = "defence='prune' aggregation='secure' repeatable=true"
STEPS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "keys": lambda part: True,
    "shares": lambda part: bool(part["roster"]),
    "update": lambda part: bool(part["request"]),
    "opening": lambda part: part["opened"] is not None,
}
"""What a site's file says as soon as it works on its answer of a step."""
Save = Callable[[Any], None]


def part_of(folder: Path, site: int) -> dict[str, Any]:
    """Return a site's state in the last secure sum, or nothing."""
    for path in (folder / f"site-{site}").rglob("sum.json"):
        try:
            return dict(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return {}


def reached(folder: Path, site: int, rounds: Collection[int], step: str) -> bool:
    """Return whether a site has come to a step of one of some rounds."""
    part = part_of(folder, site)
    return bool(part) and part["round"] in rounds and STEPS[step](part)


def kill_nodes(folder: Path, save: Save, most: int) -> None:
    """Kill one of five nodes after the other, in each step in turn, and restart it at once; three are enough."""
    sites, kills, found = 5, most or 20, list[dict[str, Any]]()
    with federation(folder, 8820, sites, POLICY) as all_:
        out = folder / "killed"
        limits = {"min-clients": 3, "round-seconds": 20, "wait-seconds": 300, "rounds": 20 * kills}
        run = all_.run(APP, out, {**RUN, "clients": sites, **limits})
        for number in range(kills):
            step, site = list(STEPS)[number % len(STEPS)], number % sites
            until("a round has four clients", _all_there, out, site, sites)
            after = len(rows_of(out))
            until(f"site {site} works on its {step}", reached, folder, site, range(after + 1, after + 9), step)
            killed = part_of(folder, site)["round"]
            all_.kill(f"node-{site}")
            all_.start_node(site, POLICY)
            until(f"round {killed} is over", has_rows, out, killed, run)
            row = next((row for row in rows_of(out) if row["round"] == killed), None)
            found.append({
                "step": step, "site": site, "round": killed, "finished": row is not None,
                "clients": row and row["clients"], "dropped": (row or {}).get("dropped", []),
            })  # fmt: skip
            if row is None:
                break
            save({"sites": sites, "kills": found, "rounds": len(rows_of(out)), "back": _back(out, found)})
        until("all are back", lambda: _back(out, found) == len(found) or run.poll() is not None)
        rows = rows_of(out)
        whole = [row["round"] for row in rows] == list(range(1, len(rows) + 1))
        save({
            "sites": sites, "kills": found, "rounds": len(rows), "back": _back(out, found), "in order": whole,
            "ended": run.poll() is not None, "accuracy": rows[-1]["accuracy"],
        })  # fmt: skip


def _all_there(out: Path, site: int, sites: int) -> bool:
    """Return whether at most one client is missing in the last round, and not this one."""
    rows = rows_of(out)
    missing = " ".join(rows[-1].get("dropped", [])) if rows else ""
    return bool(rows) and rows[-1]["clients"] >= sites - 1 and f"lient {site} " not in missing


def _back(out: Path, kills: Sequence[Mapping[str, Any]]) -> int:
    """Return how many killed clients took part in a later round."""
    rows = rows_of(out)
    return sum(
        any(row["round"] > each["round"] and f"lient {each['site']} " not in str(row.get("dropped")) for row in rows)
        for each in kills
    )


def kill_server(folder: Path, save: Save, _most: int) -> None:
    """Kill the server in each of five rounds, in another step each, and in the sixth the SuperLink; repeat the run."""
    sites, found, out = 3, list[dict[str, Any]](), folder / "server"
    settings = {**RUN, "clients": sites, "rounds": 6}
    moments = [*STEPS, "saved", "SuperLink"]
    with federation(folder, 8850, sites, POLICY) as all_:
        run = all_.run(APP, out, settings)
        for number, moment in enumerate(moments, 1):
            step = {"saved": "opening", "SuperLink": "update"}.get(moment, moment)
            until(f"site 0 works on its {step} of round {number}", reached, folder, 0, [number], step)
            if moment == "saved":
                until(f"round {number} is saved", has_rows, out, number)
            if moment == "SuperLink":
                all_.kill("link")
                all_.start_link()
            else:
                (server,) = all_.of_link("flwr-serverapp")
                kill(server)
            found.append({"round": number, "moment": moment, "rounds saved": len(rows_of(out))})
            run = _repeated(all_, out, settings)
        until("all rounds are played", has_rows, out, 6)
        run.wait(120)
    rounds = [row["round"] for row in rows_of(out)]
    save({"sites": sites, "kills": found, "rounds": rounds, "equals simulation": _simulated(folder, sites, out)})


def _repeated(all_: Processes, out: Path, settings: Mapping[str, object]) -> "subprocess.Popen[bytes]":
    all_.kill(f"run-{out.name}")  # what streams the log of the killed run
    return all_.run(APP, out, settings)


def _simulated(folder: Path, sites: int, out: Path) -> bool:
    """Return whether the same training by simulation ends with the same bits."""
    options = [part for key, value in RUN.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "gradveil", "train", *options, "--clients", str(sites), "--rounds", "6"]
    subprocess.run([*command, "--out", str(folder / "simulated")], check=True, stdout=subprocess.DEVNULL)
    one, other = (load_tensors(each / "model.safetensors") for each in (out, folder / "simulated"))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def nodes_table(figures: Mapping[str, Any]) -> str:
    """Return what came of kills of nodes, by step."""
    lines = ["| killed while it worked on | kills | rounds finished | with the killed client | without it |",
             "|---|---|---|---|---|"]  # fmt: skip
    for step in STEPS:
        kills = [each for each in figures["kills"] if each["step"] == step]
        without = sum(f"lient {each['site']} " in str(each["dropped"]) for each in kills)
        done = sum(each["finished"] for each in kills)
        lines.append(f"| its {step} | {len(kills)} | {done} | {done - without} | {without} |")
    return "\n".join(lines)


def server_table(figures: Mapping[str, Any]) -> str:
    """Return what was killed when."""
    lines = ["| killed | in round | when site 0 worked on | rounds saved until then |", "|---|---|---|---|"]
    for each in figures["kills"]:
        link = each["moment"] == "SuperLink"
        when = {"SuperLink": "its update", "saved": "nothing, after the round was saved"}
        moment = when.get(each["moment"], f"its {each['moment']}")
        name = "SuperLink and server" if link else "server"
        lines.append(f"| {name} | {each['round']} | {moment} | {each['rounds saved']} |")
    return "\n".join(lines)


PLAY = {"nodes": kill_nodes, "server": kill_server}
TABLES = {"nodes": nodes_table, "server": server_table}
