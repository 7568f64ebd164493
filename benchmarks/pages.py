"""Write the tables in docs that stand between ``<!-- results/NAME.json -->`` and ``<!-- end -->``; a test checks them.

Run from the root of the repository: python benchmarks/pages.py
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "\n<!-- results/" in page.read_text()]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def mixtures(result: Mapping[str, Any]) -> str:
    """Return the table of images decoded from inverted mixtures."""
    rows = []
    for run in result["runs"]:
        defence = re.search(r"--defence (\S+)", run["command"])
        name = "" if defence is None else f"`{defence.group(1)}`"
        for row in run["rows"]:
            shown = [
                name,
                f"{run['inverted_psnr']:.1f}",
                row["decoder"],
                f"{row.get('rehearsals', 0)}",
                f"**{row['psnr']:.1f}**",
                f"{row['best']:.1f}",
            ]
            rows.append(shown)
    return _table(["defence", "mixtures, inverted", "the decoder knows", "rehearsals", "images, mean", "best"], rows)


def completion(result: Mapping[str, Any]) -> str:
    """Return the table of attackers of dcs2 and pruning."""
    words = {
        "plain": "plain", "joint": "searches the concealed sample too (`adapt=joint`)",
        "completed": "also completes and separates the last layer (the default)",
    }  # fmt: skip
    rows = [[words[row["attacker"]], f"{row['psnr']:.1f}", _each(row["each"])] for row in result["rows"]]
    return _table(["attacker", "mean PSNR", "each digit"], rows)


def ggl(result: Mapping[str, Any]) -> str:
    """Return the table of GGL's objectives."""
    rows = [[f"`{row['defence']}`", row["generator"], row["objective"], f"{row['psnr']:.1f}"] for row in result["rows"]]
    return _table(["defence", "generator", "objective", "mean PSNR"], rows)


def batch_norm(result: Mapping[str, Any]) -> str:
    """Return the table of attacks on FedKL and PRECODE in both modes of BatchNorm."""
    rows = [
        [f"`{row['defence']}`", row["batch_norm"], "knows the defence" if row["adaptive"] else "plain",
         f"{row['psnr']:.1f}", _each(row["each"])]
        for row in result["rows"]
    ]  # fmt: skip
    return _table(["defence", "BatchNorm", "attacker", "mean PSNR", "each digit"], rows)


def imprint_strength(result: Mapping[str, Any]) -> str:
    """Return the table of what imprint rows of different strength recover."""
    found: dict[tuple[str, str, float], list[float]] = {}
    for row in result["rows"]:
        found.setdefault((row["defence"], row["dataset"], row["gain"]), []).append(row["ssim"])
    defences = dict.fromkeys(defence for defence, _, _ in found)
    columns = list(dict.fromkeys((dataset, gain) for _, dataset, gain in found))
    rows = [[f"`{defence}`", *(_mean(found.get((defence, *column))) for column in columns)] for defence in defences]
    return _table(["defence", *(f"{dataset}, gain {gain:g}" for dataset, gain in columns)], rows)


def _mean(values: Sequence[float] | None) -> str:
    return f"{statistics.fmean(values):.2f}" if values else "not measured"


def _line_of(row: Mapping[str, Any]) -> str:
    """Return the line of the tripwire's table to which a kind of model belongs."""
    if row["kind"] == "honest" and not re.search("Hardtanh|ReLU6", row["name"]):
        return "honest models of the zoo: false alarms"
    if row["kind"] == "one-shot" and re.search("two rows.*noise 100 %", row["name"]):
        return "one-shot imprint in two rows of the first layer, noise of 100 %: found"
    return {
        "honest": "honest, bounded activations: false alarms",
        "saturated": "honest, bounded activations and large weights: false alarms",
        "imprint": "imprint, with its mild variants: found",
        "one-shot": "one-shot and sparse imprints, all other variants: found",
        "trap-weights": "trap weights, with their mild variants: found",
    }[row["kind"]]


def tripwire(result: Mapping[str, Any]) -> str:
    """Return the table of the tripwire's alarms by kind of model, and a list of false and missed ones."""
    datasets, lines = dict.fromkeys(row["dataset"] for row in result["rows"]), dict[str, list[Mapping[str, Any]]]()
    for row in result["rows"]:
        lines.setdefault(_line_of(row), []).append(row)

    def counted(rows: Sequence[Mapping[str, Any]], dataset: str) -> str:
        own = [row for row in rows if dataset in ("", row["dataset"])]
        return f"{sum(row['alarms'] for row in own)} of {sum(row['models'] for row in own)}"

    cells = [[title, *(counted(rows, name) for name in (*datasets, ""))] for title, rows in sorted(lines.items())]
    wrong = []
    for row in result["rows"]:
        honest = row["kind"] in ("honest", "saturated")
        count = row["alarms"] if honest else row["models"] - row["alarms"]
        said = f"{count} of {row['models']} {'false alarms' if honest else 'missed'}"
        by = " by " + ", ".join(f"`{check}`" for check in row["by"]) if honest else ""
        wrong += [f"- {row['dataset']}, {row['kind']}, {row['name']}: {said}{by}"] if count else []
    return "\n".join([_table(["", *datasets, "together"], cells), "", *wrong])


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "mixtures": mixtures, "completion": completion, "ggl": ggl, "batch-norm": batch_norm,
    "imprint-strength": imprint_strength, "tripwire": tripwire,
}  # fmt: skip


def written(text: str) -> str:
    """Return a page with the tables of all blocks ``<!-- results/NAME.json -->`` made anew."""

    def block(found: re.Match[str]) -> str:
        result = json.loads((ROOT / "results" / f"{found.group(1)}.json").read_text())
        return f"<!-- results/{found.group(1)}.json -->\n{TABLES[found.group(1)](result)}\n<!-- end -->"

    return re.sub(r"<!-- results/([a-z-]+)\.json -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text()))
