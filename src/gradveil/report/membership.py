"""What an audit found about membership: the page's section and its figure."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradveil.metrics import schema_of
from gradveil.metrics.roc import FALSE_RATES
from gradveil.report.files import drawn
from gradveil.report.markup import section, spec
from gradveil.report.names import SPECS
from gradveil.report.plane import shortened
from gradveil.report.summary import membership
from gradveil.report.tables import page_columns, shown
from gradveil.rows import Schema


def membership_section(
    rows: Sequence[Mapping[str, Any]], schema: Schema | None = None, *, adaptive: bool = False
) -> str:
    """Return the section of the page, or "" if no attack on membership was run.

    Args:
        rows: the rows of the audit.
        schema: their columns; by default those of an audit with the standard metrics.
        adaptive: whether the audit was run with --adaptive.
    """
    schema = schema or schema_of()
    lines = membership(rows, schema)
    if not lines:
        return ""
    twice = _twice(lines) if adaptive else ""
    picture = base64.b64encode(drawn(membership_figure(rows), "png")).decode()
    told = SPECS if any(line["adaptive"] for line in lines) else (*SPECS, "adaptive")
    columns = [column for column in page_columns(lines, schema, "members") if column.key not in told]
    heads = "".join(f'<th scope="col" title="{escape(c.help)}">{escape(c.head)}</th>' for c in columns)
    body = "".join(
        f'<tr><th scope="row">{spec(line["defence"])}</th><td class="text">{spec(line["attack"])}</td>'
        f"{''.join(f'<td>{escape(shown(column, line))}</td>' for column in columns)}</tr>"
        for line in lines
    )
    return section(
        "membership",
        "Membership",
        f"""<p>Every few rounds the server picks a client at random and tries to find out which images the client's
model was trained on. Members are the client's training images. The others are test images, with the same number of each
class, so that the class does not give members away. Figures are means over rounds and seeds; an AUC of 0.5 is
guessing.{twice}</p>
<img class="plot" alt="ROC curves, and the area under them over the rounds" src="data:image/png;base64,{picture}">
<div class="scroll" tabindex="0" role="group" aria-label="Membership table"><table class="small"><thead><tr>
<th scope="col">Defence</th><th scope="col">Attack</th>{heads}</tr></thead><tbody>{body}</tbody></table></div>""",
    )


def _twice(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return which attacks had a second run with knowledge of the defence."""
    if any(line["adaptive"] for line in lines):
        return (
            " Adaptive attackers know the defence and play their shadow models under it. Attacks without shadow models "
            "use the model as the defence leaves it, and have no second run."
        )
    return " These attacks use the model as the defence leaves it, and have no second run with knowledge of it."


def membership_figure(rows: Iterable[Mapping[str, Any]]) -> Figure:
    """Return the figure of the ROC curve and of the area under it by round: one line per defence and attack, means.

    The ROC curve's axes are logarithmic because an attacker who is seldom wrong is the most dangerous.
    """
    groups: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "membership" and row["auc"] is not None:
            groups.setdefault((row["defence"], row["attack"], bool(row.get("adaptive"))), []).append(row)
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    curves, areas = figure.subplots(1, 2)
    least = FALSE_RATES[1]
    curves.plot([least, 1], [least, 1], color="black", lw=0.8, ls=":")
    areas.axhline(0.5, color="black", lw=0.8, ls=":")
    for (defence, attack, adaptive), group in groups.items():
        name = f"{shortened(defence, 34)}, {shortened(attack.partition(':')[0], 20)}".replace("$", r"\$")
        name += " (adaptive)" * adaptive
        (line,) = areas.plot(*_means({row["round"]: [] for row in group}, group), "o-", ms=4, label=name)
        rocs = [row["roc"] for row in group if row["roc"]]
        if rocs:
            means = [fmean(rates) for rates in zip(*rocs, strict=True)]
            curves.plot(FALSE_RATES[1:], means[1:], color=line.get_color(), label=name)
    curves.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.05))
    curves.set(xlabel="others taken for members", ylabel="members found", title="ROC curve")
    low, high = areas.get_ylim()
    areas.set(xlabel="round", ylabel="AUC; 0.5 is guessing", title="Area under it")
    areas.set_ylim(min(low, 0.4), max(high, 0.7))  # so that chance alone does not look like a leak
    areas.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curves, areas):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if groups:
        areas.legend(frameon=False, fontsize=8)
    return figure


def _means(places: dict[int, list[float]], group: Iterable[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    """Return the rounds, and the mean area in each."""
    for row in group:
        places[row["round"]].append(row["auc"])
    return list(places), [fmean(values) for values in places.values()]
