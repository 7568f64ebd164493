import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from gradveil.attacks.lira import MANY, Lira
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.metrics.roc import area
from gradveil.models import create_model
from gradveil.types import Batch


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"shadows": 0}, ConfigError, r"shadows must be in \[1, 10000\], got 0"),
        ({"play": "rounds"}, UnknownNameError, "Did you mean 'round'"),
        ({"every": 0}, ConfigError, "every must be at least 1"),
        ({"images": 0}, ConfigError, "images must be at least 1"),
    ],
)
def test_bad_settings(change, error, text):
    with pytest.raises(error, match=text):
        Lira(**change)


def test_few_shadow_models_share_one_spread():
    """By hand: the means are 1 and -1, the variances 2 and 0, so that the common deviation is 1."""
    others = torch.tensor([[0.0, -1.0], [2.0, -1.0]])
    assert Lira().compare(torch.tensor([3.0, 0.0]), others).tolist() == [2.0, 1.0]


def test_many_shadow_models_give_each_image_its_own_spread():
    """By hand: n values of -1 and n of 1 have the variance 2n / (2n - 1); the second image has twice the deviation."""
    sides = torch.tensor([-1.0, 1.0]).repeat(MANY // 2)
    others = torch.stack([sides, 2 * sides], 1).double()
    wanted = 3 / math.sqrt(MANY / (MANY - 1))
    assert Lira().compare(torch.tensor([3.0, 3.0]).double(), others).tolist() == pytest.approx([wanted, wanted / 2])


def test_one_shadow_model_gives_differences():
    assert Lira().compare(torch.tensor([3.0, 1.0]), torch.tensor([[1.0, 2.0]])).tolist() == [2.0, -1.0]


def test_the_area_is_that_of_two_gaussians():
    """Signals of members lie d standard deviations higher, so the likelihood ratio's area is Phi(d / sqrt 2)."""
    rng, count, apart = np.random.default_rng(0), 4000, 1.0
    hardness, spread = 10 * rng.standard_normal(2 * count), rng.uniform(0.5, 5, 2 * count)
    others = hardness + spread * rng.standard_normal((400, 2 * count))
    own = hardness + spread * (rng.standard_normal(2 * count) + apart * (np.arange(2 * count) < count))
    scores = Lira().compare(torch.from_numpy(own), torch.from_numpy(others))
    assert area(scores[:count], scores[count:]) == pytest.approx(norm.cdf(apart / math.sqrt(2)), abs=0.02)
    alone = torch.from_numpy(own)
    assert area(alone[:count], alone[count:]) < 0.6  # what is hard for all models hides the members


def naive(network, shadows, images, labels):
    """Return LiRA's scores by plain loops over probabilities."""

    def odds(model, number):
        p = model(images[number : number + 1]).double().softmax(1)[0, labels[number]].item()
        return math.log(p) - math.log(1 - p)

    outside = [[odds(shadow, n) for shadow in shadows] for n in range(len(images))]
    means = [sum(row) / len(row) for row in outside]
    variances = [sum((v - m) ** 2 for v in row) / (len(row) - 1) for row, m in zip(outside, means, strict=True)]
    spread = math.sqrt(sum(variances) / len(variances))
    return [(odds(network, n) - means[n]) / spread for n in range(len(images))]


def test_it_equals_its_naive_twin():
    rng = torch.Generator().manual_seed(0)
    images, labels = torch.rand(12, 1, 6, 6, generator=rng), torch.randint(0, 3, (12,), generator=rng)
    network, *shadows = (create_model("mlp", (1, 6, 6), 3, seed).eval() for seed in range(5))
    batch = Batch(images, labels, torch.zeros(12, dtype=torch.bool))
    with torch.no_grad():
        wanted = naive(network, shadows, images, labels)
    assert Lira().judge(network, batch, rng, shadows).tolist() == pytest.approx(wanted, abs=1e-5)


def test_without_shadow_models_it_says_so():
    batch = Batch(torch.rand(2, 1, 6, 6), torch.tensor([0, 1]), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ConfigError, match="needs at least one shadow model, got none"):
        Lira().judge(create_model("mlp", (1, 6, 6), 3, 0).eval(), batch, torch.Generator(), [])
