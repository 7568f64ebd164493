"""Soteria's certificate: a lower bound on the distance between a private image and its reconstruction."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.networks.grads import layer_inputs, refuse_mixing_layers
from gradveil.secret_stream import SecretStream
from gradveil.validate import in_range


def certificate(
    network: nn.Module,
    layer: str,
    images: Tensor,
    perturbed: Tensor,
    *,
    rng: SecretStream,
    tolerance: float = 1e-4,
    max_steps: int = 200,
) -> Tensor:
    r"""Return a first-order lower bound on the distance from each image X to any X' whose representation is r'.

    .. math:: \|X - X'\|_2 \ge \frac{\|r - r'\|_2}{\|\nabla_X f\|_2}, \qquad r = f(X), \; r' = f(X')

    f maps an image to the input of ``layer`` in evaluation mode, and the denominator is the operator norm of its
    Jacobian at X. The bound holds if f is linear between X and X', with equality if r - r' lies along the direction
    that f stretches most. Otherwise it is an estimate: f may be steeper between X and X' than at X, and then X' may be
    closer. It does not cover an attacker who also uses other tensors of the update. Power iteration approaches the
    norm from below, so the returned bound is too high by a relative error of about ``tolerance``.

    Args:
        network: a network in which the representation of an image does not depend on other images; not changed.
        layer: name of the layer whose input is the representation.
        images: (N, C, H, W).
        perturbed: r' as (N, features), or a bool mask (N, features) of the features that are set to zero.
        rng: random stream for the start of the power iteration.
        tolerance: as in `operator_norms`.
        max_steps: as in `operator_norms`.

    Returns:
        Distances (N,) in units of the pixels: 0 if r' = r, infinite if r' differs from r but no pixel changes r.

    Reference: Sun et al. 2021, https://arxiv.org/abs/2012.06043, Theorem 1 with p = 2.
    """
    model = copy.deepcopy(network).eval()
    refuse_mixing_layers(model)
    if not layer or layer not in dict(model.named_modules()):
        raise UnknownNameError("layer", layer, [name for name, _ in model.named_modules() if name])

    def features(some: Tensor) -> Tensor:
        return layer_inputs(model, [layer], some)[0].flatten(1)

    with torch.no_grad():
        clean = features(images)  # (N, features)
    if perturbed.shape != clean.shape:
        raise ConfigError(
            f"perturbed must have the shape {tuple(clean.shape)} of the input of layer {layer!r}, "
            f"got {tuple(perturbed.shape)}. Pass one row per image."
        )
    target = clean.masked_fill(perturbed, 0.0) if perturbed.dtype == torch.bool else perturbed
    moved = (clean - target).norm(dim=1)
    norms = operator_norms(features, images, rng=rng, tolerance=tolerance, max_steps=max_steps)
    return torch.where(moved == 0, torch.zeros_like(moved), moved / norms)


def operator_norms(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    *,
    rng: SecretStream,
    tolerance: float = 1e-4,
    max_steps: int = 200,
) -> Tensor:
    r"""Return the largest singular value (N,) of each example's Jacobian J, by power iteration on :math:`J^T J`.

    Each step multiplies by J (forward mode) and by its transpose (backward mode), for all examples at once.

    Args:
        function: maps (N, ...) to (N, features), each example independently of the others.
        inputs: (N, ...).
        rng: random stream for the random start.
        tolerance: the iteration stops when no value changes by more than this share in a step.
        max_steps: largest number of steps; if it is reached, the values are slightly too low.

    Example:
        >>> matrix = torch.diag(torch.tensor([3.0, 1.0]))
        >>> norms = operator_norms(lambda x: x @ matrix, torch.zeros(2, 2), rng=SecretStream(0))
        >>> [round(norm, 3) for norm in norms.tolist()]
        [3.0, 3.0]
    """
    in_range("tolerance", tolerance, 0, open_low=True)
    in_range("max_steps", max_steps, 1)
    inputs = inputs.detach().contiguous()  # forward mode rejects expanded tensors
    direction = _normalised(rng.normal(inputs.shape, inputs.dtype).to(inputs.device))
    backward = torch.func.vjp(function, inputs)[1]
    norms = torch.zeros(len(inputs), dtype=inputs.dtype, device=inputs.device)
    for _ in range(max_steps):
        with torch.no_grad():
            image: Tensor = torch.func.jvp(function, (inputs,), (direction,))[1]  # (N, features)
            previous, norms = norms, image.flatten(1).norm(dim=1)
            if bool(((norms - previous).abs() <= tolerance * norms).all()):
                break
            direction = _normalised(backward(image)[0])
    return norms


def _normalised(rows: Tensor) -> Tensor:
    """Scale each example to norm 1; zero stays zero."""
    norms = rows.flatten(1).norm(dim=1).view(-1, *[1] * (rows.dim() - 1))
    result: Tensor = rows / norms.where(norms > 0, 1.0)
    return result
