"""Inverters: from an update's sketch to the images behind it, learned from examples.

Two learners: `kernel` regression, solved in closed form, and the published `network`. Both are checked on examples of
images that they have not seen; the settings with the least error there are kept.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from gradveil.attacks.parts.inversion_examples import Examples
from gradveil.errors import DataError
from gradveil.limits import parse_json
from gradveil.progress import tell
from gradveil.randomness import global_stream, stream
from gradveil.storage import load_tensors, read_metadata, save_tensors
from gradveil.types import Tensors

LEARNERS = ("kernel", "network")
LABEL_WEIGHT = 0.5
"""Length of the labels' part of the features; that of the update's part is 1."""
KERNELS = (0.0, 1.0, 3.0)
"""Widths of the kernels that are tried, in medians of the squared distance; 0 is the linear kernel."""
RIDGES = (1e-5, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Ridge penalties that are tried, as shares of the kernel's mean diagonal."""


@dataclass(frozen=True)
class SketchFeatures:
    """How sketches become features: each tensor has its weight, the whole has length 1, and the mean is taken off.

    Attributes:
        weights: of each tensor, by name.
        mean: of the features of all examples.
        num_classes: classes that are counted behind the update's features; 0 if labels are not known.
    """

    weights: Mapping[str, float]
    mean: Tensor
    num_classes: int

    @staticmethod
    def of(sketches: Tensors, num_classes: int, *, even: bool) -> "SketchFeatures":
        """Return features in which tensors count as they are, or ``even``: all alike, whatever their size."""
        sizes = {name: float(rows.norm(dim=1).mean()) for name, rows in sketches.items()}
        weights = {name: (1 / size if size > 0 else 0.0) if even else 1.0 for name, size in sizes.items()}
        return SketchFeatures(weights, _unit(sketches, weights).mean(0), num_classes)

    def __call__(self, sketches: Tensors, labels: Tensor | None) -> Tensor:
        """Return the features (N, length) of sketches, and of labels (N, B) or (N, B, classes) if they are known."""
        own = _unit(sketches, self.weights) - self.mean
        if labels is None or not self.num_classes:
            return own
        shares = F.one_hot(labels, self.num_classes).to(own) if labels.dim() == 2 else labels.to(own)
        return torch.cat([own, LABEL_WEIGHT * shares.mean(1)], 1)


def _unit(sketches: Tensors, weights: Mapping[str, float]) -> Tensor:
    whole = torch.cat([sketches[name] * weight for name, weight in weights.items()], 1)
    return F.normalize(whole, dim=1)


class Inverter(NamedTuple):
    """What was learned.

    Attributes:
        features: how sketches become features.
        known: (N, length) the features of the examples, of a kernel; empty for a network.
        tensors: the coefficients of a kernel (N, B * pixels), or the weights of a network.
        width: of the Gaussian kernel; 0 is the linear one, -1 a network.
        mean: (B * pixels,) what a kernel's answers are added to.
        error: mean squared error on images that were held out.
        blind: the error of answering the mean image there.
    """

    features: SketchFeatures
    known: Tensor
    tensors: Tensors
    width: float
    mean: Tensor
    error: float
    blind: float

    def __call__(self, sketches: Tensors, labels: Tensor | None) -> Tensor:
        """Return the guesses (N, B * pixels) in [0, 1]."""
        own = self.features(sketches, labels)
        if self.width < 0:
            return _answer(self.tensors, own)
        kernel = _kernel(own.double(), self.known.double(), self.width)
        return (kernel @ self.tensors["coefficients"].double() + self.mean).clamp(0, 1).to(own)


def learn(examples: Examples, num_classes: int, learner: str, hidden: int, steps: int, seed: int) -> Inverter:
    """Learn an inverter; ``num_classes`` is 0 if the labels of targets are not known."""
    labels = examples.labels if num_classes else None
    if learner == "network":
        features = SketchFeatures.of(examples.sketches, num_classes, even=True)
        return _network(features, features(examples.sketches, labels), examples, hidden, steps, seed)
    best = None
    for number, even in enumerate((False, True)):
        features = SketchFeatures.of(examples.sketches, num_classes, even=even)
        found = _kernel_regression(features, features(examples.sketches, labels), examples)
        best = found if best is None or found.error < best.error else best
        tell((number + 1) / 2)
    assert best is not None  # noqa: S101 - two were tried
    return best


# --- kernel regression ------------------------------------------------------------------------------------------------


def _kernel(left: Tensor, right: Tensor, width: float) -> Tensor:
    """Return the linear kernel, or the Gaussian one, of all pairs of rows."""
    if not width:
        return left @ right.T
    return torch.exp(-torch.cdist(left, right).square() / (2 * width))


