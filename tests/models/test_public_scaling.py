"""Features scaled and whitened by public pictures."""

import pytest
import torch

from gradveil.models.public_scaling import SEEN, PublicScaling, some_of, whitening


def noise(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [6, 40])
def test_whitening_is_the_inverse_root_of_the_covariance_plus_a_ridge(count):
    features = noise(count, 8) @ noise(8, 8, seed=1)
    directions, shrinkage = whitening(features, ridge=0.1)
    unit = features.double() / features.double().norm(dim=1, keepdim=True)
    covariance = torch.cov(unit.T, correction=0)
    ridge = 0.1 * covariance.trace() / 8 * torch.eye(8, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(torch.linalg.solve(ridge, covariance + ridge))
    expected = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    found = torch.eye(8) - directions.T @ torch.diag(shrinkage) @ directions
    assert torch.allclose(found.double(), expected, atol=1e-5)


def test_the_map_scales_and_whitens_up_to_rounding():
    seen, features = noise(50, 8) @ noise(8, 8, seed=1), noise(5, 8, seed=2)
    scaling = PublicScaling(seen, 0.1)
    scaled = (features - seen.mean(0)) / seen.std(0)
    expected = scaled - (scaled @ scaling.directions.T * scaling.shrinkage) @ scaling.directions
    assert torch.allclose(scaling(features), expected, atol=2e-3)
    assert not torch.allclose(scaled, expected, atol=0.1), "whitening changes something"


def test_public_features_become_white():
    seen = torch.randn(400, 6, generator=torch.Generator().manual_seed(0)) @ noise(6, 6, seed=1)
    normalise = torch.nn.functional.normalize

    def uneven(features):
        spread = torch.linalg.eigvalsh(torch.cov(normalise(features).T))
        return float(spread[-1] / spread[0])

    assert uneven(PublicScaling(seen, 1e-4)(seen)) < 3 < 30 < uneven(PublicScaling(seen, 1e9)(seen))


def test_a_feature_that_never_changes_on_public_pictures_does_not_drown_the_others():
    seen = noise(50, 4)
    seen[:, 0] = 0
    private = noise(3, 4, seed=1)
    private[:, 0] = 1e-3
    found = PublicScaling(seen, 1e9)(private)
    assert float(found[:, 0].abs().max()) < 1


def test_an_image_beside_others_has_the_same_bits():
    scaling, features = PublicScaling(noise(30, 70), 0.01), noise(33, 70, seed=1)
    together = scaling(features)
    assert all(torch.equal(scaling(features[some]), together[some]) for some in (slice(1), slice(7, 20)))


def test_at_most_so_many_pictures_are_looked_at():
    pictures = torch.arange(SEEN + 5)
    assert len(some_of(pictures)) == SEEN
    assert torch.equal(some_of(pictures), some_of(pictures))
