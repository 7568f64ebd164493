"""The page of a recommendation: one self-contained HTML file with what was tried, what it costs, and how to use it."""

import base64
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from gradveil.report.training import STYLE
from gradveil.storage import write_atomic

HEADS = {
    "candidate": "Candidate", "stage": "Stage", "accuracy": "Accuracy", "loss": "Points lost", "epsilon": "\u03b5",
    "identified_bound": "Picked of 1,000", "psnr": "Attackers, dB", "blind_psnr": "Blind guess, dB",
    "psnr_undefended": "Undefended, dB", "why": "Why not",
}  # fmt: skip
SHARES = ("accuracy", "identified_bound")
DECIBELS = ("psnr", "blind_psnr", "psnr_undefended")
Line = Mapping[str, Any]


def headline(document: Line) -> str:
    """Return the result in one sentence."""
    check = document["check"]
    if not document["chosen"] or check is None:
        return "Nothing that was tried keeps the wish."
    cost = f"it loses {check['loss']:.1f} points ({check['lowest']:.1f} to {check['highest']:.1f})"
    told = "confirmed" if check["holds"] else f"NOT confirmed: {check['why']}"
    return f"Recommended: {document['chosen']}; {cost} on test images, {told}."


def nearest_text(document: Line) -> str:
    """Return what comes nearest to a wish that nothing keeps."""
    if not document["nearest"]:
        return "Nothing with a guarantee could be trained."
    told = "; ".join(f"{line['candidate']} ({line['loss']:.1f} points)" for line in document["nearest"])
    return f"Nearest: {told}. Raise --max-loss, or ask for less protection."


def write_recommendation(out: Path, document: Line) -> Path:
    """Write ``report.html`` to ``out`` and return its path."""
    chosen = document["chosen"]
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>gradveil recommend</title><style>{STYLE}
body {{ max-width: 72rem; }} .scroll {{ max-height: none; }} tr.chosen td {{ font-weight: 600; }}
.scroll table {{ font-size: .9rem; }} .scroll th, .scroll td {{ white-space: normal; padding: .25rem .5rem; }}
.scroll td:first-child {{ min-width: 16rem; }} .scroll td:last-child, .scroll th:last-child {{ text-align: left; }}
</style></head><body>
<h1>{escape(headline(document))}</h1>
<p>The wish: {escape(document["promise"])}, at a loss of at most {document["max_loss"]:g} points.
{escape("" if chosen else nearest_text(document))}</p>
<img alt="Accuracy of each candidate against the chance to pick an image; the table below says the same"
src="data:image/png;base64,{_picture(document)}">
<h2>What was tried</h2>
<p>Accuracies in this table are of {document["held_out"]:,} training images that were held out; without protection
{escape(document["model"])} has {document["reference"]:.1%}. Attackers had clients with one image each, and one update
with the budget of the whole training; beside them stand a blind guess and the same attack without the defence.</p>
{_table(HEADS, document["lines"], chosen)}{_not_attacked(document["lines"])}
{_verification(document["check"]) if document["check"] else ""}
{_use(document["advice"]) if document["advice"] else ""}
</body></html>
"""
    write_atomic(out / "report.html", page.encode())
    return out / "report.html"


def cell(key: str, line: Line) -> str:
    """Return the text of a cell."""
    value = line[key]
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1%}" if key in SHARES else f"{value:.1f}" if key in DECIBELS else f"{value:.2f}"


def _table(heads: Mapping[str, str], lines: Iterable[Line], chosen: str) -> str:
    body = []
    for number, line in enumerate(lines, 1):
        cells = "".join(
            f"<td>{f'{number}. ' if key == 'candidate' else ''}{escape(cell(key, line))}</td>" for key in heads
        )
        body.append(f"<tr{' class=chosen' if line['candidate'] == chosen else ''}>{cells}</tr>")
    titles = "".join(f"<th>{escape(head)}</th>" for head in heads.values())
    return f'<div class="scroll"><table><tr>{titles}</tr>{"".join(body)}</table></div>'


def _not_attacked(lines: Iterable[Line]) -> str:
    """Return why finalists could not be attacked, or nothing."""
    told = [f"{line['candidate']}: {line['why_not_attacked']}" for line in lines if line["why_not_attacked"]]
    return f"<p>Not attacked: {escape('; '.join(told))}</p>" if told else ""


def _verification(check: Line) -> str:
    """Return the test accuracies, with and without the protection, one line per seed."""
    rows = zip(check["seeds"], check["accuracies"], check["references"], check["losses"], strict=True)
    body = "".join(f"<tr><td>{n}</td><td>{a:.1%}</td><td>{b:.1%}</td><td>{c:.2f}</td></tr>"
                   for n, a, b, c in rows)  # fmt: skip
    heads = "".join(f"<th>{head}</th>" for head in ("Seed", "Protected", "Without protection", "Points lost"))
    return f"""<h2>Verification</h2>
<p>Trained on all training images and scored on the test images, which nothing before this has seen. Expected loss:
{check["loss"]:.2f} points ({check["lowest"]:.2f} to {check["highest"]:.2f}). The guarantee of the training's own
rows: {escape(_guarantee(check))}.</p><table><tr>{heads}</tr>{body}</table>"""


def _guarantee(check: Line) -> str:
    if check["epsilon"] is None:
        return "none"
    mu = "" if check["mu"] is None else f"\u03bc = {check['mu']:.3g}, "
    return (
        f"{mu}\u03b5 = {check['epsilon']:.3g}, picked of 1,000 with a chance of at most {check['identified_bound']:.1%}"
    )


def _use(advice: Line) -> str:
    """Return the commands, the policy of a site, and what stays unprotected."""
    attack = f"\n{advice['attack']}" if advice["attack"] else ""
    return f"""<h2>Use it</h2>
<p>These commands train the configuration (as the verification did), and attack it in its worst case:</p>
<pre>{escape(advice["train"] + attack)}</pre>
<p>Over Flower, with the policy of each site beside its own <code>partition-id</code>, <code>private-folder</code> and
<code>data</code>:</p><pre>{escape(advice["flower"])}</pre><pre>{escape(advice["site"])}</pre>
<h2>What it does not protect</h2>
<ul>{"".join(f"<li>{escape(text)}</li>" for text in advice["unprotected"])}</ul>"""


def _picture(document: Line) -> str:
    """Return the figure as a PNG in base64."""
    from gradveil.report.files import drawn  # matplotlib takes a second
    from gradveil.report.recommendation_figure import draw

    return base64.b64encode(drawn(draw(document), "png")).decode()
