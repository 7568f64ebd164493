"""What an audit found about membership: lines, the page's section, and its figure."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradveil.metrics.roc import FALSE_RATES
from gradveil.report.files import drawn
from gradveil.report.headline import percent
from gradveil.report.markup import section, spec
from gradveil.report.summary import membership, utility
from gradveil.report.tables import NOTHING

MEMBERSHIP = (
    "defence", "attack", "n", "seeds", "failed", "auc", "auc_worst", "tpr_at_1_fpr", "advantage", "auc_loss",
    "auc_confidence", "gap", "members", "seconds", "accuracy", "overhead",
)  # fmt: skip
"""The columns of membership.csv."""

_HEADS = {
    "n": ("n", "Local models that were attacked, over all seeds"),
    "auc": ("AUC", "Area under the ROC curve, mean over rounds and seeds; 0.5 is guessing"),
    "auc_worst": ("Worst AUC", "The largest of all rounds and seeds"),
    "tpr_at_1_fpr": ("TPR at 1 % FPR", "Members found where one in a hundred others is taken for a member, mean"),
    "advantage": ("Advantage", "Largest difference of the true and the false positive rate, mean"),
    "auc_loss": ("AUC, loss", "Of a threshold on the loss, which needs the model's outputs, mean"),
    "auc_confidence": ("AUC, confidence", "Of a threshold on the largest probability, mean"),
    "gap": ("Accuracy gap", "Accuracy on members less that on others, mean"),
    "members": ("Members", "Images of the client that were tried, and as many others, mean"),
    "accuracy": ("Accuracy", "Test accuracy of the global model after training under the defence, mean over seeds"),
    "overhead": ("Overhead", "Time of a round, relative to the undefended one of the same audit"),
}


def membership_lines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The summary's lines about membership, each with what its defence costs."""
    costs = {cost["defence"]: cost for cost in utility(rows)}
    return [
        line | {key: costs.get(line["defence"], {}).get(key) for key in ("accuracy", "overhead")}
        for line in membership(rows)
    ]


def membership_section(rows: Sequence[Mapping[str, Any]], *, adaptive: bool = False) -> str:
    """The section of the page; nothing where no attack on membership was run.

    Args:
        rows: of the audit.
        adaptive: whether attackers who know the defence were asked for.
    """
    lines = membership_lines(rows)
    if not lines:
        return ""
    twice = " These attacks take the model as the defence leaves it, and have no second run that knows it." * adaptive
    picture = base64.b64encode(drawn(membership_figure(rows), "png")).decode()
    heads = "".join(f'<th scope="col" title="{escape(title)}">{head}</th>' for head, title in _HEADS.values())
    body = "".join(
        f'<tr><th scope="row">{spec(line["defence"])}</th><td class="text">{spec(line["attack"])}</td>'
        f"{''.join(f'<td>{_shown(key, line)}</td>' for key in _HEADS)}</tr>"
        for line in lines
    )
    return section(
        "membership",
        "Membership",
        f"""<p>Every few rounds a client is drawn, and the server asks of the model that it knows of this client which
images it was trained on. Members are the client's training images; the others are test images, as many of each class,
so that the class tells nothing. An AUC of 0.5 is guessing.{twice}</p>
<img class="plot" alt="ROC curves, and the area under them over the rounds" src="data:image/png;base64,{picture}">
<div class="scroll" tabindex="0" role="group" aria-label="Membership table"><table class="small"><thead><tr>
<th scope="col">Defence</th><th scope="col">Attack</th>{heads}</tr></thead><tbody>{body}</tbody></table></div>""",
    )


def _shown(key: str, line: Mapping[str, Any]) -> str:
    value = line[key]
    if value is None:
        return NOTHING
    failed = f" (+{line['failed']} failed)" if key == "n" and line["failed"] else ""
    if key in ("n", "members"):
        return f"{value:.0f}{failed}"
    if key == "gap":
        return f"{100 * value:+.1f} %"
    if key in ("tpr_at_1_fpr", "accuracy"):
        return percent(value)
    return f"{value:.2f}" if key == "overhead" else f"{value:.3f}"


def membership_figure(rows: Iterable[Mapping[str, Any]]) -> Figure:
    """The ROC curve, and the area under it over the rounds: a line for each defence and attack, means of its rows.

    The ROC curve's axes are logarithmic, for an attacker who is seldom wrong is the one to fear.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "membership" and row["auc"] is not None:
            groups.setdefault((row["defence"], row["attack"]), []).append(row)
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    curves, areas = figure.subplots(1, 2)
    least = FALSE_RATES[1]
    curves.plot([least, 1], [least, 1], color="black", lw=0.8, ls=":")
    areas.axhline(0.5, color="black", lw=0.8, ls=":")
    for (defence, attack), group in groups.items():
        name = f"{defence}, {attack.partition(':')[0]}".replace("$", r"\$")
        (line,) = areas.plot(*_means({row["round"]: [] for row in group}, group), "o-", ms=4, label=name)
        rocs = [row["roc"] for row in group if row["roc"]]
        if rocs:
            means = [fmean(rates) for rates in zip(*rocs, strict=True)]
            curves.plot(FALSE_RATES[1:], means[1:], color=line.get_color(), label=name)
    curves.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.05))
    curves.set(xlabel="others taken for members", ylabel="members found", title="ROC curve")
    low, high = areas.get_ylim()
    areas.set(xlabel="round", ylabel="AUC; 0.5 is guessing", title="Area under it")
    areas.set_ylim(min(low, 0.4), max(high, 0.7))  # chance alone must not look like much
    areas.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curves, areas):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if groups:
        areas.legend(frameon=False, fontsize=8)
    return figure


def _means(places: dict[int, list[float]], group: Iterable[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    """The rounds, and the mean area in each."""
    for row in group:
        places[row["round"]].append(row["auc"])
    return list(places), [fmean(values) for values in places.values()]
