"""The page of a training run: one self-contained HTML file that opens from disk."""

import base64
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from html import escape
from pathlib import Path
from typing import Any

from gradveil.config import TrainSettings
from gradveil.federated.learning import warning_of
from gradveil.metrics import schema_of
from gradveil.metrics.epsilon_hat import exceeding
from gradveil.report.curves import draw_curves
from gradveil.report.names import short_names, subject
from gradveil.report.training_folder import read_training
from gradveil.rows import Column
from gradveil.storage import write_atomic

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2rem; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
.scroll { overflow-x: auto; max-height: 30rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { position: sticky; top: 0; background: Canvas; }
pre { background: var(--soft); padding: .8rem; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { .scroll { max-height: none; } }
"""


def write_page(
    out: Path,
    settings: TrainSettings,
    rows: Sequence[Mapping[str, Any]],
    clients: Sequence[Mapping[str, Any]],
    note: str,
) -> Path:
    """Write ``report.html`` to ``out``, with the rows and the folder's ``curves.png``; return its path."""
    picture = base64.b64encode((out / "curves.png").read_bytes()).decode()
    last = _evaluated(rows)
    alarms = warning_of(last, settings), warnings_of(rows), exceeding(last)
    told = " ".join(filter(None, (promise(rows), note)))
    worst = sorted(clients, key=_own_accuracy)[:50]
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>gradveil: {escape(subject(vars(settings)))}</title><style>{STYLE}</style></head><body>
<h1>{escape(headline(settings, rows))}</h1>
{"".join(f"<p><strong>{escape(text)}</strong></p>" for text in alarms if text)}<p>{escape(told)}</p>
<img alt="Accuracy and loss over the rounds" src="data:image/png;base64,{picture}">
<h2>Rounds</h2>{_table(rows, "round")}
<h2>Clients, the worst first{" (50 of them)" if len(clients) > 50 else ""}</h2>
<p>Accuracy of the final model on each client's own training images.</p>
{_table(worst, "client")}
<h2>Repeat it</h2><pre>{escape(command(settings))}</pre>
<p>The same command gives the same weights and rows, bit for bit on the same machine with the same version of torch.</p>
</body></html>
"""
    write_atomic(out / "report.html", page.encode())
    return out / "report.html"


def _own_accuracy(row: Mapping[str, Any]) -> float:
    """Return a client's accuracy on its own images; a client that keeps it comes last."""
    accuracy = row.get("accuracy_own")
    return math.inf if accuracy is None else float(accuracy)


def rewrite_page(folder: Path) -> Path:
    """Write the page of a training run again from its folder; return its path.

    The run may be unfinished and files may be broken: the page says so.
    """
    found = read_training(folder)
    draw_curves(found.rows, folder)
    return write_page(folder, found.settings, found.rows, found.clients, " ".join(found.notes))


def headline(settings: TrainSettings, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the result in a sentence."""
    last = _evaluated(rows)
    names = (
        f"{subject(vars(settings))}, defence {short_names([settings.defence]).get(settings.defence, settings.defence)}"
    )
    if not last and rows and "round" in rows[-1]:  # sites gave no score
        return f"{names}: after {rows[-1]['round']} rounds with {settings.clients} clients, the accuracy is not known."
    if not last:
        return f"{names}: no round that was evaluated could be read."
    if not last["round"]:
        return f"{names}: {last['accuracy']:.2%} of the test images are recognised before any training."
    return (
        f"{names}: after {last['round']} rounds with {settings.clients} clients, "
        f"{last['accuracy']:.2%} of the test images are recognised."
    )


def _evaluated(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the last row with an accuracy, or {} if there is none."""
    return next((row for row in reversed(rows) if row.get("accuracy") is not None), {})


def promise(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the defence states for all rounds together, in a sentence; "" if no row states an ε.

    Example:
        >>> print(promise([{"epsilon": 4.38, "delta": 1e-5, "mu": 1.0, "identified_bound": 0.0183}]))
        The defence states for all rounds together: ε = 4.38, δ = 1e-05, μ = 1; picked out of 1,000: 1.8% at most.
    """
    stated = next((row for row in reversed(rows) if row.get("epsilon") is not None), None)
    if stated is None:
        return ""
    signs = {"epsilon": "ε", "delta": "δ", "mu": "μ"}
    figures = [f"{sign} = {stated[key]:.3g}" for key, sign in signs.items() if stated.get(key) is not None]
    picked, found = stated.get("identified_bound"), ", ".join(figures)
    bound = "" if picked is None else f"; picked out of 1,000: {picked:.1%} at most"
    return f"The defence states for all rounds together: {found}{bound}."


def warnings_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how often clients warned of the model that they received, in a sentence; "" if none did.

    Example:
        >>> warnings_of([{"tripwire_warnings": 2}, {"tripwire_warnings": 0}])
        'Clients warned of traps in the model that they received: 2 warnings in 1 of 2 rounds.'
    """
    looked = [row["tripwire_warnings"] for row in rows if row.get("tripwire_warnings") is not None]
    if not any(looked):
        return ""
    count = f"{sum(looked)} warning{'s' * (sum(looked) > 1)} in {sum(map(bool, looked))} of {len(looked)} rounds"
    return f"Clients warned of traps in the model that they received: {count}."


def command(settings: TrainSettings) -> str:
    """Return the command line that repeats the run."""
    defaults = asdict(TrainSettings())
    pieces = ["gradveil", "train"]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value != defaults[field.name]:
            option = f"--{field.name.replace('_', '-')}"
            text = "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
            pieces += [option] if value is True else [option, text]
    return shlex.join([*pieces, "--out", "DIR"])


def _table(rows: Sequence[Mapping[str, Any]], table: str) -> str:
    """Return the columns of a table that any row has a value for; a field that is no column is an error."""
    schema = schema_of()
    for row in rows:
        schema.check(table, row)
    there = {key for row in rows for key, value in row.items() if value is not None}
    used = [column for column in schema.of(table) if column.shown and column.key in there]
    head = "".join(f'<th scope="col" title="{escape(column.help)}">{escape(column.head)}</th>' for column in used)
    body = "".join("<tr>" + "".join(f"<td>{_cell(column, row)}</td>" for column in used) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(column: Column, row: Mapping[str, Any]) -> str:
    value = row.get(column.key)
    if isinstance(value, float):
        return f"{value:.2%}" if column.format == "%" else f"{value:.4g}"
    return escape(column.text(row))
