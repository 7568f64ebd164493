import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.errors import ConfigError
from gradveil.metrics import label_accuracy

labels = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("truth", "guess", "share"),
    [
        ([1, 2, 3], [3, 1, 2], 1.0),
        ([1, 1, 2, 2], [1, 1, 1, 1], 0.5),
        ([1, 1, 2, 2], [1, 2], 0.5),
        ([0, 0], [0, 1], 0.5),
        ([4], [5], 0.0),
        ([4, 5], [], 0.0),
        ([], [5], 0.0),
        ([4], [4, 5], 0.5),
        ([4, 5], [-1, 5], 0.5),
        ([-1], [-1], 0.0),
    ],
)
def test_by_hand(truth, guess, share):
    assert label_accuracy(torch.tensor(truth, dtype=torch.int64), torch.tensor(guess, dtype=torch.int32)) == share


def test_nothing_to_recover_is_nan():
    empty = torch.zeros(0, dtype=torch.int64)
    assert math.isnan(label_accuracy(empty, empty))


@given(truth=labels, guess=labels)
def test_equals_the_best_order_of_the_guess(truth, guess):
    """Compare with brute force: the most matches over all orders of the guess."""
    padded = guess + [-1] * (len(truth) - len(guess))
    best = max(
        sum(a == b for a, b in zip(truth, order, strict=False)) for order in itertools.permutations(padded, len(padded))
    )
    value = label_accuracy(torch.tensor(truth), torch.tensor(guess))
    assert isinstance(value, float)
    assert value == best / max(len(truth), len(guess))


@pytest.mark.parametrize("bad", [torch.zeros(2), torch.zeros(2, 3).long(), torch.tensor(1), torch.tensor([True])])
def test_anything_but_class_indices_is_refused(bad):
    for pair in ((bad, torch.tensor([1])), (torch.tensor([1]), bad)):
        with pytest.raises(ConfigError, match=r"must be class indices \(N,\) of an integer type, got shape"):
            label_accuracy(*pair)
