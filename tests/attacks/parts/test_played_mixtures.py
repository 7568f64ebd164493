import pytest
import torch

from gradveil.attacks.parts.imitation import Imitation
from gradveil.attacks.parts.played_mixtures import corrected, encoder
from gradveil.attacks.parts.unmixing import Mixtures, Solution
from gradveil.defences import build_defence
from tests.attacks.parts.test_unmixing import SHAPE, smooth


def rng_of(seed):
    return torch.Generator().manual_seed(seed)


def half_contrast(images):
    return 0.25 + 0.5 * images


FADES = Imitation(half_contrast, torch.zeros(1, *SHAPE))


@pytest.mark.parametrize("defence", ["mixup:k=2", "instahide:k=3,pool=public,flip=0"])
def test_half_the_contrast_is_given_back(defence):
    truth, public = smooth(4, 1), smooth(60, 2)
    mixing = torch.rand(12, 4, generator=rng_of(0))
    mixing = mixing / mixing.sum(1, keepdim=True)
    mixtures = Mixtures(
        (mixing @ truth.flatten(1)) / 2, flipped=False, parts=4, background=torch.zeros(truth[0].numel())
    )
    solution = Solution(truth.flatten(1) / 2, mixing, 0.0)
    found = corrected(solution, mixtures, build_defence(defence), public, FADES, rng_of(0))
    assert torch.allclose(found.images, truth.flatten(1), atol=0.05)
    assert torch.equal(found.coefficients, mixing)


@pytest.mark.parametrize("flipped", [False, True])
def test_mixtures_have_the_errors_and_shares_of_the_defence(flipped):
    public = smooth(20, 3)
    plain, faded = (
        encoder(build_defence("mixup:k=2"), public, flipped=flipped, imitate=imitate)(public[:5], 10, rng_of(0))
        for imitate in (None, FADES)
    )
    assert torch.equal(plain[1], faded[1])
    assert torch.allclose(faded[0], plain[0] / 2, atol=1e-5)
    assert (plain[1] > 0).sum(1).tolist() == [2] * 10
