"""Images behind frozen features: the head's gradient tells the features, and a search finds an image that has them."""

import torch
from torch import Tensor, nn

from gradveil.attacks.parts.feature_inversion import FeatureSearch
from gradveil.models.trunk import BIAS, FeatureNetwork
from gradveil.threat import Observation, Reconstruction

SEARCH = FeatureSearch(iterations=300, lr=0.1, tv=0.03)


def head_of(network: nn.Module) -> str | None:
    """Return the name of the head on frozen features, or None if the network has no frozen features."""
    found = (name for name, module in network.named_modules() if isinstance(module, FeatureNetwork))
    return next((f"{name}.head".lstrip(".") for name in found), None)


def features_of(gradient: Tensor) -> Tensor:
    r"""Return the features (T, D) behind gradients (T, classes, D) of a head; a mixture for more than one image.

    The gradient of one image is :math:`e f^T`, and its last column :math:`0.3\,e`, because the last feature is a
    constant. So the errors e are known, and the rows are averaged with them as weights.
    """
    errors = gradient[..., -1:] / BIAS
    weight = errors.square().sum(1)
    return (errors * gradient).sum(1) / torch.where(weight > 0, weight, torch.nan)


def images_behind(seen: Observation, head: str, rng: torch.Generator) -> Reconstruction:
    """Search one image per target that has the features behind its update; no guess for the other images."""
    features = features_of(seen.updates[f"{head}.weight"]).nan_to_num(0.0, 0.0, 0.0)
    found = SEARCH(seen, head, features, rng)
    images = found.images.new_full((seen.num_targets, seen.num_examples, *seen.shape), torch.nan)
    images[:, 0] = found.images
    single = seen.num_examples == 1
    why = "" if single else f"1 guess for {seen.num_examples} images, from a mixture of their features"
    return Reconstruction(
        images=images,
        labels=torch.full(images.shape[:2], -1, device=images.device),
        loss=found.loss,
        converged=found.converged & single,
        why=(why,) * seen.num_targets,
    )
