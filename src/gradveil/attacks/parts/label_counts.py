r"""Label counts of many images and local steps, with the network's mean output on each class estimated separately.

The last layer's mean bias gradient is :math:`g = \bar p - s` with the shares s of the classes among the client's images
and the network's mean output :math:`\bar p` on them. Public images show the output :math:`q_c` on each class c, so that
:math:`\bar p = \sum_c s_c q_c`, and s solves linear equations: on a trained network too, where :math:`\bar p` is close
to s itself, and no single estimate of it would do.
"""

from collections.abc import Iterator

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from gradveil.threat import Observation
from gradveil.types import Batch

POINTS = 8
"""Models along the client's way at which the network's output is estimated."""
_SUM = 100.0
"""Weight of the equation that the shares sum to 1; larger than all others."""


def class_outputs(seen: Observation, public: Batch) -> Tensor:
    """Return the mean output on public images of each class during local training, (T, classes, classes).

    Row c is the output on class c; a class without public images has the mean over all images. For several local steps
    it is the mean over models on the line from the broadcast one to the client's.
    """
    like = next(iter(seen.updates.values()))
    images, labels = public.images.to(like), public.labels.to(like.device)
    masks = torch.nn.functional.one_hot(labels, seen.num_classes).to(like)  # (N, classes)
    masks = torch.where(masks.sum(0) > 0, masks, torch.ones_like(masks))
    masks = masks / masks.sum(0)

    @torch.no_grad()
    def outputs(weights: dict[str, Tensor]) -> Tensor:
        logits: Tensor = torch.func.functional_call(seen.network, weights, (images,))
        return masks.T @ logits.softmax(1)

    if seen.single_step:
        return outputs({}).expand(seen.num_targets, -1, -1)
    return torch.stack([torch.stack(list(map(outputs, _way(seen, target)))).mean(0) for target in range(len(like))])


def _way(seen: Observation, target: int) -> Iterator[dict[str, Tensor]]:
    """Yield weights on the line from the broadcast model to the one before the client's last step."""
    steps = seen.local_steps.num_steps(seen.num_examples)
    start = {name: p.detach() for name, p in seen.network.named_parameters() if name in seen.updates}
    for share in np.linspace(0, (steps - 1) / steps, min(POINTS, steps)).tolist():
        yield {name: weight + share * seen.updates[name][target] for name, weight in start.items()}


def class_shares(gradient: Tensor, outputs: Tensor, prior: Tensor, weight: float) -> Tensor:
    r"""Return the classes' shares s that explain a bias gradient, (classes,).

    .. math:: \arg\min_{s \ge 0,\, \sum s = 1} \|s - Q^T s + g\|^2 + w \|s - \pi\|^2

    Args:
        gradient: the mean bias gradient g, (classes,).
        outputs: Q, the mean output on each class, (classes, classes).
        prior: the shares to expect without the update, (classes,).
        weight: w; the more the network has learned, the more the prior counts, because Q comes close to I.

    Example:
        A network that always says one half each: of two classes, g = 1/2 - s.

        >>> half = torch.full((2, 2), 0.5)
        >>> class_shares(torch.tensor([-0.25, 0.25]), half, half[0], 0.0).round(decimals=3).tolist()
        [0.75, 0.25]
    """
    count = len(gradient)
    identity = np.eye(count)
    known, expected = outputs.double().cpu().numpy(), prior.double().cpu().numpy()
    equations = np.concatenate([identity - known.T, np.full((1, count), _SUM), weight**0.5 * identity])
    values = np.concatenate([-gradient.double().cpu().numpy(), [_SUM], weight**0.5 * expected])
    shares = torch.from_numpy(nnls(equations, values)[0])
    return shares / shares.sum()


def rounded(shares: Tensor, count: int) -> Tensor:
    """Return ``count`` labels, sorted, whose classes have about these shares; largest remainders first.

    Example:
        >>> rounded(torch.tensor([0.5, 0.3, 0.2]), 4).tolist()
        [0, 0, 1, 2]
    """
    wanted = shares.double().cpu() * count
    whole = wanted.floor()
    missing = count - int(whole.sum())
    whole[(wanted - whole).argsort(descending=True, stable=True)[:missing]] += 1
    return torch.arange(len(whole)).repeat_interleave(whole.long())
