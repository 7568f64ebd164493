"""ATS's search for transformation policies: how much a policy hides, and how much of the accuracy it should keep."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import ConfigError
from gradveil.networks.grads import example_gradients
from gradveil.types import Batch
from gradveil.validate import in_range

_BINS = 20
_SMALL = 1e-5


class Candidate(NamedTuple):
    """A policy with its scores.

    Attributes:
        policy: its text, as the defence ``ats`` takes it.
        privacy: Spri; lower hides more.
        accuracy: Sacc; higher keeps more.
    """

    policy: str
    privacy: float
    accuracy: float


def privacy_scores(network: nn.Module, images: Tensor, labels: Tensor, rng: torch.Generator) -> Tensor:
    r"""Spri of each image: how much of the way from noise to the image its gradient can be felt, (N,).

    .. math:: S_{pri} = \int_0^1 \cos\big(\nabla_\theta L(x_\tau, y), \nabla_\theta L(x, y)\big) d\tau, \qquad
        x_\tau = (1 - \tau)\, x_0 + \tau\, x

    with :math:`x_0` uniform noise, the mean over tensors of their cosines, and the trapezoidal rule over 20 parts.

    Args:
        network: semi-trained, so that its gradients tell images apart; in evaluation mode.
        images: transformed ones, (N, C, H, W) in [0, 1].
        labels: (N,).
        rng: of the noise.

    Reference: Gao et al. 2021, https://arxiv.org/abs/2011.12505, Eq. 5, and the authors' code.
    """
    noise = torch.rand(images.shape, generator=rng).to(images)
    wanted = example_gradients(network, images, labels)
    alike = []
    for part in range(_BINS + 1):
        share = part / _BINS
        found = example_gradients(network, (1 - share) * noise + share * images, labels)
        cosines = [F.cosine_similarity(found[name].flatten(1), wanted[name].flatten(1), dim=1) for name in wanted]
        alike.append(torch.stack(cosines).mean(0).detach())
    return torch.trapezoid(torch.stack(alike), dx=1 / _BINS, dim=0)


def accuracy_score(network: nn.Module, images: Tensor) -> float:
    r"""Sacc: how differently an untrained network treats the images.

    .. math:: S_{acc} = -\sum_i \log(\sigma_i + \epsilon) + \frac{1}{\sigma_i + \epsilon}

    where :math:`\sigma` are the eigenvalues of the correlations between the images' Jacobians (of the summed outputs).

    Reference: Gao et al. 2021, Eq. 8, after Mellor et al. 2021, https://arxiv.org/abs/2006.04647.
    """
    with torch.enable_grad():
        leaf = images.detach().clone().requires_grad_()
        slopes = torch.autograd.grad(network(leaf).sum(), leaf)[0].flatten(1).double()
    values = torch.linalg.eigvalsh(torch.corrcoef(slopes)).clamp_min(0) + _SMALL
    return -float((values.log() + 1 / values).sum())


def search_policies(
    trained: nn.Module,
    untrained: nn.Module,
    batch: Batch,
    transform: Callable[[str, Tensor, torch.Generator], Tensor],
    *,
    candidates: int,
    rng: torch.Generator,
    longest: int = 3,
    operations: int = 50,
    least_accuracy: float = -85.0,
    privacy_images: int = 50,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Candidate]:
    """Random policies with their scores, those that keep enough accuracy first, and the most private one first of all.

    Args:
        trained: a semi-trained network, for privacy (the paper: on 10 % of the data).
        untrained: one as it is before training, for accuracy.
        batch: images that are looked at; the paper takes 100 for accuracy.
        transform: the images after the policy of a text.
        candidates: how many policies are tried; the paper has 1,600.
        rng: of everything that is drawn.
        longest: operations in a policy at most.
        operations: how many there are to draw from.
        least_accuracy: Sacc that a policy must have. It is -1 an image at best; the authors have -85 for one image of
            each class among 100, which are some 63 of CIFAR-100's.
        privacy_images: of ``batch``, those that privacy is the mean of.
        progress: called with the share that is done.
    """
    for name, value in (("candidates", candidates), ("longest", longest), ("privacy_images", privacy_images)):
        in_range(name, value, 1)
    if len(batch) < 2:
        raise ConfigError(f"batch must hold two images or more to correlate, got {len(batch)}.")
    networks = [copy.deepcopy(network).eval() for network in (trained, untrained)]
    found = []
    for number, policy in enumerate(_drawn(candidates, longest, operations, rng)):
        images = transform(policy, batch.images, rng)
        few, labels = images[:privacy_images], batch.labels[:privacy_images]
        privacy = float(privacy_scores(networks[0], few, labels, rng).mean())
        found.append(Candidate(policy, privacy, accuracy_score(networks[1], images)))
        progress((number + 1) / candidates)
    return sorted(found, key=lambda each: (each.accuracy < least_accuracy, each.privacy))


def _drawn(candidates: int, longest: int, operations: int, rng: torch.Generator) -> Sequence[str]:
    """Different policies of one to ``longest`` operations."""
    texts: dict[str, None] = {}
    for _ in range(100 * candidates):
        length = int(torch.randint(1, longest + 1, (), generator=rng))
        texts["-".join(map(str, torch.randint(operations, (length,), generator=rng).tolist()))] = None
        if len(texts) == candidates:
            return list(texts)
    raise ConfigError(f"candidates must be at most the number of different policies, got {candidates}.")
