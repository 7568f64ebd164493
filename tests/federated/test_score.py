"""Scores: accuracy, balanced accuracy and the majority class, by hand and against a naive count."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradveil.federated.client import Score, score
from gradveil.types import Batch

ANSWERS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)


class Fixed(nn.Module):
    """Answer with the first pixel, rounded, as the class."""

    def forward(self, images):
        return nn.functional.one_hot(images[:, 0, 0, 0].round().long(), 4).float()


def scored(pairs):
    """Return the score of (answer, label) pairs."""
    answers, labels = torch.tensor(pairs).T
    marks = torch.zeros(len(labels), dtype=torch.bool)
    return score(Fixed(), Batch(answers.float()[:, None, None, None], labels, marks))


def test_always_naming_the_most_frequent_class_has_its_share_and_a_balanced_accuracy_of_chance():
    """62.5 % of 8 images: five of class 0 are answered right and three of class 1 wrong."""
    found = scored([(0, 0)] * 5 + [(0, 1)] * 3)
    assert (found.accuracy, found.majority, found.balanced) == (0.625, 0.625, 0.5)


@given(ANSWERS)
def test_figures_are_those_of_a_naive_count(pairs):
    found = scored(pairs)
    shares = []
    for label in range(4):
        own = [answer == label for answer, truth in pairs if truth == label]
        shares += [sum(own) / len(own)] if own else []
    assert found.accuracy == sum(answer == label for answer, label in pairs) / len(pairs)
    assert found.balanced == pytest.approx(sum(shares) / len(shares))
    assert found.majority == max(sum(truth == label for _, truth in pairs) for label in range(4)) / len(pairs)


@given(ANSWERS, ANSWERS)
def test_the_sum_of_two_scores_is_that_of_all_images(some, others):
    both, whole = scored(some) + scored(others) + Score(), scored(some + others)
    assert (both.class_correct, both.class_count) == (whole.class_correct, whole.class_count)
    assert (both.correct, both.count, both.balanced) == (whole.correct, whole.count, whole.balanced)


def test_a_sum_with_a_score_of_unknown_classes_knows_none():
    found = scored([(0, 0)]) + Score(1, 0.5, 2)
    assert (found.balanced, found.majority, found.accuracy) == (None, None, 2 / 3)
    assert Score().balanced is None
