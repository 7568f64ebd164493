r"""The inputs of fully connected layers per class, read off an update without any search.

The change of a Linear layer's weight is a sum of products of an error and a representation, its input:
:math:`\Delta W = -\eta \sum_j \delta_j r_j^T`, and that of its bias is :math:`-\eta \sum_j \delta_j`. If clients have
few classes, each row belongs mostly to one class. All functions take changes of weights, of one step or several, for T
targets at once, and need neither the learning rate nor the number of images.

Reference: Sun et al. 2021 (Soteria), https://arxiv.org/abs/2012.06043, Section 3.2.
"""

import torch
from torch import Tensor, nn

from gradveil.errors import ConfigError
from gradveil.networks.watch import inputs_of, record
from gradveil.threat import Observation
from gradveil.validate import one_of


def trained_classes(weight: Tensor, bias: Tensor | None) -> Tensor:
    r"""Return a mask (T, classes) of the classes that clients trained on, from the change of the last layer.

    For cross-entropy the error of output c is :math:`p_c - [c = y]`, so only images of class c raise its bias and, with
    non-negative features, the sum of its row. A class counts as trained on if its bias (without a bias, the sum of its
    row) rose by more than a hundredth of the largest rise.

    Args:
        weight: (T, classes, features), the change of the last layer's weight.
        bias: (T, classes), the change of its bias, or None.

    Differs from the paper: the paper uses the rows of larger magnitude, but gives no threshold; a sign needs none.
    Fails: for a class with a smaller share of the images than the network predicts for it, so with many classes; and
    without a bias for negative features.

    Example:
        >>> weight = torch.tensor([[[0.5, 0.2], [-0.1, -0.1], [0.0, 0.0]]])
        >>> trained_classes(weight, None)
        tensor([[ True, False, False]])
    """
    rise = weight.sum(2) if bias is None else bias
    most = rise.amax(1, keepdim=True).clamp_min(0)
    return rise > _LEAST_RISE * most


_LEAST_RISE = 0.01


def class_representations(seen: Observation, classes: Tensor | None = None, rows: str = "errors") -> dict[str, Tensor]:
    r"""Return each class's mean representation at the input of every Linear layer, up to a factor.

    In the last layer, the representation of class i is row i of the change, to which mostly its own images contribute.
    Then backwards, layer by layer, the representation of class i is a combination of the rows that belong to it.

    ``elements``: an element of the next layer's representation that is larger than in other classes selects a row,

    .. math:: \hat r_i^{l-1} = \sum_j \max\Big(0, \hat r_{ij}^l - \frac{1}{C-1} \sum_{k \ne i} \hat r_{kj}^l\Big)\,
        s_j\, \Delta W_j^{l-1}

    with representations of unit length, where :math:`s_j` is the sign of the bias's change, or without a bias of the
    row's sum, and removes the sign of the error.

    ``errors``: the error of class i at the last layer, :math:`e_i - 1/C` for an untrained network, is propagated back
    through the weights, which the server knows, and through units that are active by :math:`\hat r_i^l > 0`. As
    :math:`\Delta W = \sum_i d_i r_i^T`, representations are :math:`D^+ \Delta W`, a least-squares fit to all classes at
    once.

    For a single image each row is a multiple of its representation, and both ways are exact up to a factor.

    Args:
        seen: what the server saw, after any number of local steps.
        classes: (T, classes) bool, the classes to infer; by default `trained_classes`.
        rows: errors or elements, as above.

    Returns:
        Representations (T, classes, features) of unit length by layer, first to last; NaN for classes that were not
        trained on.

    Raises:
        ConfigError: if the network does not end in a Linear layer with one output per class.

    Differs from the paper: Section 3.2 says that element values identify the row of a class and leaves the details to
    an appendix that the published version lacks. ``elements`` follows this sentence; the weights and signs of rows are
    our choice. ``errors`` is not in the paper: before the last layer, ``elements`` finds what all classes share rather
    than what distinguishes them, which ``errors`` does (`gradveil reproduce soteria --table 1`).
    """
    one_of("rows", rows, ROWS)
    chain = linear_chain(seen)
    last, change = chain[-1], seen.updates
    weight = change[f"{last}.weight"]
    found = trained_classes(weight, change.get(f"{last}.bias")) if classes is None else classes.to(weight.device)
    inferred = {last: _unit(weight) * found[..., None]}
    errors = (torch.eye(weight.shape[1]).to(weight) - 1 / weight.shape[1]) * found[..., None]  # (T, classes, outputs)
    switched = _switched(seen, chain) if rows == "errors" else set()
    for after, name in zip(reversed(chain[1:]), reversed(chain[:-1]), strict=True):
        weight, bias = change[f"{name}.weight"], change.get(f"{name}.bias")
        if rows == "elements":
            inferred[name] = _unit(_excess(inferred[after], found) @ _signed_rows(weight, bias))
            continue
        errors = errors @ seen.network.get_parameter(f"{after}.weight").detach()
        if after in switched:
            errors = errors * (inferred[after] > 0)
        inferred[name] = _unit(_fitted(errors, weight, bias))
    return {name: torch.where(found[..., None], inferred[name], torch.nan) for name in chain}


