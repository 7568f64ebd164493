import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.attacks.parts.components import details, unmix
from tests.attacks.leaves import leaves


def test_details_worked_by_hand():
    picture = torch.zeros(1, 3, 3)
    picture[0, 1, 1] = 1.0
    found = details(picture.view(1, 9), (1, 3, 3))  # the last row and column are left out
    assert found.shape == (1, 2, 2, 2)
    assert found[0, ..., 0].tolist() == [[0.0, 1.0], [1.0, -4.0]]
    assert found[0, ..., 1].tolist() == [[1.0, -1.0], [-1.0, 1.0]]


def test_vectors_and_tiny_images_are_their_own_details():
    mixtures = torch.rand(2, 8)
    assert torch.equal(details(mixtures, (8,)), mixtures.view(2, 1, 8, 1))
    assert torch.equal(details(mixtures, (1, 2, 4)), mixtures.view(2, 1, 8, 1))


def closeness(truth, found):
    """Return for each true row the largest absolute cosine with a found one."""
    one, other = (torch.nn.functional.normalize(rows - rows.mean(1, keepdim=True), dim=1) for rows in (truth, found))
    return (one @ other.T).abs().amax(1)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_any_mixing_is_undone_up_to_sign_scale_and_order(seed):
    rng = torch.Generator().manual_seed(seed)
    images = leaves(10, channels=3).double().flatten(1)
    mixing = torch.randn(10, 10, generator=rng, dtype=torch.float64) + 2 * torch.eye(10)
    mixtures = torch.linalg.qr((mixing @ images).T).Q.T
    assert (closeness(images, unmix(mixtures, (3, 16, 16)) @ mixtures) > 0.9).all()
    assert (closeness(images, mixtures) < 0.9).any()


def test_sparse_vectors_are_separated_too():
    rng = torch.Generator().manual_seed(0)
    sparse = torch.randn(5, 2000, generator=rng, dtype=torch.float64) * (torch.rand(5, 2000, generator=rng) < 0.1)
    mixtures = torch.randn(5, 5, generator=rng, dtype=torch.float64) @ sparse
    assert (closeness(sparse, unmix(mixtures, (2000,)) @ mixtures) > 0.99).all()
