r"""GRNN's generators: untrained networks, one an image, whose weights are what is searched. Many at once.

Two identities make them cheap, and leave what they compute as published but for rounding.

A convolution of an image that was doubled in size by repeating its pixels sees each pixel up to nine times. It is
cheaper to multiply the small image by the nine matrices of the kernel first, and to add up the products that meet in a
pixel of the large one: a quarter of the multiplications, as one batched product of matrices for all generators.

The first layer maps a noise vector z that never changes. RMSprop divides each gradient :math:`z_i g_j` by its own
running size :math:`|z_i| \rho_j`, so all weights :math:`W_{ij}` move by :math:`\text{sign}(z_i) u_j`, and the layer's
output by :math:`\|z\|_1 u_j`. So the output itself is searched, at :math:`\|z\|_1` times the rate, in place of 128
times as many weights; likewise the logits of the label.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.attacks.parts.makers import Maker

_FIRST = 4
"""Side of the first map."""
_EPSILON = 1e-5


class FreshGenerators(Maker):
    """A generator for each image: a 4 x 4 map and gated units, then doubling, convolution, BatchNorm and gate.

    BatchNorm sees one image, so its statistics are those of each map. Images are made at the next power of two from 8
    on, and cut to size in the middle.

    Args:
        shape: (C, H, W) of an image.
        batch_size: images a row.
        noise: length of the noise vector.
        width: channels of the last hidden map; each one before has twice as many.
        roughness: weight of the penalty, twice the mean square of the differences of neighbours.
    """

    def __init__(
        self, shape: tuple[int, int, int], batch_size: int, *, noise: int, width: int, roughness: float
    ) -> None:
        self._shape, self._roughness = shape, roughness
        doublings = max(1, math.ceil(math.log2(max(shape[1:]) / _FIRST)))
        channels = [width * 2**level for level in reversed(range(doublings))]  # that enter each doubling
        self._side = _FIRST * 2**doublings
        self._shapes: list[tuple[int, ...]] = [(2 * channels[0], _FIRST, _FIRST), (2 * channels[0],)]
        for inputs, outputs in zip(channels, [*channels[1:], shape[0]], strict=True):
            self._shapes += [(3, 3, 2 * outputs, inputs), (2 * outputs,), (2 * outputs,)]
        self._sizes = [math.prod(part) for part in self._shapes]
        self.size = batch_size * sum(self._sizes)
        self._noise = torch.randn(noise, generator=torch.Generator().manual_seed(0))  # a constant of the network
        self._reach = float(self._noise.abs().sum())
        self.label_rate = self._reach + 1  # the label's layer has a bias, too

    def begin(self, rows: int, rng: torch.Generator) -> Tensor:
        """The weights that PyTorch's layers begin with; the first map is made of weights that are then forgotten."""
        images = rows * self.size // sum(self._sizes)
        return torch.stack([torch.cat(list(self._draw(rng))) for _ in range(images)]).view(rows, -1)

    def _draw(self, rng: torch.Generator) -> Iterator[Tensor]:
        bound = 1 / math.sqrt(self._sizes[0])

        def uniform(shape: tuple[int, ...], bound: float) -> Tensor:
            return (2 * torch.rand(shape, generator=rng) - 1) * bound

        yield self._noise @ uniform((len(self._noise), self._sizes[0]), bound)
        yield uniform(self._shapes[1], bound)
        for kernel, scale, shift in zip(*(self._shapes[start::3] for start in (2, 3, 4)), strict=True):
            yield uniform(kernel, 1 / math.sqrt(9 * kernel[-1])).flatten()
            yield torch.ones(scale)
            yield torch.zeros(shift)

    def rates(self) -> Tensor:
        """The first map moves as all the weights behind it would have moved it."""
        factors = [self._reach] + [1.0] * (len(self._sizes) - 1)
        each = torch.cat([torch.full((size,), factor) for size, factor in zip(self._sizes, factors, strict=True)])
        return each.repeat(self.size // len(each))

    def pictures(self, flat: Tensor, labels: Tensor | None) -> Tensor:
        """What the generators make of their noise."""
        images = flat.reshape(-1, sum(self._sizes))
        pieces = torch.split(images, self._sizes, 1)
        first, bias, *rest = (piece.view(-1, *shape) for piece, shape in zip(pieces, self._shapes, strict=True))
        maps = F.glu(first + bias[..., None, None], 1)
        for kernel, scale, shift in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            maps = doubled_convolution(maps, kernel)
            variance, mean = torch.var_mean(maps, (2, 3), correction=0, keepdim=True)
            maps = (maps - mean) * ((variance + _EPSILON).rsqrt() * scale[..., None, None]) + shift[..., None, None]
            maps = F.glu(maps, 1)
        down, right = ((self._side - side) // 2 for side in self._shape[1:])
        return maps[..., down : down + self._shape[1], right : right + self._shape[2]].sigmoid()

    def penalty(self, flat: Tensor, pictures: Tensor) -> Tensor:
        """Total variation as in the code of GRNN."""
        down, right = (pictures.diff(dim=axis).square().flatten(1).mean(1) for axis in (2, 3))
        return 2 * self._roughness * (down + right).view(len(flat), -1).mean(1)


def doubled_convolution(maps: Tensor, kernels: Tensor) -> Tensor:
    """Double each map (N, C, H, W) by repeating its pixels, then convolve it with a kernel of its own, padded by 1.

    Args:
        maps: (N, C, H, W).
        kernels: (N, 3, 3, outputs, C).

    Returns:
        (N, outputs, 2 H, 2 W).
    """
    count, channels, height, width = maps.shape
    outputs = kernels.shape[3]
    products = torch.bmm(kernels.reshape(count, 9 * outputs, channels), maps.reshape(count, channels, -1))
    products = products.view(count, 3, 3, outputs, height, width)
    lines = _met(products, 4)  # (N, 3, outputs, 2 H, W)
    return _met(lines, 4)


def _met(products: Tensor, axis: int) -> Tensor:
    """Add up along one axis of pixels what the three taps on axis 1 bring to both halves of each doubled pixel.

    The first half meets the pixel before by the first tap, and its own by the two others; the second half its own by
    two, and the pixel after by the last.
    """
    before, own, after = products.unbind(1)
    axis -= 1
    size, rest = own.shape[axis], [0, 0] * (own.dim() - 1 - axis)
    first = F.pad(before.narrow(axis, 0, size - 1), [*rest, 1, 0]) + own + after
    second = before + own + F.pad(after.narrow(axis, 1, size - 1), [*rest, 0, 1])
    return torch.stack([first, second], axis + 1).flatten(axis, axis + 1)
