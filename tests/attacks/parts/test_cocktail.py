import math

import pytest
import torch

from gradveil.attacks.parts.cocktail import Weights, objective, published, whitening
from tests.attacks.leaves import leaves


def test_the_objective_worked_by_hand():
    rows, mixtures = torch.eye(2), torch.tensor([[1.0, -1.0], [3.0, -3.0]])
    entropy = -(math.log(math.cosh(1)) ** 2 + math.log(math.cosh(3)) ** 2) / 2
    alone = objective(rows, mixtures, (2,), Weights(0.0, 1.0))
    assert float(alone) == pytest.approx(entropy, rel=1e-5)
    similar = objective(rows, mixtures, (2,), Weights(2.0, 1.5)) - alone
    assert float(similar) == pytest.approx(2 * (math.exp(1.5) - 1) / 2, rel=1e-5)  # two of four cosines are 1
    varied = objective(rows, mixtures, (1, 1, 2), Weights(0.0, 1.0, tv=1.0)) - alone
    assert float(varied) == pytest.approx((2 + 6) / 2, rel=1e-5)
    signed = objective(rows, mixtures, (2,), Weights(0.0, 1.0, l1=1.0, sign=1.0)) - alone
    assert float(signed) == pytest.approx(2 + 2, rel=1e-5)


def test_whitened_mixtures_are_uncorrelated():
    mixtures = torch.rand(4, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(torch.cov(whitening(mixtures) @ mixtures), torch.eye(4, dtype=torch.float64), atol=1e-8)


def test_steps_lower_the_objective():
    images = leaves(4).double().flatten(1)
    mixtures = torch.linalg.qr(images.T).Q.T
    white = (whitening(mixtures) @ mixtures).float()
    weights = Weights(1.47, 12.4, tv=3.1)
    rows = (published(mixtures, (1, 16, 16), 200, 0.01) @ torch.linalg.inv(whitening(mixtures))).float()
    before = objective(torch.eye(4), white, (1, 16, 16), weights)
    assert objective(rows, white, (1, 16, 16), weights) < before - 0.05
