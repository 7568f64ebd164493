"""How good guesses are: matched before they are compared, with grey for what was not guessed."""

import pytest
import torch

from gradveil.attacks.parts.combined import mean_psnr, mixed
from gradveil.threat import Reconstruction
from gradveil.types import Batch


def guess(images, **more):
    count = len(images)
    return Reconstruction(
        images, torch.zeros(count, images.shape[1]).long(), torch.zeros(count), torch.ones(count) > 0, **more
    )


def test_order_does_not_matter_and_no_guess_is_grey():
    truth = torch.rand(2, 3, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    batches = [Batch(images, torch.zeros(3).long(), torch.zeros(3).bool()) for images in truth]
    near = (truth + 0.1).clamp(0, 1)
    assert mean_psnr(guess(near[:, [2, 0, 1]]), batches) == pytest.approx(mean_psnr(guess(near), batches))
    none, grey = torch.full_like(truth, torch.nan), torch.full_like(truth, 0.5)
    assert mean_psnr(guess(none), batches) == pytest.approx(mean_psnr(guess(grey), batches))
    assert mean_psnr(guess(near), batches) > mean_psnr(guess(grey), batches) + 5


def test_flags_go_with_their_targets():
    one, other = guess(torch.zeros(2, 1, 1, 2, 2), flags=(("a",), ("b",))), guess(torch.ones(2, 1, 1, 2, 2))
    assert mixed(one, other, torch.tensor([True, False])).flags == ((), ("b",))
