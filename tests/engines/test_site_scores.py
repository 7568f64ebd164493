"""The noise on scores of training images: exact, of the stated size, and never outside of the possible counts."""

import math
import random
from collections import Counter

import pytest

from gradveil.engines.site_ledger import Ledger
from gradveil.engines.site_policy import SitePolicy
from gradveil.engines.site_scores import as_given, discrete_laplace, noised, require_allowed
from gradveil.errors import ConfigError, RefusedError
from gradveil.federated.client import Score
from gradveil.federated.server import ScoreRequest


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.5])
def test_the_noise_has_its_distribution(epsilon):
    below = random.Random(1).randrange
    draws = Counter(discrete_laplace(epsilon, below) for _ in range(20_000))
    decay = math.exp(-epsilon)
    for value in range(-2, 3):
        expected = (1 - decay) / (1 + decay) * decay ** abs(value)
        assert draws[value] / 20_000 == pytest.approx(expected, abs=4.5 * math.sqrt(expected / 20_000))


def test_a_tiny_epsilon_is_refused():
    with pytest.raises(ConfigError, match=r"epsilon must be at least 0\.001"):
        discrete_laplace(0.0005)


def test_a_noisy_score_has_no_loss_and_no_classes():
    below = random.Random(2).randrange
    found = {noised(Score(3, 1.5, 4, (3, 0), (3, 1)), 0.1, below) for _ in range(100)}
    assert {score.correct for score in found} == set(range(5))
    assert {(score.loss_sum, score.count, score.class_count) for score in found} == {(0.0, 4, ())}


def test_the_loss_of_test_images_is_rounded_unless_the_site_is_repeatable():
    score = Score(3, 1.23456, 4)
    given, ledger = as_given(SitePolicy(), Ledger(), "test", score)
    assert (given.loss, ledger) == (0.309, Ledger())
    assert as_given(SitePolicy(repeatable=True), Ledger(), "test", score)[0] == score


@pytest.mark.parametrize(
    ("images", "epsilon", "private"), [("own", 0.0, False), ("own", 1.0, True), ("all", 1.0, False)]
)
def test_other_scores_are_refused(images, epsilon, private):
    with pytest.raises(RefusedError):
        require_allowed(SitePolicy(training_scores=epsilon), ScoreRequest(images, 0), has_private=private)


def test_test_images_are_scored_for_the_sites_own_model_with_private_parts_only():
    require_allowed(SitePolicy(), ScoreRequest("test", 0), has_private=True)
    for client, private in ((0, False), (None, True), (None, False)):
        with pytest.raises(RefusedError, match="own model with private parts"):
            require_allowed(SitePolicy(training_scores=1.0), ScoreRequest("test", client), has_private=private)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
@pytest.mark.parametrize("repeatable", [True, False])
def test_a_loss_that_is_not_finite_is_not_given(loss, repeatable):
    with pytest.raises(RefusedError, match="must be finite"):
        as_given(SitePolicy(repeatable=repeatable), Ledger(), "test", Score(1, loss, 2))
