"""The tables that `gradveil audit` prints."""

from collections import Counter
from typing import Any

from rich.table import Table

from gradveil.cli.display import figure
from gradveil.registry import parse_spec


def audit_table(title: str, summary: list[dict[str, Any]], prices: list[dict[str, Any]]) -> Table:
    """What leaked under each defence and attack, and the defence's price in the same line."""
    attacks = dict.fromkeys(row["attack"] for row in summary)
    short = Counter(parse_spec(attack)[0] for attack in attacks)
    partly = any(row["guessed"] is not None and row["guessed"] < 1 for row in summary)
    heads = ["defence", "attack", "attacker", "psnr", "worst", "ssim", *["guessed"] * partly, "recognisable"]
    heads += ["not converged", "eps update", "eps training", "accuracy", "s/round", "overhead"]
    table = Table(*heads, title=title, title_justify="left")
    price = {row["defence"]: row for row in prices}
    for row in summary:
        cost = price.get(row["defence"], {})
        table.add_row(
            row["defence"],
            name if short[name := parse_spec(row["attack"])[0]] == 1 else row["attack"],
            "adaptive" if row["adaptive"] else "plain",
            figure(row["psnr"], ".1f"),
            figure(row["psnr_worst"], ".1f"),
            figure(row["ssim"], ".2f"),
            *[figure(row["guessed"], ".0%")] * partly,
            f"{row['recognisable']} of {row['n']}",
            str(row["not_converged"]),
            figure(row["epsilon"], ".3g"),
            figure(cost.get("epsilon"), ".3g"),
            figure(cost.get("accuracy"), ".1%"),
            figure(cost.get("round_seconds"), ".3g"),
            figure(cost.get("overhead"), ".2f"),
        )
    return table


def membership_table(title: str, lines: list[dict[str, Any]], prices: list[dict[str, Any]]) -> Table:
    """How well members are told from others under each defence; the means are over rounds and seeds."""
    heads = ("defence", "attack", "auc", "worst", "tpr at 1% fpr", "auc loss", "auc confidence", "accuracy gap")
    table = Table(*heads, "accuracy", title=title, title_justify="left")
    accuracy = {row["defence"]: row["accuracy"] for row in prices}
    for line in lines:
        table.add_row(
            line["defence"],
            line["attack"],
            *(figure(line[key], ".3f") for key in ("auc", "auc_worst", "tpr_at_1_fpr", "auc_loss", "auc_confidence")),
            figure(line["gap"], "+.1%"),
            figure(accuracy.get(line["defence"]), ".1%"),
        )
    return table
