import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.runs.cramer_rao import condensed, leak


def problem(numbers, size, secrets, seed):
    rng = torch.Generator().manual_seed(seed)
    jacobian = torch.randn(numbers, size + secrets, generator=rng, dtype=torch.float64)
    noise, prior = 0.1 + torch.rand(numbers, generator=rng), 0.1 + torch.rand(size, generator=rng)
    return jacobian, noise.double(), prior.double(), 0.1 + torch.rand(secrets, generator=rng).double()


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 6), st.integers(0, 2**20))
def test_the_bound_is_the_inverse_of_the_information(numbers, size, secrets, seed):
    jacobian, noise, prior, nuisance = problem(numbers, size, secrets, seed)
    information = jacobian.T @ (jacobian / noise[:, None] ** 2) + torch.cat([prior, nuisance]).reciprocal().diag()
    left = torch.linalg.inv(information)[:size, :size]
    found = leak(jacobian, noise, prior, nuisance if secrets else None)
    assert found.mse == pytest.approx(float(left.diagonal().mean()), rel=1e-6)
    learned = prior.log2().sum() - torch.linalg.slogdet(left).logabsdet / torch.log(torch.tensor(2.0))
    assert found.bits == pytest.approx(float(learned) / 2, rel=1e-5, abs=1e-6)
    steepest = float(torch.linalg.matrix_norm(jacobian[:, :size] / noise[:, None], 2))
    assert found.fisher_loss == pytest.approx(steepest)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.integers(0, 2**20))
def test_with_a_covariance_it_is_the_inverse_of_the_information_too(numbers, side, images, secrets, seed):
    jacobian, noise, _, nuisance = problem(numbers, side * images, secrets, seed)
    draws = torch.randn(side + 2, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    covariance = draws.T @ draws + 0.1 * torch.eye(side)
    whole = torch.block_diag(*[covariance] * images, *([nuisance.diag()] * bool(secrets)))
    information = jacobian.T @ (jacobian / noise[:, None] ** 2) + torch.linalg.inv(whole)
    size = side * images
    left = torch.linalg.inv(information)[:size, :size]
    found = leak(jacobian, noise, covariance, nuisance if secrets else None)
    assert found.mse == pytest.approx(float(left.diagonal().mean()), rel=1e-6)
    prior = images * torch.linalg.slogdet(covariance).logabsdet
    learned = (prior - torch.linalg.slogdet(left).logabsdet) / torch.log(torch.tensor(2.0))
    assert found.bits == pytest.approx(float(learned) / 2, rel=1e-5, abs=1e-6)
    steepest = float(torch.linalg.matrix_norm(jacobian[:, :size] / noise[:, None], 2))
    assert found.fisher_loss == pytest.approx(steepest)


def test_one_noisy_pixel_tells_of_its_neighbour_as_far_as_they_vary_together():
    covariance = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    found = leak(torch.tensor([[1.0, 0.0]]), torch.tensor([3.0]).sqrt(), covariance)
    own, other = 1 - 1 / (1 + 3), 1 - 0.5**2 / (1 + 3)  # what is left of their variances
    assert found.mse == pytest.approx((own + other) / 2)
    assert found.seen == 0


def test_condensed_numbers_tell_as_much(monkeypatch):
    jacobian, noise, prior, nuisance = problem(25, 4, 2, 3)
    monkeypatch.setattr("gradveil.runs.cramer_rao._ROWS", 7)
    few = condensed(jacobian, noise)
    assert few.shape == (6, 6)
    torch.testing.assert_close(few.T @ few, jacobian.T @ (jacobian / noise[:, None] ** 2))
    again = leak(few, torch.ones(6), prior, nuisance)
    assert again.mse == pytest.approx(leak(jacobian, noise, prior, nuisance).mse)


def test_the_best_linear_guess_of_many_draws_attains_it():
    jacobian, noise, prior, nuisance = problem(8, 4, 2, 0)
    rng = torch.Generator().manual_seed(1)
    draws = torch.randn(200_000, 6, generator=rng, dtype=torch.float64) * torch.cat([prior, nuisance]).sqrt()
    seen = draws @ jacobian.T + noise * torch.randn(len(draws), 8, generator=rng, dtype=torch.float64)
    guess = seen @ torch.linalg.lstsq(seen, draws[:, :4]).solution
    error = float((guess - draws[:, :4]).square().mean())
    assert leak(jacobian, noise, prior, nuisance).mse == pytest.approx(error, rel=0.01)


def test_unobserved_pixels_keep_their_prior_and_exact_ones_have_no_variance_left():
    found = leak(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([1e-9, 1e-9]), torch.full((3,), 0.06))
    assert found.seen == 2
    assert found.mse == pytest.approx(0.02)
    nothing = leak(torch.ones(2, 3), torch.full((2,), torch.inf), torch.full((3,), 0.06))
    assert (nothing.seen, nothing.bits, nothing.mse) == (0, 0.0, pytest.approx(0.06))


def test_small_directions_are_not_drowned_by_large_ones():
    """The normal matrix of this would be singular in float64."""
    jacobian = torch.diag(torch.tensor([1e10, 1.0, 0.0], dtype=torch.float64))
    found = leak(jacobian, torch.ones(3).double(), torch.ones(3).double())
    assert found.mse == pytest.approx((1e-20 + 0.5 + 1) / 3)
