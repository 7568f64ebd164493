"""What an audit found about membership: lines, the page's section, and the figure over the rounds."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradveil.report.markup import section, spec
from gradveil.report.summary import membership
from gradveil.report.tables import NOTHING

MEMBERSHIP = (
    "defence", "attack", "n", "seeds", "failed", "auc", "auc_worst", "tpr_at_1_fpr", "advantage", "auc_loss",
    "auc_confidence", "gap", "members", "seconds",
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
}


def membership_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The section of the page; nothing where no attack on membership was run."""
    lines = membership(rows)
    if not lines:
        return ""
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
so that the class tells nothing. An AUC of 0.5 is guessing.</p>
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
    return f"{100 * value:+.1f} %" if key == "gap" else f"{100 * value:.1f} %" if "tpr" in key else f"{value:.3f}"


def areas_figure(rows: Iterable[Mapping[str, Any]]) -> Figure:
    """The area under the curve over the rounds: a line for each defence and attack, the mean of its seeds."""
    places: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows:
        if row["kind"] == "membership" and row["auc"] is not None:
            places.setdefault((row["defence"], row["attack"]), {}).setdefault(row["round"], []).append(row["auc"])
    figure = Figure(figsize=(7.6, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0.5, color="black", lw=0.8, ls=":")
    for (defence, attack), points in places.items():
        means = [sum(values) / len(values) for values in points.values()]
        name = f"{defence}, {attack.partition(':')[0]}".replace("$", r"\$")
        axes.plot(list(points), means, "o-", ms=4, label=name)
    low, high = axes.get_ylim()
    axes.set(xlabel="round", ylabel="AUC of membership; 0.5 is guessing")
    axes.set_ylim(min(low, 0.4), max(high, 0.7))  # chance alone must not look like much
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if places:
        axes.legend(frameon=False, fontsize=8)
    return figure
