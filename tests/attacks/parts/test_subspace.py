import pytest
import scipy.fft
import torch

from gradveil.attacks.parts.subspace import SUBSPACES, Subspace, cosines

IMAGES = torch.rand(40, 3, 12, 8, generator=torch.Generator().manual_seed(0))


def draw(kind, count, reduction=4):
    space = Subspace.of(kind, IMAGES, reduction)
    return space, space.directions(count, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", SUBSPACES)
def test_directions_have_length_1_and_span_as_many_dimensions_as_stated(kind):
    space, directions = draw(kind, 300)
    assert directions.shape == (300, 3, 12, 8)
    assert directions.flatten(1).norm(dim=1).allclose(torch.ones(300))
    assert int(torch.linalg.matrix_rank(directions.flatten(1), rtol=1e-4)) == space.dimension
    assert space.dimension == {"full": 288, "resized": 18, "dct": 18, "pca": 18}[kind]


def test_the_cosines_are_scipys():
    assert cosines(7).allclose(torch.from_numpy(scipy.fft.dct(torch.eye(7).numpy(), axis=0, norm="ortho")), atol=1e-6)


def test_low_frequencies_are_all_that_dct_has():
    _, directions = draw("dct", 5)
    waves = scipy.fft.dctn(directions.numpy(), axes=(2, 3), norm="ortho")
    assert abs(waves[:, :, 3:]).max() < 1e-6
    assert abs(waves[:, :, :, 2:]).max() < 1e-6
    assert abs(waves[:, :, :3, :2]).min() > 0


def test_pca_has_the_components_along_which_images_differ_most():
    along = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    images = torch.einsum("nk,kchw->nchw", torch.randn(30, 2, generator=torch.Generator().manual_seed(1)), along)
    space = Subspace.of("pca", images, 1)
    assert space.dimension == 2  # no more than the images have
    directions = space.directions(4, torch.Generator().manual_seed(2)).flatten(1)
    both = torch.cat([along.flatten(1), directions])
    assert int(torch.linalg.matrix_rank(both, rtol=1e-4)) == 2


def test_images_that_are_all_alike_have_a_subspace_too():
    space = Subspace.of("pca", torch.ones(5, 1, 4, 4), 1)
    assert space.directions(2, torch.Generator()).isfinite().all()
