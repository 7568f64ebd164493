"""Jacobians of a network's features: products with many vectors at once, and the norms of their rows."""

from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.errors import ConfigError
from gradveil.secret_stream import SecretStream


def batched_vjp(outputs: Tensor, inputs: Tensor, cotangents: Tensor, *, chunk: int = 64) -> Tensor:
    """Compute vector-Jacobian products for many cotangents at once.

    Args:
        outputs: any shape, computed from ``inputs``.
        inputs: the tensor to differentiate by.
        cotangents: (K, shape of outputs).
        chunk: how many are computed together.

    Returns:
        (K, shape of inputs).
    """
    pieces = [
        torch.autograd.grad(outputs, inputs, part, retain_graph=True, is_grads_batched=True)[0]
        for part in torch.split(cotangents, chunk)
    ]
    return torch.cat(pieces) if pieces else inputs.new_zeros(0, *inputs.shape)


def batched_jvp(function: Callable[[Tensor], Tensor], inputs: Tensor, tangents: Tensor, *, chunk: int = 16) -> Tensor:
    """Compute Jacobian-vector products (K, outputs) in forward mode for many tangents (K, shape of inputs)."""
    inputs = inputs.contiguous()  # forward mode refuses expanded memory

    def one(tangent: Tensor) -> Tensor:
        product: Tensor = torch.func.jvp(function, (inputs,), (tangent,))[1]
        return product

    result: Tensor = torch.func.vmap(one, chunk_size=chunk)(tangents)
    return result


def jacobian_row_norms(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    *,
    order: float = 2.0,
    probes: int = 0,
    rng: SecretStream | None = None,
    chunk: int = 64,
    forward: bool = False,
) -> Tensor:
    r"""Return the norm :math:`\|\partial f_i(x_n) / \partial x_n\|_p` for each example n and feature i, (N, features).

    The norms are exact by batched backward passes, one per feature, or with ``forward`` by forward-mode passes, one
    per entry of the input. With ``probes`` the Euclidean norm is estimated for all features at once, by forward-mode
    products with Gaussian v, since :math:`E[(Jv)_i^2] = \|J_i\|_2^2`. The estimate's relative standard deviation
    is about :math:`1 / \sqrt{2\,\text{probes}}`.

    Args:
        function: maps (N, ...) to (N, features), each example independently.
        inputs: (N, ...).
        order: p of the norm; infinity is allowed.
        probes: number of random probes; 0 computes exact norms.
        rng: random stream, needed for probes; the draws that decide what is hidden stay secret.
        chunk: products computed together.
        forward: whether to compute exact norms by forward-mode passes, if the network supports them.
    """
    if probes:
        return _estimated_row_norms(function, inputs.detach(), order, probes, rng, chunk)
    leaf = inputs.detach().requires_grad_()
    with torch.enable_grad():
        features = function(leaf)  # (N, features)
    if forward:
        with suppress(RuntimeError):  # a layer may support backward mode only
            return _forward_row_norms(function, inputs.detach(), order, chunk)
    norms = []
    for some in torch.split(torch.arange(features.shape[1], device=features.device), chunk):
        rows = F.one_hot(some, features.shape[1]).to(features)  # (chunk, features)
        products = batched_vjp(features, leaf, rows.unsqueeze(1).expand(-1, len(features), -1), chunk=chunk)
        norms.append(torch.linalg.vector_norm(products.flatten(2), order, dim=2))
    return torch.cat(norms).T.detach()


def _forward_row_norms(function: Callable[[Tensor], Tensor], inputs: Tensor, order: float, chunk: int) -> Tensor:
    size = inputs[0].numel()
    columns: list[Tensor] = []  # each (N, features): the norms over a chunk of the input
    with torch.no_grad():
        for some in torch.split(torch.arange(size, device=inputs.device), chunk):
            basis = F.one_hot(some, size).to(inputs).view(-1, 1, *inputs.shape[1:])
            products = batched_jvp(function, inputs, basis.expand(-1, *inputs.shape).contiguous(), chunk=chunk)
            columns.append(torch.linalg.vector_norm(products, order, dim=0))
    norms: Tensor = torch.linalg.vector_norm(torch.stack(columns), order, dim=0)
    return norms


def _estimated_row_norms(
    function: Callable[[Tensor], Tensor],
    inputs: Tensor,
    order: float,
    probes: int,
    rng: SecretStream | None,
    chunk: int,
) -> Tensor:
    if rng is None:
        raise ConfigError("probes need random draws, got rng=None. Pass rng, a SecretStream.")
    if order != 2:
        raise ConfigError(f"probes estimate the Euclidean norm only: order must be 2, got {order:g}. Use probes=0.")
    total = torch.zeros((), dtype=inputs.dtype, device=inputs.device)
    with torch.no_grad():
        for start in range(0, probes, chunk):
            shape = (min(chunk, probes - start), *inputs.shape)
            tangents = rng.normal(shape, inputs.dtype).to(inputs.device)
            try:
                total = total + batched_jvp(function, inputs, tangents, chunk=chunk).square().sum(0)
            except RuntimeError as error:
                raise ConfigError(
                    f"probes must be 0 for a network without forward-mode derivatives, got {probes}: {error}"
                ) from error
    return (total / probes).sqrt()
