"""The claims of Soteria (Sun et al. 2021)."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from gradveil.reproduce.claims import (
    Claim,
    Contradicted,
    Rows,
    TooLittle,
    against_both,
    learned,
    mean_of,
    numbers,
    share,
    where,
    works,
)

TABLE_1 = {
    "E=1, B=32": "0.98 / 0.99 / 0.99", "E=5, B=32": "0.82 / 0.90 / 0.92", "E=10, B=32": "0.70 / 0.78 / 0.82",
    "E=1, B=16": "0.82 / 0.93 / 0.99", "E=1, B=8": "0.85 / 0.89 / 0.92", "E=1, B=32 (IID)": "0.48 / 0.31 / 0.18",
}  # fmt: skip
NON_IID = [name for name in TABLE_1 if "IID" not in name]
LEARNED = 0.9
"""Accuracy on MNIST from which a training without defence counts as having learned."""
NO_LOSS = 0.01
"""An accuracy that is lower by at most this much counts as not lost."""
AUTHORS = "lenet-dlg:convs=4"
"""The network that the authors' code attacks."""


# --- Table 1: representations -----------------------------------------------------------------------------------------


def _layers(rows: Rows, training: str) -> list[float]:
    """Return the correlations of the three layers, by the method that we read in the paper."""
    return numbers(where(rows, training=training)[0]["elements"])


def _apart(training: str) -> Callable[[Rows], float]:
    paper = numbers(TABLE_1[training])
    return lambda rows: max(abs(a - b) for a, b in zip(_layers(rows, training), paper, strict=True))


def _falls(*trainings: str) -> Callable[[Rows], float]:
    """Return the smallest fall of a layer's correlation from one training to the next."""

    def measure(rows: Rows) -> float:
        steps = itertools.pairwise(trainings)
        return min(a - b for x, y in steps for a, b in zip(_layers(rows, x), _layers(rows, y), strict=True))

    return measure


def _high(rows: Rows) -> float:
    values = [value for name in NON_IID for value in _layers(rows, name)]
    return sum(value > 0.8 for value in values) / len(values)


def _iid_gap(rows: Rows) -> float:
    first, iid = (_layers(rows, name) for name in ("E=1, B=32", "E=1, B=32 (IID)"))
    return min(a - b for a, b in zip(first, iid, strict=True))


def _specific(rows: Rows) -> float:
    row = where(rows, training="E=1, B=32")[0]
    return max(a - b for a, b in zip(numbers(row["elements"]), numbers(row["elements_other_class"]), strict=True))


def _classes(rows: Rows) -> float:
    return share(where(rows, training="E=1, B=32")[0]["classes_exact"])


# --- Figure 3: parts of the gradient ----------------------------------------------------------------------------------

WHOLE, CONVOLUTIONS, REP = "WG (whole gradient)", "CLG (convolutions)", "Rep (inferred, then inverted)"


def _seen(part: str) -> Callable[[Rows], float]:
    return lambda rows: share(where(rows, part=part, network=AUTHORS)[0]["recognisable"])


def _behind(part: str, other: str) -> Callable[[Rows], float]:
    """Return by how much the SSIM of ``other`` exceeds that of ``part``."""

    def measure(rows: Rows) -> float:
        return mean_of(rows, "ssim", part=other, network=AUTHORS) - mean_of(rows, "ssim", part=part, network=AUTHORS)

    return measure


# --- Figures 5 and 6: privacy against accuracy ------------------------------------------------------------------------

UNRECOGNISABLE = 0.1
"""MSE on [0, 1] from which an image counts as not recognisable: that of a black image on MNIST."""


def _inverts(rows: Rows) -> None:
    """Raise `TooLittle` unless the best attack reconstructs images that have no defence."""
    best = min((float(row["mse"]) for row in where(rows, defence="none")), default=1.0)
    works(-10 * math.log10(best), 16, "dB")


def _on(dataset: str, rows: Rows) -> Rows:
    return [row for row in rows if row["dataset"].startswith(dataset)]