ROWS = ("errors", "elements")


def _excess(representations: Tensor, found: Tensor) -> Tensor:
    """Return by how much each element (T, classes, features) exceeds the mean of the other classes, at least 0."""
    others = (found.sum(1)[:, None, None] - 1).clamp_min(1)
    mean = (representations.sum(1, keepdim=True) - representations) / others
    return (representations - mean).clamp_min(0) * found[..., None]


def _signed_rows(weight: Tensor, bias: Tensor | None) -> Tensor:
    error = weight.sum(2) if bias is None else bias
    return weight * error.sign()[..., None]


def _fitted(errors: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the inputs that explain the change, given errors (T, classes, outputs); the bias determines their sign."""
    fit: Tensor = torch.linalg.pinv(_unit(errors).mT, rtol=_RANK)  # (T, classes, outputs)
    found = fit @ weight
    return found if bias is None else found * (fit @ bias[..., None]).sign()


_RANK = 1e-2
"""Errors of classes that differ by less than this share count as equal."""


def _switched(seen: Observation, chain: list[str]) -> set[str]:
    """Return the layers after a ReLU, whose input has inactive units that pass no error back."""
    noise = torch.rand(16, *seen.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), inputs_of(seen.network, chain) as reached:
        seen.network(noise.to(next(iter(seen.updates.values()))))
    return {name for name in chain if bool((reached[name] == 0).any())}


def _unit(vectors: Tensor) -> Tensor:
    length: Tensor = vectors.norm(dim=-1, keepdim=True)
    return vectors / length.clamp_min(torch.finfo(vectors.dtype).tiny)


def linear_chain(seen: Observation) -> list[str]:
    """Return the names of the Linear layers at the network's end, first to last, each fed by the one before.

    Between two of them there may be layers without parameters that keep the shape, such as activations and Dropout.
    """
    calls = _calls(seen)
    at = [number for number, (name, _, _) in enumerate(calls) if _is_head(seen, name)]
    chain, width = list[str](), seen.num_classes
    for name, shape_in, shape_out in reversed(calls[: at[-1] + 1] if at else []):
        layer = seen.network.get_submodule(name)
        if isinstance(layer, nn.Linear) and f"{name}.weight" in seen.updates and shape_out == (1, width):
            chain.insert(0, name)
            width = layer.in_features
        elif shape_in != shape_out or any(True for _ in layer.parameters()):
            break
    if not chain:
        raise ConfigError(
            "Representations need a network that ends in a Linear layer with one output per class, got none in the "
            "update. Use an attack that matches gradients, such as --attacks gs."
        )
    return chain


def _is_head(seen: Observation, name: str) -> bool:
    layer = seen.network.get_submodule(name)
    return isinstance(layer, nn.Linear) and layer.out_features == seen.num_classes and f"{name}.weight" in seen.updates


def _calls(seen: Observation) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return every call of a layer without children, in order: its name and the shapes of input and output."""
    leaves = [name for name, layer in seen.network.named_modules() if name and not list(layer.children())]
    with record(seen.network, leaves) as calls, torch.no_grad():
        seen.network(torch.zeros(1, *seen.shape).to(next(iter(seen.updates.values()))))
    return [
        (call.name, tuple(call.inputs[0].shape), tuple(call.output.shape))
        for call in calls
        if call.inputs and isinstance(call.inputs[0], Tensor) and isinstance(call.output, Tensor)
    ]
