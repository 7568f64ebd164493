"""A page for each paper, made from results: every claim with its verdict, and all rows.

``python -m gradveil.reproduce.pages`` writes docs/results/ from results/ in the working directory.
"""

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from gradveil.report.training import STYLE
from gradveil.reproduce import papers
from gradveil.reproduce.base import Paper, command, rows_table
from gradveil.reproduce.claims import KNOWING, RULE, VERDICTS, Judged, claims_of, judge
from gradveil.reproduce.results import Record, read_records, record_of, rows_over_seeds
from gradveil.storage import write_atomic

Records = Mapping[str, Record]
COLUMNS = ("where", "claim", "the paper", "ours", "scale", "attacker", "verdict", "why")
CHANGED = "Sources changed since"
"""How the line begins that marks a result as older than its sources; tests leave such lines out."""


def judged(paper: Paper, records: Records) -> list[Judged]:
    """Return the verdicts on all claims of a paper, in its order."""
    return [
        judge(paper.name, claim, records[claim.table].runs if claim.table in records else ())
        for claim in claims_of(paper.name)
    ]


def _cells(one: Judged) -> tuple[str, ...]:
    claim = one.claim
    paper, attacker = claim.paper or "no figure", claim.attacker or "none"
    return claim.where, claim.says, paper, one.ours or "nothing", one.scale or "none", attacker, one.verdict, one.why


def counted(verdicts: Sequence[Judged]) -> str:
    """Count verdicts in words.

    Example:
        >>> counted([])
        '0 claims'
    """
    found = Counter(one.verdict for one in verdicts)
    parts = [f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict]]
    return f"{len(verdicts)} claim{'s' * (len(verdicts) != 1)}" + (f": {', '.join(parts)}" if parts else "")


def _apart(verdicts: Sequence[Judged]) -> tuple[list[Judged], list[Judged]]:
    """Return the verdicts on the paper's claims, and on the same claims against attackers who know the defence."""
    return [one for one in verdicts if not one.claim.ours], [one for one in verdicts if one.claim.ours]


# --- Markdown ---------------------------------------------------------------------------------------------------------