def _hidden_loss(rows: Rows, *families: str) -> list[float]:
    """Return the accuracy lost by each setting of these defences that makes images unrecognisable to every attack."""
    rows = _on("mnist", rows)
    best = learned(rows, LEARNED)
    _inverts(rows)
    specs = dict.fromkeys(row["defence"] for family in families for row in where(rows, defence=family))
    hidden = [spec for spec in specs if min(row["mse"] for row in where(rows, defence=spec)) > UNRECOGNISABLE]
    if not hidden:
        raise Contradicted(f"no setting of {', '.join(families)} hides the images from every attack")
    return [best - mean_of(rows, "accuracy", defence=spec) for spec in hidden]


def _times(rows: Rows) -> float:
    """Return Soteria's largest MSE over that of the baselines, each at its most private setting without loss."""
    rows = _on("mnist", rows)
    best = learned(rows, LEARNED)
    _inverts(rows)

    def most(*families: str) -> float:
        specs = {row["defence"] for family in families for row in where(rows, defence=family)}
        kept = [s for s in specs if best - mean_of(rows, "accuracy", defence=s) <= NO_LOSS]
        if not kept:
            raise Contradicted(f"no setting of {', '.join(families)} keeps the accuracy")
        return max(min(float(row["mse"]) for row in where(rows, defence=spec)) for spec in kept)

    return most("soteria") / most("prune", "gaussian", "laplace")


def _at_rate(key: str, family: str, rates: tuple[float, ...]) -> Callable[[Rows], float]:
    def measure(rows: Rows) -> float:
        names = {"soteria": "soteria:prune", "prune": "prune:fraction"}
        works(max(share(row[key]) for row in where(rows, defence="none")), 0.5, "share of images recognisable")
        found = [row for rate in rates for row in where(rows, defence=f"{names[family]}={rate}")]
        if not found:
            raise TooLittle(f"no row at {', '.join(map(str, rates))}")
        return max(share(row[key]) for row in found)

    return measure


def _ratio_at_same_rate(rows: Rows) -> float:
    """Return the smallest ratio of the MSE of Soteria to that of pruning at one rate."""
    _inverts(rows)
    rates = {row["defence"].partition("=")[2] for row in where(rows, defence="soteria")}
    return min(
        mean_of(rows, "mse", defence=f"soteria:prune={rate}") / mean_of(rows, "mse", defence=f"prune:fraction={rate}")
        for rate in rates
    )


# --- Figure 7: convergence --------------------------------------------------------------------------------------------


def _closed(rows: Rows) -> float:
    """Return the smallest share of the first loss's gap to the optimum that training under Soteria closes."""
    return min(
        1 - float(row["gap"] / (row["loss_first_round"] - row["optimum"])) for row in rows if row["defence"] != "none"
    )


def _below_bound(rows: Rows) -> float:
    return max(float(row["gap"] / row["bound_on_gap"]) for row in rows)


def _knows(row: Mapping[str, Any]) -> bool:
    return bool(row["adaptive"])


