"""A slow reference for LPIPS: the paper's formulas in float64, one image at a time."""

import torch
from torch.nn import functional as F


def naive_lpips(tensors, plan, truth, guess):
    """Return LPIPS; ``plan`` lists convolutions (index, options), pools (size, stride) and where to compare."""
    return torch.stack([_distance(tensors, plan, x, y) for x, y in zip(truth, guess, strict=True)])


def _distance(tensors, plan, x, y):
    one, other = _features(tensors, plan, x), _features(tensors, plan, y)
    total = torch.zeros((), dtype=torch.float64)
    for layer, (a, b) in enumerate(zip(one, other, strict=True)):
        head = tensors[f"lin{layer}.model.1.weight"].flatten().double()
        here = 0.0
        for h in range(a.shape[1]):
            for w in range(a.shape[2]):
                first, second = a[:, h, w], b[:, h, w]
                gap = first / (first.norm() + 1e-10) - second / (second.norm() + 1e-10)
                here = here + (head * gap**2).sum()
        total = total + here / (a.shape[1] * a.shape[2])
    return total


def _features(tensors, plan, image):
    x = (image.double() * 2 - 1)[None]
    for channel, (shift, scale) in enumerate([(-0.030, 0.458), (-0.088, 0.448), (-0.188, 0.450)]):
        x[:, channel] = (x[:, channel] - shift) / scale
    kept = []
    for step in plan:
        if step == "compare":
            kept.append(x[0])
        elif isinstance(step[1], dict):
            index, options = step
            weight, bias = (tensors[f"features.{index}.{part}"].double() for part in ("weight", "bias"))
            x = F.conv2d(x, weight, bias, **options).clamp(min=0)
        else:
            x = F.max_pool2d(x, step[0], step[1])
    return kept
