"""Whether a training learned anything: its test loss and accuracy beside those of a guess."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradveil.config import TrainSettings

SEVERAL = 5
"""Rounds before which a training at chance is no reason to warn; longer trainings get a tenth of their rounds."""
NEAR = 0.98
"""A loss of at least this share of the loss of a guess counts as no better."""
SPREAD, WIDEST = 2, 0.05
"""Standard errors that an accuracy at chance may lie above that of a guess, and the largest such distance."""


def at_chance(row: Mapping[str, Any], labels: np.ndarray) -> bool:
    r"""Return whether a row's test loss and accuracy are no better than those of a guess without the image.

    The best such guess knows the share :math:`p_c` of each class. Its loss is the entropy :math:`-\sum p_c \log p_c`
    (log of the number of classes if all are equally frequent), and its accuracy the share of the most frequent class.

    Args:
        row: a row of a training with ``loss`` and ``accuracy``; both are None if the round was not evaluated.
        labels: the labels of the test images, (N,).

    Example:
        >>> labels = np.arange(1000) % 10
        >>> at_chance({"loss": 2.303, "accuracy": 0.1}, labels), at_chance({"loss": 2.1, "accuracy": 0.25}, labels)
        (True, False)
    """
    shares = np.unique(labels, return_counts=True)[1] / max(1, len(labels))
    if row["loss"] is None or row["accuracy"] is None or len(shares) < 2:
        return False
    guess, entropy = float(shares.max()), -float((shares * np.log(shares)).sum())
    slack = min(WIDEST, SPREAD * math.sqrt(guess * (1 - guess) / len(labels)))
    return bool(row["loss"] >= NEAR * entropy and row["accuracy"] <= guess + slack)


def several(number: int, rounds: int) -> bool:
    """Return whether a training of ``rounds`` rounds should have learned something after round ``number``."""
    return number >= max(SEVERAL, rounds / 10)


def warning_of(row: Mapping[str, Any], settings: TrainSettings) -> str:
    """Return what to try if the row is marked ``at_chance``, or "" if it is not."""
    if not row.get("at_chance") or row.get("loss") is None or row.get("accuracy") is None:
        return ""
    options = [f"another --lr (now {settings.lr:g})"]
    options += [f"a lower --momentum (now {settings.momentum:g})"] * (settings.algorithm != "fedsgd")
    options += ["more --rounds"]
    options += [f"a weaker defence (now --defence {settings.defence})"] * (settings.defence != "none")
    return (
        f"The training has not learned anything: after {row['round']} rounds, the test loss is {row['loss']:.3f} and "
        f"{row['accuracy']:.1%} of the test images are recognised, no better than a guess. Try "
        f"{', '.join(options[:-1])} or {options[-1]}."
    )