CLAIMS = (
    *(
        Claim(
            f"1-{number}", "Table 1", f"Correlation of inferred with true representations at FC1 / FC2 / FC3, {name}",
            paper, "1", _apart(name), "largest difference to the paper", at_most=0.1, scale="full",
        )
        for number, (name, paper) in enumerate(TABLE_1.items(), 1)
    ),
    Claim(
        "1-epochs", "Section 3.2", "The correlation falls with more local epochs", "", "1",
        _falls("E=1, B=32", "E=5, B=32", "E=10, B=32"), "smallest fall of a layer", at_least=0, scale="full",
    ),
    Claim(
        "1-batches", "Section 3.2", "The correlation falls with more batches in an epoch", "", "1",
        _falls("E=1, B=32", "E=1, B=8"), "smallest fall of a layer from B=32 to B=8", at_least=0, scale="full",
    ),
    Claim(
        "1-high", "Section 3.2", "The correlation is above 0.8 in almost all cases", "13 of 15", "1",
        _high, "share of layers and trainings above 0.8, not IID", at_least=0.8, scale="full",
    ),
    Claim(
        "1-iid", "Section 3.2", "Clients with few classes leak far more than IID clients", "0.50 to 0.81", "1",
        _iid_gap, "smallest difference of a layer, few classes less IID", at_least=0.2, scale="full",
    ),
    Claim(
        "1-classes", "Section 3.2", "The last layer's gradient reveals the client's classes", "", "1",
        _classes, "share of updates whose classes are found exactly, E=1, B=32", at_least=0.95,
    ),
    Claim(
        "1-specific", "Section 3.2", "What is inferred is the representation of that class, and not of what all images "
        "share (our control: another class of the client)", "", "1",
        _specific, "largest difference of a layer to the correlation with the other class", at_least=0.1, scale="full",
    ),
    Claim(
        "3-convolutions", "Figure 3", "The gradients of convolutions alone don't reveal the image", "not recognisable",
        "fig3", _seen(CONVOLUTIONS), "share of images recognisable", at_most=0.25,
    ),
    Claim(
        "3-rep", "Figure 3", "Representations reveal the image as well as the whole gradient", "as effectively",
        "fig3", _behind(REP, WHOLE), "SSIM of the whole gradient less that of representations", at_most=0.1,
    ),
    Claim(
        "3-cause", "Section 3.3", "Representations, not convolutions, are the essential cause of the leak", "",
        "fig3", _behind(REP, CONVOLUTIONS), "SSIM of convolutions less that of representations", at_most=0,
    ),
    Claim(
        "theorem-1", "Theorem 1", "A certified lower bound of the distance between image and reconstruction",
        why="a proof; `Soteria.certificate` computes the bound, and a test checks it",
    ),
    *against_both(
        Claim(
            "5-hidden", "Section 6.2", "Where images are not recognisable, Soteria loses no accuracy (MNIST)",
            "no drop", "fig5", lambda rows: min(_hidden_loss(rows, "soteria")), "least accuracy lost",
            at_most=NO_LOSS, seeds=3,
        ),
        _knows,
    ),
    *against_both(
        Claim(
            "5-baselines", "Section 6.2", "There, the baselines lose much (MNIST)",
            "up to 6 points under DLG, 9 under GS", "fig5",
            lambda rows: max(_hidden_loss(rows, "prune", "gaussian", "laplace")), "most accuracy lost",
            at_least=0.03, seeds=3,
        ),
        _knows,
    ),
    *against_both(
        Claim(
            "5-times", "Abstract, Section 6.2", "Without losing accuracy, Soteria has far more MSE than the baselines "
            "(MNIST)", "up to 160 times", "fig5", _times, "ratio of the largest MSE without loss", at_least=2, seeds=3,
        ),
        _knows,
    ),
    Claim(
        "5-until", "Section 6.2", "Accuracy is kept until the MSE is 0.8",
        why="in units of normalised pixels, and no table says at which rate; `mse` of fig5 is on pixels in [0, 1]",
    ),
    Claim(
        "5-cifar", "Figure 5", "Accuracy of all defences on CIFAR-10 after 1,000 rounds",
        why="days on two cores: `gradveil reproduce soteria --table fig5 --scale full --out runs/soteria`",
    ),
    *against_both(
        Claim(
            "6-soteria", "Figure 6", "CIFAR-10 images are not recognisable under Soteria at 50 to 60 %",
            "not recognisable", "fig6", _at_rate("recognisable", "soteria", (0.5, 0.6)), "share of images recognisable",
            at_most=0.25,
        ),
        _knows,
    ),
    *against_both(
        Claim(
            "6-prune", "Figure 6", "They are recognisable under compression even at 80 %", "recognisable", "fig6",
            _at_rate("recognisable", "prune", (0.8,)), "share of images recognisable", at_least=0.75,
        ),
        _knows,
    ),
    *against_both(
        Claim(
            "6-rate", "Figure 6", "At the same rate, Soteria has more MSE than compression", "", "fig6",
            _ratio_at_same_rate, "smallest ratio over the rates", at_least=1,
        ),
        _knows,
    ),
    Claim(
        "7-converges", "Figure 7", "Softmax regression converges under the defence", "converges well", "fig7",
        _closed, "smallest share of the first gap to the optimum that is closed", at_least=0.5,
    ),
    Claim(
        "7-bound", "Theorem 2", "The gap to the optimum stays below the bound", "", "fig7",
        _below_bound, "largest ratio of gap to bound", at_most=1,
    ),
)  # fmt: skip
