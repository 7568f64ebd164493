"""Soteria's certificate: how far an image inverted from a perturbed representation is from the private one."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.networks.grads import layer_inputs, refuse_mixing_layers
from gradveil.validate import in_range


def certificate(
    network: nn.Module,
    layer: str,
    images: Tensor,
    perturbed: Tensor,
    *,
    rng: torch.Generator,
    tolerance: float = 1e-4,
    max_steps: int = 200,
) -> Tensor:
    r"""A first-order lower bound on the distance of each image X from any X' whose representation is the perturbed r'.

    .. math:: \|X - X'\|_2 \ge \frac{\|r - r'\|_2}{\|\nabla_X f\|_2}, \qquad r = f(X), \; r' = f(X')

    f maps an image to the input of ``layer``, in evaluation mode; its Jacobian's operator norm is taken at X. The bound
    holds where f is linear between X and X', with equality if r - r' lies along the direction that f stretches most.
    Elsewhere it is an estimate: f may be steeper on the way to X' than at X, and then X' may be nearer. It says nothing
    on an attacker who also uses other tensors of the update. The norm is approached from below, so the bound from
    above, by about ``tolerance``.

    Args:
        network: any in which each image's representation is its own; left as it is.
        layer: name of the layer whose input is the representation.
        images: (N, C, H, W).
        perturbed: r' as (N, features), or a bool mask (N, features) of the features that are set to zero.
        rng: of the power iteration's start; a CPU generator.
        tolerance: as in `operator_norms`.
        max_steps: as in `operator_norms`.

    Returns:
        (N,) distances in the units of the pixels: 0 where r' is r, infinite where r' differs but nothing moves r.

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
        raise ConfigError(f"perturbed must be of shape {tuple(clean.shape)}, got {tuple(perturbed.shape)}.")
    target = clean.masked_fill(perturbed, 0.0) if perturbed.dtype == torch.bool else perturbed
    moved = (clean - target).norm(dim=1)
    norms = operator_norms(features, images, rng=rng, tolerance=tolerance, max_steps=max_steps)
    return torch.where(moved == 0, torch.zeros_like(moved), moved / norms)


def operator_norms(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    *,
    rng: torch.Generator,
    tolerance: float = 1e-4,
    max_steps: int = 200,
) -> Tensor:
    r"""The largest singular value of each example's Jacobian, (N,), by power iteration on :math:`J^T J`.

    A step is one product with J, forward, and one with its transpose, backward, for all examples together.

    Args:
        function: maps (N, ...) to (N, features), each example by itself.
        inputs: (N, ...).
        rng: of the random start; a CPU generator.
        tolerance: relative change in a step below which all values count as found.
        max_steps: the most steps; then the values stand as they are, a little low.

    Example:
        >>> matrix = torch.diag(torch.tensor([3.0, 1.0]))
        >>> norms = operator_norms(lambda x: x @ matrix, torch.zeros(2, 2), rng=torch.Generator().manual_seed(0))
        >>> [round(norm, 3) for norm in norms.tolist()]
        [3.0, 3.0]
    """
    in_range("tolerance", tolerance, 0, open_low=True)
    in_range("max_steps", max_steps, 1)
    inputs = inputs.detach().contiguous()  # forward mode refuses expanded memory
    direction = _normalised(torch.randn(inputs.shape, generator=rng, dtype=inputs.dtype).to(inputs.device))
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
    """Each example at norm 1; zero stays zero."""
    norms = rows.flatten(1).norm(dim=1).view(-1, *[1] * (rows.dim() - 1))
    result: Tensor = rows / norms.where(norms > 0, 1.0)
    return result
