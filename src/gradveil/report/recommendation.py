"""The page of a recommendation: one self-contained HTML file with what was tried and what it costs."""

import base64
from collections.abc import Mapping
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from gradveil.report.training import STYLE
from gradveil.storage import write_atomic

NOT_PROTECTED = (
    "what many images of a client have in common; the number of a client's images; images of whoever adds no noise",
    "the public pictures from which frozen features are made",
)
HEADS = {
    "candidate": "Candidate", "accuracy": "Accuracy", "loss": "Points lost", "mu": "μ", "epsilon": "ε",
    "identified_bound": "Picked of 1,000", "why": "Why not",
}  # fmt: skip


def headline(document: Mapping[str, Any]) -> str:
    """Return the result in one sentence."""
    chosen = next((line for line in document["lines"] if line["candidate"] == document["chosen"]), None)
    if chosen is None:
        return "Nothing that was tried keeps the wish."
    check = document["check"]
    told = "confirmed" if check and check["holds"] else "NOT confirmed"
    return f"Recommended: {chosen['candidate']}; it loses {chosen['loss']:.1f} points, {told} with another seed."


def write_recommendation(out: Path, document: Mapping[str, Any], max_loss: float) -> Path:
    """Write ``report.html`` to ``out`` and return its path."""
    rows = [*document["lines"], *([{**document["check"], "candidate": "check"}] if document["check"] else [])]
    body = "".join(f"<tr>{''.join(f'<td>{escape(_text(key, row[key]))}</td>' for key in HEADS)}</tr>" for row in rows)
    heads = "".join(f"<th>{escape(head)}</th>" for head in HEADS.values())
    use = "<h2>Use it</h2><pre>gradveil train --config recommended.toml --out runs/protected</pre>"
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>gradveil recommend</title><style>{STYLE} td {{ white-space: normal; }}</style></head><body>
<h1>{escape(headline(document))}</h1>
<p>The wish: {escape(document["promise"])}, at a loss of at most {max_loss:g} points. Without protection the model has
an accuracy of {document["reference"]:.1%}.</p>
<img alt="Accuracy of each candidate, beside that without protection"
src="data:image/png;base64,{_picture(document, max_loss)}">
<h2>What was tried</h2><div class="scroll"><table><tr>{heads}</tr>{body}</table></div>
{use if document["chosen"] else ""}
<h2>What it does not protect</h2><ul>{"".join(f"<li>{escape(text)}</li>" for text in NOT_PROTECTED)}</ul>
</body></html>
"""
    write_atomic(out / "report.html", page.encode())
    return out / "report.html"


def _text(key: str, value: Any) -> str:  # noqa: ANN401 - a cell of any column
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1%}" if key in ("accuracy", "identified_bound") else f"{value:.2f}"


def _picture(document: Mapping[str, Any], max_loss: float) -> str:
    """Return the accuracies beside what was allowed, as a PNG in base64; all candidates keep the same promise."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    tried = [line for line in document["lines"] if line["accuracy"] is not None]
    colours = ["tab:green" if line["candidate"] == document["chosen"] else "tab:grey" for line in tried]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.5 * len(tried)))
    bars = axes.barh([line["candidate"] for line in tried], [100 * line["accuracy"] for line in tried], color=colours)
    axes.bar_label(bars, fmt="%.1f %%", label_type="center", color="white")
    reference = 100 * document["reference"]
    axes.axvline(reference, color="black", label="without protection")
    axes.axvline(reference - max_loss, color="black", linestyle=":", label="the largest loss allowed")
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy, %")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.4, -0.25), ncols=2)
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    return base64.b64encode(stream.getvalue()).decode()
