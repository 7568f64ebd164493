r"""GRNN's generators: untrained networks, one per image, whose weights are searched, many at once.

Two identities make them cheap; results equal the published ones up to rounding.

A convolution of an image that was upsampled by repeating its pixels sees each pixel up to nine times. It is cheaper to
multiply the small image by the nine matrices of the kernel first, and then to sum the products in each pixel of the
large one: a quarter of the multiplications, as one batched matrix product for all generators.

The first layer maps a fixed noise vector z. RMSprop divides each gradient :math:`z_i g_j` by its own
running size :math:`|z_i| \rho_j`, so all weights :math:`W_{ij}` move by :math:`\text{sign}(z_i) u_j`, and the layer's
output by :math:`\|z\|_1 u_j`. So the output itself is searched, with :math:`\|z\|_1` times the learning rate,
instead of 128 times as many weights. The same holds for the logits of the label.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.attacks.parts.makers import Maker

_FIRST = 4
"""Side of the first feature map."""
_EPSILON = 1e-5


class FreshGenerators(Maker):
    """One generator per image: a 4 x 4 map with gated units, then upsampling, convolution, BatchNorm and gate.

    BatchNorm sees one image, so its statistics are those of each map. Images have the next power of two as size, at
    least 8, and are cropped to their centre.

    Args:
        shape: (C, H, W) of an image.
        batch_size: images per row.
        noise: length of the noise vector.
        width: channels of the last hidden layer; each layer before has twice as many.
        roughness: weight of the penalty, which is twice the mean squared difference of neighbouring pixels.
    """

    def __init__(
        self, shape: tuple[int, int, int], batch_size: int, *, noise: int, width: int, roughness: float
    ) -> None:
        self._shape, self._roughness = shape, roughness
        doublings = max(1, math.ceil(math.log2(max(shape[1:]) / _FIRST)))
        channels = [width * 2**level for level in reversed(range(doublings))]  # input of each upsampling
        self._side = _FIRST * 2**doublings
        self._shapes: list[tuple[int, ...]] = [(2 * channels[0], _FIRST, _FIRST), (2 * channels[0],)]
        for inputs, outputs in zip(channels, [*channels[1:], shape[0]], strict=True):
            self._shapes += [(3, 3, 2 * outputs, inputs), (2 * outputs,), (2 * outputs,)]
        self._sizes = [math.prod(part) for part in self._shapes]
        self.size = batch_size * sum(self._sizes)
        self._noise = torch.randn(noise, generator=torch.Generator().manual_seed(0))  # a constant of the network
        self._reach = float(self._noise.abs().sum())
        self.label_rate = self._reach + 1  # the layer of the label also has a bias

    def begin(self, rows: int, rng: torch.Generator) -> Tensor:
        """Draw the weights as PyTorch's layers do; the weights behind the first map are not kept."""
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
        """Return factors that move the first map as far as the weights behind it would."""
        factors = [self._reach] + [1.0] * (len(self._sizes) - 1)
        each = torch.cat([torch.full((size,), factor) for size, factor in zip(self._sizes, factors, strict=True)])
        return each.repeat(self.size // len(each))

    def pictures(self, flat: Tensor, labels: Tensor | None) -> Tensor:
        """Return the images that the generators make from their noise."""
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
        """Return the total variation as in the code of GRNN."""
        down, right = (pictures.diff(dim=axis).square().flatten(1).mean(1) for axis in (2, 3))
        return 2 * self._roughness * (down + right).view(len(flat), -1).mean(1)


def doubled_convolution(maps: Tensor, kernels: Tensor) -> Tensor:
    """Upsample each map (N, C, H, W) by repeating its pixels, then convolve it with its own kernel, padded by 1.

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
    """Sum the three kernel taps (axis 1) into each upsampled pixel pair along one axis.

    The first pixel of a pair gets the first tap of the previous pixel and the other two of its own; the second gets the
    first two taps of its own pixel and the last of the next.
    """
    before, own, after = products.unbind(1)
    axis -= 1
    size, rest = own.shape[axis], [0, 0] * (own.dim() - 1 - axis)
    first = F.pad(before.narrow(axis, 0, size - 1), [*rest, 1, 0]) + own + after
    second = before + own + F.pad(after.narrow(axis, 1, size - 1), [*rest, 0, 1])
    return torch.stack([first, second], axis + 1).flatten(axis, axis + 1)
