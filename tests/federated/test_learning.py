"""Whether a training learned: loss and accuracy beside those of a guess that knows the share of each class."""

import math

import numpy as np
import pytest

from gradveil.config import TrainSettings
from gradveil.federated.learning import at_chance, several, warning_of

TEN = np.arange(1000) % 10
TWO = np.repeat([0, 1], [625, 375])
"""Two classes, the larger of which has 62.5 % of the images."""
ENTROPY = -0.625 * math.log(0.625) - 0.375 * math.log(0.375)


@pytest.mark.parametrize(
    ("labels", "loss", "accuracy", "wanted"),
    [
        (TEN, math.log(10), 0.1, True),
        (TEN, 2.31, 0.118, True),  # within two standard errors, 1.9 points
        (TEN, 8.0, 0.1, True),  # worse than a guess
        (TEN, 2.31, 0.13, False),
        (TEN, 2.2, 0.1, False),  # the loss has begun to fall
        (TEN, 2.5, 0.9, False),  # sure of its few errors
        (TWO, ENTROPY, 0.625, True),  # knows the larger class and nothing else
        (TWO, math.log(2), 0.375, True),
        (TWO, 0.9 * ENTROPY, 0.625, False),
        (TWO, ENTROPY, 0.7, False),
        (np.zeros(9, int), 0.0, 1.0, False),  # one class cannot tell
        (np.zeros(0, int), 1.0, 0.0, False),
        (TEN, None, None, False),  # not evaluated
    ],
)
def test_what_a_guess_reaches_is_chance(labels, loss, accuracy, wanted):
    assert at_chance({"loss": loss, "accuracy": accuracy}, labels) is wanted


def test_a_training_has_five_rounds_or_a_tenth_of_them_to_begin():
    assert [several(number, 20) for number in (4, 5)] == [False, True]
    assert [several(number, 200) for number in (19, 20)] == [False, True]


def test_the_warning_names_the_options_to_try():
    row = {"round": 15, "loss": 2.3026, "accuracy": 0.1, "at_chance": True}
    text = warning_of(row, TrainSettings(defence="prune:fraction=0.99"))
    assert text.startswith("The training has not learned anything: after 15 rounds, the test loss is 2.303 and 10.0%")
    assert text.endswith(
        "Try another --lr (now 0.05), a lower --momentum (now 0.9), more --rounds or a weaker defence "
        "(now --defence prune:fraction=0.99)."
    )
    alone = warning_of(row, TrainSettings(algorithm="fedsgd"))
    assert alone.endswith("Try another --lr (now 0.05) or more --rounds.")
    assert warning_of(row | {"at_chance": False}, TrainSettings()) == ""