def _kernel_regression(features: SketchFeatures, known: Tensor, examples: Examples) -> Inverter:
    """Return the regression whose kernel and penalty have the least error on held-out images, fitted to all images."""
    flat = examples.images.flatten(2).double()
    held, rest = examples.held, ~examples.held
    inputs = known.double()
    median = float(torch.cdist(inputs[held], inputs[rest]).square().median())
    truth, mean = flat[rest].flatten(1), flat[rest].flatten(1).mean(0)
    blind = float(matched_error(mean.expand(int(held.sum()), -1).view_as(flat[held]), flat[held]).mean())
    tried = {}
    for width in (factor * median for factor in KERNELS):
        own, across = _kernel(inputs[rest], inputs[rest], width), _kernel(inputs[held], inputs[rest], width)
        for ridge in RIDGES:
            guess = (across @ _solved(own, truth - mean, ridge) + mean).clamp(0, 1)
            tried[width, ridge] = float(matched_error(guess.view_as(flat[held]), flat[held]).mean())
    (width, ridge), error = min(tried.items(), key=lambda item: item[1])
    whole = _solved(_kernel(inputs, inputs, width), flat.flatten(1) - flat.flatten(1).mean(0), ridge)
    return Inverter(features, known, {"coefficients": whole.float()}, width, flat.flatten(1).mean(0), error, blind)


def _solved(kernel: Tensor, wanted: Tensor, ridge: float) -> Tensor:
    """Solve a regularised linear system: the kernel plus ``ridge`` times its mean diagonal."""
    own = kernel.clone()
    own.diagonal().add_(ridge * float(kernel.diagonal().mean()) + 1e-12)
    factor, failed = torch.linalg.cholesky_ex(own)
    return torch.cholesky_solve(wanted, factor) if not int(failed) else torch.linalg.lstsq(own, wanted).solution


# --- the published network --------------------------------------------------------------------------------------------


def _network(
    features: SketchFeatures, known: Tensor, examples: Examples, hidden: int, steps: int, seed: int
) -> Inverter:
    """Train the published network of three hidden layers; keep its weights with the least error on held-out images."""
    flat = examples.images.flatten(2)
    held, rest = examples.held, (~examples.held).nonzero().squeeze(1)
    with global_stream(seed, "inverter"):
        net = _perceptron(known.shape[1], hidden, flat[0].numel()).to(known)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(adam, 1e-3, total_steps=steps)
    rng, kept, least = stream(seed, "batches"), dict(net.state_dict()), float("inf")
    for number in range(steps):
        some = rest[torch.randint(len(rest), (min(256, len(rest)),), generator=rng).to(rest.device)]
        guess = net(known[some]).view(len(some), *flat.shape[1:])
        loss = matched_error(guess, flat[some]).mean()
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        rate.step()
        if number % 50 == 49 or number == steps - 1:
            with torch.no_grad():
                error = float(matched_error(net(known[held]).view_as(flat[held]), flat[held]).mean())
            if error < least:
                least, kept = error, {name: tensor.clone() for name, tensor in net.state_dict().items()}
            tell((number + 1) / steps)
    mean = flat[rest].flatten(1).mean(0)
    blind = float(matched_error(mean.expand(int(held.sum()), -1).view_as(flat[held]), flat[held]).mean())
    return Inverter(features, known[:0], kept, -1.0, mean, least, blind)


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    sizes = [inputs, hidden, hidden, hidden]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, outputs), nn.Sigmoid())


def _answer(weights: Tensors, inputs: Tensor) -> Tensor:
    """Return the answers of a network from its weights."""
    hidden, inside = weights["0.weight"].shape
    net = _perceptron(inside, hidden, len(weights["6.weight"])).to(inputs)
    net.load_state_dict(dict(weights))
    with torch.no_grad():
        answer: Tensor = net(inputs)
    return answer


def matched_error(guess: Tensor, truth: Tensor) -> Tensor:
    """Return the mean squared error (N,) of guesses (N, B, pixels), each batch in the order that fits it best."""
    if truth.shape[1] == 1:
        return (guess - truth).square().mean((1, 2))
    costs = torch.cdist(guess.detach(), truth).square().cpu().numpy()
    order = torch.stack([torch.from_numpy(linear_sum_assignment(cost)[1]) for cost in costs]).to(truth.device)
    return (guess - truth.gather(1, order[..., None].expand_as(truth))).square().mean((1, 2))


# --- files ------------------------------------------------------------------------------------------------------------


def save_inverter(path: Path, inverter: Inverter) -> None:
    """Save an inverter as one file."""
    tensors = {f"own {name}": tensor for name, tensor in inverter.tensors.items()}
    tensors |= {"known": inverter.known, "mean": inverter.mean, "features": inverter.features.mean}
    numbers = {"width": inverter.width, "error": inverter.error, "blind": inverter.blind}
    facts = {"classes": inverter.features.num_classes, "weights": dict(inverter.features.weights), **numbers}
    save_tensors(path, tensors, {"inverter": json.dumps(facts)})


def load_inverter(path: Path) -> Inverter:
    """Load what `save_inverter` wrote. Raise `DataError` if the file is not whole."""
    tensors = load_tensors(path)
    try:
        facts = parse_json(read_metadata(path)["inverter"])
        features = SketchFeatures(facts["weights"], tensors["features"], facts["classes"])
        own = {name.removeprefix("own "): tensor for name, tensor in tensors.items() if name.startswith("own ")}
        numbers = (facts["error"], facts["blind"])
        return Inverter(features, tensors["known"], own, facts["width"], tensors["mean"], *numbers)
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} must be an inverter of this version of gradveil, got: {error!r}.") from error
