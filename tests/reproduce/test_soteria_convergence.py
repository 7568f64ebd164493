import math

import pytest
import torch

from gradveil.reproduce.soteria_convergence import Constants, bound, measure, penalised_loss, rate
from gradveil.types import Batch


def clients_of(count=3, size=12):
    rng = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        images = torch.rand(size, 1, 2, 2, generator=rng)
        labels = (torch.arange(size) % 2 + number) % 3
        found.append(Batch(images, labels, torch.zeros(size) > 0))
    return found


@pytest.fixture(scope="module")
def constants():
    return measure(clients_of(), 3, mu=0.1, batch_size=4, start=torch.zeros(3, 5))


def test_the_optimum_is_lower_than_any_other_point(constants):
    """The loss at zero and at random weights is larger than the optimum."""
    clients = clients_of()
    images, labels = torch.cat([c.images for c in clients]), torch.cat([c.labels for c in clients])
    at_zero = penalised_loss(torch.zeros(3, 5), images, labels, 0.1)
    assert at_zero == pytest.approx(math.log(3))
    assert constants.optimum < at_zero
    rng = torch.Generator().manual_seed(1)
    for _ in range(20):
        assert penalised_loss(torch.randn(3, 5, generator=rng), images, labels, 0.1) > constants.optimum


def test_smoothness_and_convexity_hold_along_lines(constants):
    """Second differences of F along random lines lie between mu and L."""
    client = clients_of(1)[0]
    rng = torch.Generator().manual_seed(2)
    for _ in range(20):
        at, step = (torch.randn(3, 5, generator=rng, dtype=torch.float64) for _ in range(2))
        step = step / step.norm() * 1e-2
        values = [penalised_loss(at + k * step, client.images, client.labels, 0.1) for k in (-1, 0, 1)]
        curvature = (values[0] - 2 * values[1] + values[2]) / 1e-4
        assert constants.mu - 1e-6 <= curvature <= constants.smoothness + 1e-6


def test_heterogeneity_is_zero_only_for_equal_clients(constants):
    same = measure(clients_of(1) * 3, 3, mu=0.1, batch_size=4, start=torch.zeros(3, 5))
    assert same.heterogeneity == pytest.approx(0, abs=1e-8)
    assert constants.heterogeneity > 1e-3


def test_the_bound_by_hand():
    c = Constants(0.5, 2.0, 0.3, 4.0, 1.5, 0.2, 7.0, 0.0, torch.tensor([0.5, 0.5], dtype=torch.float64))
    kappa, gamma, extra = 4.0, 32.0, 1.5 * 2
    q = 0.5 * extra + 0.3 + 6 * 2 * 0.2 + 8 * 4 * (extra + 4)
    sampling = 4 / 5 * 9 * (extra + 4)
    wanted = 2 * kappa / (gamma + 30) * ((q + sampling) / 0.5 + 0.5 * gamma / 2 * 7)
    assert bound(c, steps=30, local_steps=3, sampled=5, perturbation=2) == pytest.approx(wanted)
    assert rate(c, 8, 3) == pytest.approx(2 / (0.5 * 40))


def test_a_stronger_defence_loosens_the_bound(constants):
    kwargs = {"steps": 100, "local_steps": 5, "sampled": 2}
    assert bound(constants, perturbation=50, **kwargs) > bound(constants, perturbation=0, **kwargs)