def paper_page(paper: Paper, records: Records, results: str = "../../results") -> str:
    """Return a paper's page; ``results`` is the way from the page to the folder of results."""
    plain, knowing = _apart(judged(paper, records))
    parts = [
        f"# {paper.name}",
        "Written by `make results` from `results/`; don't edit it.",
        f"{paper.reference}. What breaks it, and where the paper, its authors' code and ours differ: "
        f"[notes](notes-{paper.name}.md).",
        f"**The paper's own claims.** {counted(plain)}.",
        _table([_cells(one) for one in plain]),
    ]
    if knowing:
        parts += [
            f"**The same claims against an attacker who knows the defence**, which the paper does not consider. "
            f"{counted(knowing)}.",
            _table([_cells(one) for one in knowing]),
        ]
    parts.append(RULE)
    for name, experiment in paper.experiments.items():
        parts += [f"## {name}: {experiment.title}", *_experiment(paper, name, records.get(name), results)]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Sequence[str]], titles: Sequence[str] = COLUMNS) -> str:
    lines = [titles, ["---"] * len(titles), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _experiment(paper: Paper, name: str, record: Record | None, results: str) -> list[str]:
    if record is None:
        return [f"Not run. `{command(paper.name, name)}`"]
    runs = record.largest
    first, changed = runs[0], record.changed(paper.name)
    seeds = ", ".join(str(run["seed"]) for run in runs)
    known = ", ".join(f"{key} {value}" for key, value in first["versions"].items())
    lines = [
        f"`{first['command']}`; scale {first['scale']}, seeds {seeds}, {first['date']}, {known}.",
        rows_table(rows_over_seeds(runs)),
        "\n".join(f"- {note}" for note in first["notes"]),
        *(f"![{figure}]({results}/{paper.name}/{name}-{figure}.png)" for figure in first["figures"]),
    ]
    if changed:
        shown = ", ".join(f"`{one}`" for one in changed[:8]) + (f" and {len(changed) - 8} more" if changed[8:] else "")
        lines.insert(1, f"{CHANGED}: {shown}.")
    return [line for line in lines if line]


def index_page(everything: Mapping[str, tuple[Paper, Records]]) -> str:
    """Return the page that counts the claims of all papers."""
    rows = []
    for name, (paper, records) in everything.items():
        for kind, verdicts in zip(("the paper's", KNOWING), _apart(judged(paper, records)), strict=True):
            found = Counter(one.verdict for one in verdicts)
            if verdicts:
                rows.append(
                    [f"[{name}]({name}.md)", kind, str(len(verdicts)), *(str(found[verdict]) for verdict in VERDICTS)]
                )
    titles = ("paper", "attacker", "claims", *VERDICTS)
    return (
        "\n\n".join(
            [
                "# What holds",
                "Written by `make results` from `results/`; don't edit it.",
                "Every table, figure and stated claim of five papers, and whether it holds in our own runs. Claims "
                "about attacks are counted twice: against the paper's attacker, and against one who knows the defence.",
                _table(rows, titles),
                RULE,
            ]
        )
        + "\n"
    )


def pages(results: Path) -> dict[str, str]:
    """Return the content of every page of docs/results by its file name."""
    everything = {name: (paper, read_records(results / name)) for name, paper in papers().items() if claims_of(name)}
    written = {f"{name}.md": paper_page(paper, records) for name, (paper, records) in everything.items()}
    return {"index.md": index_page(everything), **written}


# --- HTML -------------------------------------------------------------------------------------------------------------


def html_page(paper: Paper, records: Records, out: Path) -> str:
    """Return one HTML file with the verdicts, the rows and the pictures of the runs below ``out``."""
    verdicts = judged(paper, records)
    body = [f"<h1>{escape(paper.name)}: {escape(counted(verdicts))}</h1><p>{escape(paper.reference)}.</p>"]
    body += [_html_table(COLUMNS, [_cells(one) for one in verdicts]), f"<p>{escape(RULE.replace('*', ''))}</p>"]
    for name, record in records.items():
        run = record.largest[0]
        rows = rows_over_seeds(record.largest)
        titles = list(dict.fromkeys(key for row in rows for key in row))
        cells = [["" if row.get(key) is None else str(row[key]) for key in titles] for row in rows]
        body.append(f"<h2>{escape(name)}: {escape(record.title)}</h2><pre>{escape(run['command'])}</pre>")
        body.append(_html_table(titles, cells))
        body += [f"<p>{escape(note)}</p>" for note in run["notes"]]
        body += [_picture(out / name / f"{figure}.png") for figure in run["figures"]]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>gradveil: {escape(paper.name)}</title><style>{STYLE} td {{ white-space: normal; text-align: left; }}"
        "</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _html_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title.replace('_', ' '))}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _picture(path: Path) -> str:
    if not path.exists():
        return ""
    return f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def records_below(paper: Paper, out: Path) -> dict[str, Record]:
    """Return the records of the experiments of a paper that are finished below ``out``, in the paper's order."""
    found = (json.loads(path.read_bytes()) for path in sorted(out.glob("*/results.json")))
    mine = [document for document in found if document.get("paper") == paper.name]
    order = {name: place for place, name in enumerate(paper.experiments)}
    return {document["table"]: record_of([document]) for document in sorted(mine, key=lambda one: order[one["table"]])}


def write_html(paper: Paper, out: Path) -> Path:
    """Write the page of the experiments of a paper that are finished below ``out``; return its path."""
    path = out / f"{paper.name}.html"
    write_atomic(path, html_page(paper, records_below(paper, out), out).encode())
    return path


def write_pages(results: Path = Path("results"), docs: Path = Path("docs/results")) -> None:
    """Write every page of docs/results."""
    for name, content in pages(results).items():
        write_atomic(docs / name, content.encode())


if __name__ == "__main__":
    write_pages()
