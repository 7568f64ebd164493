"""Pictures with the statistics of photographs: flat regions with sharp edges."""

import torch


def leaves(count, side=16, channels=1, seed=0, number=12):
    """Return pictures (count, channels, side, side) of rectangles that cover each other, of random brightness."""
    rng = torch.Generator().manual_seed(seed)
    pictures = torch.rand(count, channels, 1, 1, generator=rng).expand(-1, -1, side, side).clone()
    for picture in pictures:
        for _ in range(number):
            top, left, height, width = torch.randint(0, side, (4,), generator=rng).tolist()
            bright = torch.rand(channels, 1, 1, generator=rng)
            picture[:, top : top + 2 + height // 2, left : left + 2 + width // 2] = bright
    return pictures
