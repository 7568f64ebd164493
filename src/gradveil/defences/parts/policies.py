"""ATS's search for policies: score random policies by how much they hide and how much accuracy they should keep."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import ConfigError
from gradveil.networks.grads import example_gradients
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch
from gradveil.validate import in_range

_BINS = 20
_SMALL = 1e-5


class Candidate(NamedTuple):
    """A policy with its scores.

    Attributes:
        policy: numbers of its operations, as the setting ``policy`` of the defence ``ats`` takes them.
        privacy: the paper's Spri; a lower score hides more.
        accuracy: the paper's Sacc; a higher score keeps more accuracy.
    """

    policy: str
    privacy: float
    accuracy: float


def privacy_scores(network: nn.Module, images: Tensor, labels: Tensor, rng: SecretStream) -> Tensor:
    r"""Return Spri (N,): the mean similarity between an image's gradient and gradients on the way from noise to it.

    .. math:: S_{pri} = \int_0^1 \cos\big(\nabla_\theta L(x_\tau, y), \nabla_\theta L(x, y)\big) d\tau, \qquad
        x_\tau = (1 - \tau)\, x_0 + \tau\, x

    with uniform noise :math:`x_0`. The cosine is computed for each parameter tensor and averaged over tensors; the
    integral is computed by the trapezoidal rule with 20 intervals.

    Args:
        network: a partly trained network, whose gradients differ between images; in evaluation mode.
        images: transformed images (N, C, H, W) in [0, 1].
        labels: (N,).
        rng: random stream for the noise.

    Reference: Gao et al. 2021, https://arxiv.org/abs/2011.12505, Eq. 5, and the authors' code.
    """
    noise = rng.uniform(images.shape).to(images)
    wanted = example_gradients(network, images, labels)
    alike = []
    for part in range(_BINS + 1):
        share = part / _BINS
        found = example_gradients(network, (1 - share) * noise + share * images, labels)
        cosines = [F.cosine_similarity(found[name].flatten(1), wanted[name].flatten(1), dim=1) for name in wanted]
        alike.append(torch.stack(cosines).mean(0).detach())
    return torch.trapezoid(torch.stack(alike), dx=1 / _BINS, dim=0)


def accuracy_score(network: nn.Module, images: Tensor) -> float:
    r"""Return Sacc, which is higher the less correlated the images' Jacobians are in an untrained network.

    .. math:: S_{acc} = -\sum_i \log(\sigma_i + \epsilon) + \frac{1}{\sigma_i + \epsilon}

    where :math:`\sigma_i` are the eigenvalues of the correlation matrix of the images' Jacobians (gradients of the
    summed outputs with respect to each image).

    Reference: Gao et al. 2021, Eq. 8, after Mellor et al. 2021, https://arxiv.org/abs/2006.04647.
    """
    with torch.enable_grad():
        leaf = images.detach().clone().requires_grad_()
        slopes = torch.autograd.grad(network(leaf).sum(), leaf)[0].flatten(1).double()
    values = torch.linalg.eigvalsh(torch.corrcoef(slopes)).clamp_min(0) + _SMALL
    return -float((values.log() + 1 / values).sum())


@dataclass(frozen=True)
class PolicySearch:
    """How many policies of which kind are tried, and how they are judged.

    Attributes:
        candidates: number of policies to try.
        longest: largest number of operations in a policy.
        operations: number of operations to choose from.
        least_accuracy: Sacc that a policy should reach. The best possible value is -1 per image. The authors use -85
            for one image of each class among 100 images of CIFAR-100, which is about 63 images.
        privacy_images: number of images over which the privacy score is averaged.
    """

    candidates: int = 1600
    longest: int = 3
    operations: int = 50
    least_accuracy: float = -85.0
    privacy_images: int = 50

    def __post_init__(self) -> None:
        for name in ("candidates", "longest", "operations", "privacy_images"):
            in_range(name, getattr(self, name), 1)


def search_policies(
    trained: nn.Module,
    untrained: nn.Module,
    batch: Batch,
    transform: Callable[[str, Tensor, SecretStream], Tensor],
    search: PolicySearch,
    rng: SecretStream,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Candidate]:
    """Score random policies, and return those that keep enough accuracy first, each group sorted by privacy.

    Args:
        trained: a partly trained network for the privacy score (in the paper trained on 10 % of the data).
        untrained: a network at its initial weights for the accuracy score.
        batch: images for both scores; the paper uses 100 for accuracy.
        transform: function of a policy, images and a random stream that returns the transformed images.
        search: how many policies of which kind are tried, and how they are judged.
        rng: random stream for all random draws.
        progress: called with the share of policies that are done.
    """
    if len(batch) < 2:
        raise ConfigError(f"batch must have at least two images to correlate, got {len(batch)}. Pass more images.")
    networks = [copy.deepcopy(network).eval() for network in (trained, untrained)]
    found = []
    for number, policy in enumerate(_drawn(search, rng)):
        images = transform(policy, batch.images, rng)
        few, labels = images[: search.privacy_images], batch.labels[: search.privacy_images]
        privacy = float(privacy_scores(networks[0], few, labels, rng).mean())
        found.append(Candidate(policy, privacy, accuracy_score(networks[1], images)))
        progress((number + 1) / search.candidates)
    return sorted(found, key=lambda each: (each.accuracy < search.least_accuracy, each.privacy))


def _drawn(search: PolicySearch, rng: SecretStream) -> Sequence[str]:
    """Draw different policies of one to ``longest`` operations."""
    texts: dict[str, None] = {}
    for _ in range(100 * search.candidates):
        length = int(rng.integers(1, search.longest + 1, ()))
        texts["-".join(map(str, rng.integers(0, search.operations, (length,)).tolist()))] = None
        if len(texts) == search.candidates:
            return list(texts)
    raise ConfigError(
        f"candidates must be at most the number of different policies, got {search.candidates}. Lower candidates, or "
        "raise longest."
    )
