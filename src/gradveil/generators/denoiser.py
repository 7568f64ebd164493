"""A small network that removes noise from images, trained on public ones: a prior for searches under noise."""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import ConfigError
from gradveil.randomness import global_stream, stream

FEWEST = 32
"""Images that a denoiser needs at least."""
STEPS = 1500
"""Training steps: less than a minute of a quiet core for 28 x 28 or 32 x 32 pixels."""
LEVELS = (0.02, 1.0)
"""Standard deviations of the noise in training, in pixels of [0, 1], drawn uniformly on a logarithmic scale."""
_BATCH, _RATE, _SIDE, _WIDTH, _CODE = 32, 2e-3, 32, 16, 32


class Denoiser(nn.Module):
    r"""Estimate the clean image behind x + s n, for noise of a known standard deviation s.

    .. math:: D_s(x) = \mu + \frac{v^2}{v^2 + s^2} (x - \mu)
        + \frac{s v}{\sqrt{v^2 + s^2}} F\left(\frac{x - \mu}{\sqrt{v^2 + s^2}}, \ln s\right)

    with the mean :math:`\mu` of each channel, the standard deviation v of all pixels, and a network F with two
    downsampling steps.

    Reference: Karras et al. 2022, https://arxiv.org/abs/2206.00364, Table 1 (the factors of x and F).
    """

    def __init__(self, mean: Tensor, spread: float) -> None:
        super().__init__()
        self.mean, self.spread = nn.Buffer(mean.view(1, -1, 1, 1)), spread
        self.inside = _Inside(len(mean))

    def forward(self, images: Tensor, level: Tensor) -> Tensor:
        """Return the clean images for noisy ones (N, C, H, W) and noise levels (N,)."""
        noise, centred = level.view(-1, 1, 1, 1), images - self.mean
        whole = self.spread**2 + noise.square()
        change = self.inside(centred / whole.sqrt(), level.log())
        clean: Tensor = self.mean + self.spread**2 / whole * centred + self.spread * noise / whole.sqrt() * change
        return clean


class _Inside(nn.Module):
    """Convolutions at full, half and quarter size, each told the noise level; skip connections add."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * _WIDTH
        self.code = nn.Sequential(nn.Linear(8, _CODE), nn.SiLU())
        self.enter = nn.Conv2d(channels, _WIDTH, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(_WIDTH, wide, 4, 2, 1), nn.Conv2d(wide, wide, 4, 2, 1)])
        self.blocks = nn.ModuleList([_Block(width) for width in (_WIDTH, wide, wide, wide, wide, _WIDTH)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(wide, wide, 4, 2, 1), nn.ConvTranspose2d(wide, _WIDTH, 4, 2, 1)])
        self.leave = nn.Conv2d(_WIDTH, channels, 3, padding=1)
        nn.init.zeros_(self.leave.weight)

    def forward(self, images: Tensor, level: Tensor) -> Tensor:
        waves = level[:, None] * torch.arange(1, 5).to(level) * 0.7
        code = self.code(torch.cat([waves.sin(), waves.cos()], 1))
        height, width = images.shape[-2:]
        padded = F.pad(images, (0, -width % 4, 0, -height % 4), mode="replicate")
        full = self.blocks[0](self.enter(padded), code)
        half = self.blocks[1](self.down[0](full), code)
        quarter = self.blocks[3](self.blocks[2](self.down[1](half), code), code)
        half = self.blocks[4](half + self.up[0](quarter), code)
        full = self.blocks[5](full + self.up[1](half), code)
        change: Tensor = self.leave(F.silu(full))
        return change[..., :height, :width]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.told = nn.Linear(_CODE, width)
        for parameter in self.second.parameters():
            nn.init.zeros_(parameter)

    def forward(self, images: Tensor, code: Tensor) -> Tensor:
        inner = self.first(F.silu(images)) + self.told(code)[:, :, None, None]
        changed: Tensor = images + self.second(F.silu(inner))
        return changed


def train_denoiser(images: Tensor, steps: int = STEPS) -> Denoiser:
    r"""Train a denoiser on public images (N, C, H, W) in [0, 1]; the same images give the same weights.

    .. math:: \min_D E\,\frac{v^2 + s^2}{s^2 v^2} \|D_s(x + s n) - x\|^2

    Each image is moved, turned, scaled and sheared a little at random, colour pictures are also mirrored, and images
    that are larger than 32 pixels are cropped. The last few denoisers stay in memory.
    """
    if len(images) < FEWEST:
        raise ConfigError(
            f"A denoiser needs at least {FEWEST} public images, got {len(images)}. Use prior=normal or more images."
        )
    images = images.detach().cpu().float()
    digest = hashlib.blake2b(images.contiguous().numpy().tobytes(), digest_size=16)
    digest.update(repr((tuple(images.shape), steps, torch.__version__)).encode())
    key = digest.hexdigest()
    if key not in _TRAINED:
        while len(_TRAINED) >= _KEPT:
            _TRAINED.pop(next(iter(_TRAINED)))
        _TRAINED[key] = _trained(images, steps)
    return _TRAINED[key]


_TRAINED: dict[str, Denoiser] = {}
_KEPT = 4


def _trained(images: Tensor, steps: int) -> Denoiser:
    rng = stream(0, "denoiser")
    with global_stream(0, "denoiser"):
        denoiser = Denoiser(images.mean((0, 2, 3)), max(float(images.std()), 1e-3))
    adam = torch.optim.Adam(denoiser.parameters(), lr=_RATE)
    own, low, high = list(denoiser.parameters()), *(math.log(edge) for edge in LEVELS)
    with torch.enable_grad():
        for step in range(steps):
            rate = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
            adam.param_groups[0]["lr"] = _RATE * rate
            clean = varied(images[torch.randint(len(images), (_BATCH,), generator=rng)], rng)
            level = (low + (high - low) * torch.rand(_BATCH, generator=rng)).exp()
            noise = torch.randn(clean.shape, generator=rng)
            found = denoiser(clean + level.view(-1, 1, 1, 1) * noise, level)
            weights = (level**2 + denoiser.spread**2) / (level * denoiser.spread) ** 2
            loss = (weights * (found - clean).square().flatten(1).mean(1)).mean()
            for parameter, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
                parameter.grad = gradient
            adam.step()
    return denoiser.eval().requires_grad_(False)


def varied(images: Tensor, rng: torch.Generator) -> Tensor:
    """Return images (N, C, H, W) moved, turned, scaled and sheared at random, cropped to at most 32 x 32 pixels."""
    count, colour = len(images), images.shape[1] == 3
    drawn = 2 * torch.rand(count, 6, generator=rng) - 1
    angle, shear, across, down = 0.26 * drawn[:, 0], 0.2 * drawn[:, 1], 0.1 * drawn[:, 2], 0.1 * drawn[:, 3]
    wide, tall = 1 + 0.12 * drawn[:, 4], 1 + 0.12 * drawn[:, 5]
    mirror = torch.where(torch.rand(count, generator=rng) < 0.5 * colour, -1.0, 1.0)
    rows = [angle.cos() * wide * mirror, -angle.sin() + shear, across, angle.sin() * mirror, angle.cos() * tall, down]
    grid = F.affine_grid(torch.stack(rows, 1).view(count, 2, 3), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    top, left = (int(torch.randint(max(1, side - _SIDE + 1), (), generator=rng)) for side in images.shape[-2:])
    return moved[..., top : top + _SIDE, left : left + _SIDE]
