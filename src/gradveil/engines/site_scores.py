"""Which scores a site gives: of its test images plainly, of its training images only with noise, and only if it agreed.

A server that may score any weights on private images can read the images from the answers: the loss of chosen weights
is a measurement of them. So a site scores only weights of rounds that it answered (`gradveil.engines.site_ledger`),
answers each question once, and gives of its training images nothing but the number of correct answers, with noise.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from gradveil.engines.site_codes import refused
from gradveil.engines.site_ledger import Ledger
from gradveil.engines.site_policy import SitePolicy
from gradveil.federated.client import Score
from gradveil.federated.server import ScoreRequest
from gradveil.validate import in_range

DIGITS = 3
"""Decimal places of the mean loss of test images that leave a site."""
_FINEST = 1000
"""ε is rounded down to a fraction with at most this denominator, so that the noise can be drawn exactly."""
Below = Callable[[int], int]
"""Draws a whole number from 0 to its argument minus 1."""


def require_allowed(policy: SitePolicy, request: ScoreRequest, *, has_private: bool) -> None:
    """Raise RefusedError unless a site gives scores of these images at all.

    Test images are scored only for the site's own model with private parts: the server has every other model, and its
    own test images to score it on. A model with private parts was trained on the site's training images, so that noise
    on the count would not bound what the score tells about an image.
    """
    images = request.images
    if images == "test":
        if not has_private or request.client is None:
            raise refused(
                "shared-model", "Test images are scored for a site's own model with private parts, got another."
            )
        return
    if images not in ("own", "sensitive") or not policy.training_scores:
        raise refused("training-images", f"This site scores test images only, got {images!r}.")
    if has_private:
        raise refused("private-model", f"A model with private parts is scored on test images only, got {images!r}.")


def as_given(policy: SitePolicy, ledger: Ledger, images: str, score: Score) -> tuple[Score, Ledger]:
    """Return a score as it leaves the site, and the ledger after it.

    Of test images: the counts, and the mean loss with three decimal places (all of them if the site is repeatable, and
    so protects nothing). Of training images: the number of correct answers with noise, which costs ε, and no loss.
    RefusedError is raised if the loss of test images is not finite.
    """
    if images == "test":
        if not math.isfinite(score.loss_sum):
            raise refused("diverged", f"The loss of test images must be finite, got {score.loss_sum}.")
        exact = policy.repeatable or not score.count
        return score if exact else replace(score, loss_sum=round(score.loss, DIGITS) * score.count), ledger
    spent = ledger.spend(policy.training_scores, policy.training_budget)
    return noised(score, policy.training_scores), spent


def noised(score: Score, epsilon: float, below: Below = secrets.randbelow) -> Score:
    r"""Return the number of correct answers with noise, without loss and classes.

    .. math:: \tilde c = \min(n, \max(0, c + z)), \qquad P(z) \propto e^{-\varepsilon |z|}, \quad z \in \mathbb Z

    To replace one image changes c by at most 1, so the answer is ε-differentially private for each image, if the
    weights do not depend on it otherwise; the number of images n is public.
    """
    noise = discrete_laplace(epsilon, below)
    return Score(min(score.count, max(0, score.correct + noise)), 0.0, score.count)


def discrete_laplace(epsilon: float, below: Below = secrets.randbelow) -> int:
    """Draw a whole number z with probability proportional to exp(-epsilon |z|), exactly, from uniform whole numbers.

    Reference: Canonne, Kamath and Steinke 2020, https://arxiv.org/abs/2004.00010, Algorithm 2.
    """
    in_range("epsilon", epsilon, 1 / _FINEST)
    share = Fraction(int(epsilon * _FINEST), _FINEST)
    steps, scale = share.numerator, share.denominator
    while True:
        start = below(scale)
        if not _happens(Fraction(start, scale), below):
            continue
        whole = 0
        while _happens(Fraction(1), below):
            whole += 1
        size = (start + scale * whole) // steps
        negative = below(2) == 1
        if size or not negative:  # zero has no sign
            return -size if negative else size


def _happens(rate: Fraction, below: Below) -> bool:
    """Return True with probability exp(-rate), for a rate in [0, 1]."""
    tries = 1
    while below(rate.denominator * tries) < rate.numerator:
        tries += 1
    return tries % 2 == 1
