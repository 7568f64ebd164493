r"""What an update and a network show without the images: identities that every gradient of cross-entropy keeps.

- Softmax: the output gradients :math:`p - y` sum to 0, so the rows of the last layer's weight gradient sum to 0.
- One image: the last layer's weight gradient is :math:`\delta f^T` and its bias gradient :math:`\delta`, which gives
  the features f, by them the prediction p, and by p the scale of the gradient and the smoothing of the label.
- Homogeneity: for a unit between two layers without a bend at a place other than 0 (ReLU, pooling, Dropout), the inner
  products of weights and gradients on both sides are equal (Du et al. 2018, https://arxiv.org/abs/1806.00900).
- BatchNorm in training mode does not see the scale of the weights before it: their inner product with the gradient is
  0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradveil.federated.protocol import LocalSettings
from gradveil.networks.watch import LayerCall, record
from gradveil.runs.update_spec import UpdateSpec
from gradveil.types import Tensors

HOLDS = 1e-3
"""Relative size of what is left of an identity that holds."""
PROBES = 16
"""Images that stand in for the private ones."""


@dataclass(frozen=True)
class Case:
    """One client's update and what is stated about it.

    Attributes:
        network: the model of the file, in evaluation mode, with the stated normalisation.
        sent: the tensors that were sent, by name.
        spec: what is stated.
        probes: images in [0, 1] of the right shape, public ones if there are any.
    """

    network: nn.Module
    sent: Tensors
    spec: UpdateSpec
    probes: Tensor

    @cached_property
    def how(self) -> LocalSettings:
        """How the clients trained, as stated."""
        stated = self.spec.local_steps()
        return stated or LocalSettings("fedsgd", batch_size=0, batch_norm="freeze", dropout="off")

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The model's parameters, in double precision."""
        return {name: p.detach().double() for name, p in self.network.named_parameters() if p.requires_grad}

    @property
    def images(self) -> int:
        """Number of images behind the update; 1 if it is not stated."""
        return self.spec.num_examples or 1

    @cached_property
    def steps(self) -> int:
        """Number of local steps, as stated."""
        return self.how.num_steps(self.images)

    @cached_property
    def change(self) -> dict[str, Tensor]:
        """The change of the weights, in double precision."""
        factor = -(self.spec.lr or 1.0) if self.spec.kind == "gradient" else 1.0
        return {name: factor * self.sent[name].double().view(w.shape) for name, w in self.weights.items()}

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """The mean gradient that the stated rate and steps of SGD give, without the stated weight decay."""
        length = (self.spec.lr or 1.0) * sum(self.how.step_weights(self.images))
        decay = 0.0 if self.spec.kind == "gradient" else self.how.weight_decay
        return {name: -change / length - decay * self.weights[name] for name, change in self.change.items()}

    def rounding(self, name: str) -> Tensor | float:
        """Return what rounding leaves of a gradient that is zero, if weight decay moved the weights nevertheless."""
        if not self.how.weight_decay or self.spec.kind == "gradient":
            return 0.0
        unit = torch.finfo(self.sent[name].dtype).eps
        return 4 * unit * self.weights[name].abs() / (self.spec.lr or 1.0)

    @cached_property
    def flat(self) -> Tensor:
        """The mean gradient as one vector."""
        return torch.cat([tensor.flatten() for tensor in self.gradient.values()])

    @cached_property
    def calls(self) -> list[LayerCall]:
        """The calls of all layers without children, in their order."""
        with record(self.network) as calls, torch.no_grad():
            self.network(self.probes[:1])
        return [call for call in calls if call.name and not any(True for _ in call.layer.children())]

    @cached_property
    def weighted(self) -> list[LayerCall]:
        """The calls of layers with weights in the update."""
        return [call for call in self.calls if f"{call.name}.weight" in self.weights]

    @cached_property
    def head(self) -> str:
        """The name of the last linear layer with one output per class, or "" if there is none."""
        names = [call.name for call in self.weighted if isinstance(call.layer, nn.Linear)]
        fits = names and self.weights[f"{names[-1]}.weight"].shape[0] == self.spec.num_classes
        return names[-1] if fits and self.weighted[-1].name == names[-1] else ""

    def probe_gradient(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the gradient of the model on some images, in evaluation mode, in double precision."""
        targets = torch.arange(len(images)) % self.spec.num_classes if labels is None else labels
        with torch.enable_grad():
            loss = nn.functional.cross_entropy(self.network(images), targets)
        wanted = [p for p in self.network.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        pairs = zip(self.weights, found, strict=True)
        return {name: torch.zeros_like(self.weights[name]) if g is None else g.double() for name, g in pairs}

    @cached_property
    def typical(self) -> dict[str, Tensor]:
        """The gradient of the model on one probe image."""
        return self.probe_gradient(self.probes[:1])

    @cached_property
    def dropouts(self) -> list[tuple[str, float, str]]:
        """Name and share of each Dropout layer, with the linear layer or convolution that follows it."""
        found = []
        for place, call in enumerate(self.calls):
            if isinstance(call.layer, _DropoutNd) and 0 < call.layer.p < 1:
                after = next((c for c in self.calls[place + 1 :] if f"{c.name}.weight" in self.weights), None)
                if after is not None and isinstance(after.layer, (nn.Linear, nn.Conv2d)):
                    found.append((call.name, float(call.layer.p), after.name))
        return found

    @cached_property
    def norms(self) -> list[str]:
        """The names of layers whose output goes into a BatchNorm."""
        pairs = zip(self.weighted, self.weighted[1:], strict=False)
        return [a.name for a, b in pairs if isinstance(b.layer, _BatchNorm) and not isinstance(a.layer, _BatchNorm)]


def softmax_residual(case: Case, gradient: Tensors) -> Tensor | None:
    """Return the sums of the columns of the last layer's weight gradient, (features,), or None without such a layer."""
    return gradient[f"{case.head}.weight"].sum(0) if case.head else None


def relative_residual(case: Case) -> float | None:
    """Return the size of `softmax_residual` over what independent entries would give, or None."""
    left = softmax_residual(case, case.gradient)
    weight = case.gradient[f"{case.head}.weight"] if case.head else None
    if left is None or weight is None or not bool(weight.any()):
        return None
    return float(left.norm() / weight.norm())


@dataclass(frozen=True)
class OneImage:
    """What the last layer's gradient of a single image gives.

    Attributes:
        scale: how many times the gradient is as large as that of the mean cross-entropy.
        smoothing: the label smoothing that fits best; None for two classes, where it looks like another scale.
        misfit: share of the bias gradient that no scale and smoothing explain.
    """

    scale: float
    smoothing: float | None
    misfit: float


def one_image(case: Case) -> OneImage | None:
    """Return scale and smoothing from the last layer of a single image, or None if the layer does not show them."""
    if case.images != 1 or case.steps != 1 or f"{case.head}.bias" not in case.gradient:
        return None
    weight, bias = case.gradient[f"{case.head}.weight"], case.gradient[f"{case.head}.bias"]
    if not float(bias.norm()):
        return None
    features = bias @ weight / bias.square().sum()
    logits = case.weights[f"{case.head}.weight"] @ features + case.weights[f"{case.head}.bias"]
    prediction, classes = logits.softmax(0), len(bias)
    known = case.spec.labels
    label = int(known[0]) if known and isinstance(known[0], int) else int(bias.argmin())
    target = nn.functional.one_hot(torch.tensor(label), classes).double()
    plain, spread = prediction - target, target - 1 / classes
    columns = torch.stack([plain, spread], 1) if classes > 2 else plain[:, None]
    found = torch.linalg.lstsq(columns, bias[:, None], driver="gelsd").solution.flatten()
    misfit = float((columns @ found - bias).norm() / bias.norm())
    scale = float(found[0])
    return OneImage(scale, float(found[1]) / scale if classes > 2 and scale else None, misfit)


def balances(case: Case, gradient: Tensors) -> Iterator[tuple[str, float]]:
    """Yield pairs of neighbouring layers, and how unequal weights times gradients are on their two sides (0 to 1)."""
    for first, second in zip(case.weighted, case.weighted[1:], strict=False):
        if isinstance(second.layer, _BatchNorm) or not isinstance(second.layer, (nn.Linear, nn.Conv2d)):
            continue
        one = _times(case, gradient, first.name, outputs=True)
        other = _times(case, gradient, second.name, outputs=False)
        if len(other) % len(one) or getattr(second.layer, "groups", 1) != 1:
            continue
        other = other.view(len(one), -1).sum(1)
        size = float(one.norm() + other.norm())
        if size:
            yield f"{first.name} and {second.name}", float((one - other).norm()) / size


def _times(case: Case, gradient: Tensors, name: str, *, outputs: bool) -> Tensor:
    """Return the inner product of a layer's weights and gradient for each of its outputs or inputs."""
    product = case.weights[f"{name}.weight"] * gradient[f"{name}.weight"]
    if not outputs:
        return product.flatten(2).sum(2).sum(0) if product.dim() > 2 else product.sum(0)
    each = product.flatten(1).sum(1) if product.dim() > 1 else product
    key = f"{name}.bias"
    return each + case.weights[key] * gradient[key] if key in gradient else each


def scale_blindness(case: Case, gradient: Tensors) -> float | None:
    """Return how much the gradient before BatchNorm points along the weights; about 0 in training mode, or None."""
    sizes = [
        ((case.weights[key] * gradient[key]).flatten(1).sum(1).abs().sum(),
         (case.weights[key].flatten(1).norm(dim=1) * gradient[key].flatten(1).norm(dim=1)).sum())
        for key in (f"{name}.weight" for name in case.norms)
    ]  # fmt: skip
    whole = sum(float(size) for _, size in sizes)
    return sum(float(along) for along, _ in sizes) / whole if whole else None


def empty_columns(gradient: Tensor, rounding: Tensor | float = 0.0) -> float:
    """Return the share of a layer's inputs (or input channels) whose whole weight gradient is zero, up to rounding."""
    used = gradient.abs() > rounding
    used = used.flatten(2).any(2) if used.dim() > 2 else used
    return 1 - float(used.any(0).double().mean())


def scattered_zeros(gradient: Tensor) -> float:
    """Return the share of zeros among entries whose row and column are not all zero."""
    table = gradient.flatten(1).ne(0)
    inside = table.any(1)[:, None] & table.any(0)[None]
    count = int(inside.sum())
    return 1 - float((table & inside).sum()) / count if count else 0.0


def joined(tensors: Tensors) -> Tensor:
    """Return tensors as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@dataclass(frozen=True)
class Diagnosis:
    """One thing that is wrong or unusual.

    Attributes:
        name: in a few words.
        evidence: what shows it, with figures.
        advice: what to change.
    """

    name: str
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}. {self.advice}"
