import math

import pytest
import torch

from gradveil.metrics import Metric, build_metric, score_targets
from gradveil.registry import build


def scene():
    rng = torch.Generator().manual_seed(0)
    truth = torch.rand(3, 2, 1, 16, 16, generator=rng)
    return truth, (truth + 0.1 * torch.randn(truth.shape, generator=rng)).clamp(0, 1)


def test_a_targets_figures_are_the_means_of_its_images():
    truth, guess = scene()
    figures, reasons = score_targets(truth, guess)
    for target in range(3):
        for name in ("mse", "psnr", "ssim"):
            each = build_metric(name)(truth[target], guess[target])
            assert figures[target][name] == pytest.approx(each.mean().item())
        assert figures[target]["lpips"] is not None or any("lpips" in reason for reason in reasons[target])


def test_images_without_a_guess_are_left_out_and_named():
    truth, guess = scene()
    guess[0, 1], guess[1] = math.nan, math.inf
    figures, reasons = score_targets(truth, guess)
    alone = build(Metric, "mse")(truth[0, :1], guess[0, :1]).item()
    assert figures[0]["mse"] == pytest.approx(alone)
    assert reasons[0][0] == "no guess for 1 of 2 images, scored are the others"
    assert figures[1]["mse"] is None
    assert figures[1]["psnr"] is None
    assert reasons[1][0] == "no guess for 2 of 2 images"
    assert not any("no guess" in reason for reason in reasons[2])
