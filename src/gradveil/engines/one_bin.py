"""Rows of a layer that read one bin: they change only by images whose response lies in a narrow interval.

A server that wants one image of a batch needs no ladder of rows. A ramp that is constant on both sides gives a row
whose gradient comes from the images on the ramp alone; two ReLU rows with one direction, two thresholds and
proportional outgoing weights give a difference of rows that does the same. Both functions are part of the tripwire.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SHARE = 1 / 8
"""Largest share of the images on a ramp for an alarm; honest saturating layers have more there."""
FLAT = 3
"""Different responses that must give the same output on either side of a ramp; a ReLU is flat on one side only."""
CORRELATION = 0.999
"""Correlation of the responses of two rows that count as one direction; honest rows had up to 0.993."""
COMMON = 6
"""Images that must pass both rows, each with the same ratio of slopes; honest rows differ in their outgoing weights."""
RATIO = 0.05
"""Relative deviation of this ratio, root mean square."""
GAP = 1e-4
"""Smallest distance of two thresholds, in standard deviations of the response; copies of one row have none."""
ALIKE = 0.9
"""If random rows correlate by this much, the images are too similar to compare responses."""


def ramps(outputs: Tensor, passed: Tensor) -> list[int]:
    """Return the rows whose activation is constant for low and for high responses, with few images between.

    Args:
        outputs: (N, rows), responses of the rows to N images.
        passed: (N, rows), what the next layer receives of them.

    Example:
        >>> outputs = torch.tensor([[-2.0], [-1.0], [-0.5], [0.5], [1.0], [2.0], [3.0], [4.0]])
        >>> ramps(outputs, outputs.clamp(0, 0.6)), ramps(outputs, outputs.clamp_min(0))
        ([0], [])
    """
    if len(outputs) < 2 * FLAT:
        return []
    ordered, order = outputs.sort(0)
    reached = passed.gather(0, order)
    low, high = reached == reached[:1], reached == reached[-1:]
    differ = reached[0] != reached[-1]
    between = (~(low | high)).sum(0)
    wide = [torch.tensor([len(row[side].unique()) for row, side in zip(ordered.T, sides.T, strict=True)])
            for sides in (low, high)]  # fmt: skip
    found = differ.cpu() & (between.cpu() <= SHARE * len(outputs)) & (wide[0] >= FLAT) & (wide[1] >= FLAT)
    return found.nonzero().flatten().tolist()


def twins(inputs: Tensor, outputs: Tensor, parts: Tensor) -> list[tuple[int, int]]:
    """Return pairs of rows with one direction and two thresholds, whose gradients differ by the images between.

    Args:
        inputs: (N, entries), inputs of the layer.
        outputs: (N, rows), responses of the rows.
        parts: (N, rows), gradient of each image's loss by the responses; images may be weighted.
    """
    alike = _correlations(outputs)
    pairs = (alike.triu(1) >= CORRELATION).nonzero()
    if not len(pairs) or _too_similar(inputs):
        return []
    return [(i, j) for i, j in pairs.tolist() if _apart(outputs[:, [i, j]]) and _proportional(parts[:, [i, j]])]


def _correlations(values: Tensor) -> Tensor:
    """Return the correlations (rows, rows) of the columns of (N, rows); 0 for constant columns."""
    unit = F.normalize(values.double() - values.double().mean(0), dim=0, eps=1e-100)
    return unit.T @ unit


def _too_similar(inputs: Tensor) -> bool:
    control = torch.randn(inputs.shape[1], 256, generator=torch.Generator().manual_seed(0)).to(inputs)
    return bool(_correlations(inputs @ control).fill_diagonal_(0).abs().max() >= ALIKE)


def _apart(pair: Tensor) -> bool:
    """Return whether two proportional responses (N, 2) become positive at different thresholds."""
    (first, second), (mean, other) = (pair - pair.mean(0)).double().T, pair.double().mean(0)
    slope = (first @ second) / second.square().sum()
    return bool((mean / slope - other).abs() > GAP * second.square().mean().sqrt())


def _proportional(parts: Tensor) -> bool:
    """Return whether the slopes (N, 2) of two rows have the same ratio for all images that pass both, up to `RATIO`."""
    both = parts[(parts != 0).all(1)].double()
    if len(both) < COMMON:
        return False
    first, second = both.T
    factor = (first @ second) / second.square().sum()
    return bool((first - factor * second).norm() <= RATIO * first.norm())
