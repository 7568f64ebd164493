"""DCS2: add concealed samples, which imitate the gradients of sensitive images but look very different."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.defences.base import Client, Defence
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.errors import DefenceError
from gradveil.networks.grads import example_gradients, gradients_and_outputs
from gradveil.networks.space import Space
from gradveil.types import Batch, Tensors
from gradveil.validate import in_range, one_of

_TOGETHER = 32
"""Number of sensitive images that are concealed together; more do not fit a CPU's cache."""
_DECAYS = (3 / 8, 5 / 8, 7 / 8)
"""Shares of the steps after which the learning rate falls to a tenth."""


@dataclass(frozen=True)
class Dcs2(Defence):
    r"""Add the gradient of a concealed sample for each sensitive image, without opposing the true gradient.

    For a sensitive image x with label y, the concealed sample c has the label z of the image where its search starts.
    The search minimises

    .. math::
        1 - \cos(\nabla_\theta L(c, z), \nabla_\theta L(x, y)) + e^{-\lambda_x \|c - x\|_2}
            + \lambda_z \left( \frac{\|f(c) - f(x)\|_2}{\|f(x)\|_2} - \epsilon \right)

    by Adam, with at most ``steps`` steps and a learning rate that falls to a tenth after 3/8, 5/8 and 7/8 of them; it
    stops once the distance of c from x exceeds ``far``. Here f are the logits, and distances are in normalised pixels.
    With g the original gradient of the batch and N the batch size, the gradient sent is :math:`g_c`, or
    :math:`\hat g` if :math:`g_c` opposes g:

    .. math::
        g_c = \frac 1d \Big( g + \frac 1N \sum_c \nabla_\theta [\lambda_g L(c, z) + (1 - \lambda_g) L(c, y)] \Big)

    .. math::
        \hat g = g_c + v g, \quad v = \max(m, -\langle g, g_c \rangle / \langle g, g \rangle)
        \text{ if } \langle g, g_c \rangle < 0

    Only images marked sensitive are concealed. Gradients of concealed samples are computed in evaluation mode.

    Threat model: an honest-but-curious server that assumes that the update comes from the client's images only.
    Does not protect: a single image with a known label against an attacker who removes the concealed sample's part from
        the gradient (countermove ``separate``): on LeNet the image is recovered as if there were no defence. Nor does
        it protect against an attacker who searches for concealed samples together with the images (``joint``), or hide
        which classes are present. Unless ``box`` is set, concealed samples are far outside the range of pixels, so
        whoever sees them can tell them apart.
    Guarantee: none.
    Reference: Wu et al. 2024, https://arxiv.org/abs/2209.05724, Equations 9 to 12 and Algorithm 1.
    Differs from the paper: details that the paper leaves open follow the authors' code: distances in normalised pixels,
        the stop at a distance, and Adam. That code also divides the sum by 3 (``divisor=3``) and solves the projection
        with a margin of 0.5 (``margin=0.5``). Here the search stops for each image separately; in the code it stops by
        the mean distance over the batch.

    Attributes:
        start: where the search starts. ``other``: at another image, which is one of the client's that is not sensitive,
            or else a public image, or else noise; ``noise``: at N(0, 1) with a random label; ``mixup``: at 0.7 of the
            other image plus 0.3 of the sensitive one; ``aux``: at a public image (``--aux``).
        steps: largest number of Adam steps.
        lr: learning rate of Adam.
        lambda_x: decay of the reward for distance; the paper uses 0.01, and 0.001 for Tiny-ImageNet.
        lambda_z: weight of the distance between logits; the paper uses 0.01, and 0.1 for CelebA.
        epsilon: ε, relative distance between logits that is tolerated; a constant in the objective.
        lambda_g: share of the concealed sample's own label z; the rest is the label y of the sensitive image.
        far: distance from the image at which the search stops; the paper uses 300 (MNIST) to 500 (CIFAR-10), and 0
            never stops.
        box: whether concealed samples stay inside [0, 1]; the paper does not say, and the authors' code has no bound.
        ratio: number of sensitive images per concealed sample; every ``ratio``-th one is concealed, from a random first
            one.
        divisor: d, by which the sum is divided.
        margin: m, the smallest share of the batch's own gradient that the projection adds.
    """

    uses_aux: ClassVar[bool] = True
    aux_labels: ClassVar[bool] = False
    marked_only: ClassVar[bool] = True
    reports: ClassVar[Mapping[str, str]] = {
        "dcs2_distance": "mean distance of concealed samples from their images, in normalised pixels",
    }

    start: str = "other"
    steps: int = 1000
    lr: float = 0.1
    lambda_x: float = 0.01
    lambda_z: float = 0.01
    epsilon: float = 0.01
    lambda_g: float = 0.7
    far: float = 300.0
    box: bool = False
    ratio: int = 1
    divisor: float = 1.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        one_of("start", self.start, ["other", "noise", "mixup", "aux"])
        in_range("steps", self.steps, 1)
        in_range("lr", self.lr, 0, open_low=True)
        for name in ("lambda_x", "lambda_z", "epsilon", "far", "margin"):
            in_range(name, getattr(self, name), 0)
        in_range("lambda_g", self.lambda_g, 0, 1)
        in_range("ratio", self.ratio, 1)
        in_range("divisor", self.divisor, 0, open_low=True)
        object.__setattr__(self, "needs_aux", self.start == "aux")

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Add the gradients of concealed samples; without sensitive images the gradient does not change."""
        first = int(client.rng.integers(0, self.ratio, ())) if self.ratio > 1 else 0
        chosen = batch.sensitive.nonzero()[first :: self.ratio, 0]
        if not len(chosen):
            return gradient
        network = copy.deepcopy(client.model).eval()
        sensitive = batch[chosen]
        concealed = self.conceal(network, sensitive, client)
        client.report("dcs2_distance", _distance(network, concealed.images, sensitive.images), weight=len(chosen))
        added = self._gradient(network, sensitive, concealed, gradient)
        whole = {
            name: (tensor + added[name] / len(batch) if name in added else tensor) / self.divisor
            for name, tensor in gradient.items()
        }
        return projected(whole, gradient, self.margin)

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``separate``, which removes the concealed sample's part from the gradient, and ``joint``.

        ``joint`` searches for the concealed sample together with the image. Since cross-entropy is linear in labels,
        Eq. 10 adds the gradient of one more image whose label is a mixture of two. If that part cannot be removed
        (several images, or unknown labels), ``separate`` does the same as ``joint``, with a soft label that is searched
        too. If ``ratio`` leaves an image without a concealed sample, the gradient of the last layer has rank one, which
        shows it; in batches it is not known which images have concealed samples.
        """
        scaled = None if self.divisor == 1 else partial(_times, factor=1 / self.divisor)
        whole = None if self.divisor == 1 else lambda seen: _times(seen, seen, factor=self.divisor)
        joint = Countermove(scaled, decoys=1 / self.ratio, own_label=1 - self.lambda_g)
        return {"separate": replace(joint, sent=None, look=whole, separate=True), "joint": joint}

    def conceal(self, network: nn.Module, sensitive: Batch, client: Client) -> Batch:
        """Return a concealed sample for each image; its label, as probabilities, is that of its start."""
        with torch.no_grad():
            num_classes = network(sensitive.images[:1]).shape[1]
        begun = self._starts(sensitive, num_classes, client)
        parts = [
            self._search(network, sensitive[some], begun.images[some], begun.labels[some])
            for some in torch.split(torch.arange(len(sensitive), device=sensitive.images.device), _TOGETHER)
        ]
        return Batch(torch.cat(parts), begun.labels, sensitive.sensitive)

    def _search(self, network: nn.Module, sensitive: Batch, begun: Tensor, labels: Tensor) -> Tensor:
        """Minimise Eq. 9 for several images together, in normalised pixels; return pixels."""
        space = _space(network, begun)
        truth = space.from_pixels(sensitive.images)
        wanted = _flat(example_gradients(network, sensitive.images, sensitive.labels))
        with torch.no_grad():
            logits = network(sensitive.images)
        concealed, going = space.from_pixels(begun), torch.ones(len(begun), dtype=torch.bool, device=begun.device)
        first, second = torch.zeros_like(concealed), torch.zeros_like(concealed)
        for step in range(1, self.steps + 1):
            rows = going.nonzero()[:, 0]
            leaf = concealed[rows].requires_grad_()
            loss = self._loss(
                network, space.to_pixels(leaf), labels[rows], leaf - truth[rows], wanted[rows], logits[rows]
            )
            slope = torch.autograd.grad(loss.sum(), leaf)[0]
            first[rows] = 0.9 * first[rows] + 0.1 * slope
            second[rows] = 0.999 * second[rows] + 0.001 * slope.square()
            rate = self.lr * 0.1 ** sum(step > share * self.steps for share in _DECAYS)
            spread = (second[rows] / (1 - 0.999**step)).sqrt() + 1e-8
            moved = leaf.detach() - rate * first[rows] / (1 - 0.9**step) / spread
            concealed[rows] = space.box(moved) if self.box else moved
            if self.far:
                going = going & ((concealed - truth).flatten(1).norm(dim=1) <= self.far)
                if not bool(going.any()):
                    break
        if not bool(concealed.isfinite().all()):
            raise DefenceError(
                "Defence 'dcs2' found no finite concealed sample. Lower its setting lr, or the clients' learning rate "
                "(--lr)."
            )
        return space.to_pixels(concealed)

    def _loss(
        self, network: nn.Module, pixels: Tensor, labels: Tensor, away: Tensor, wanted: Tensor, logits: Tensor
    ) -> Tensor:
        """Return the objective of Eq. 9 (N,)."""
        gradients, ours = gradients_and_outputs(network, pixels, labels)
        alike = F.cosine_similarity(_flat(gradients), wanted, dim=1)
        tiny = torch.finfo(logits.dtype).tiny
        off = (ours - logits).norm(dim=1) / logits.norm(dim=1).clamp_min(tiny)
        distance = away.flatten(1).square().sum(1).clamp_min(tiny).sqrt()
        loss: Tensor = 1 - alike + torch.exp(-self.lambda_x * distance) + self.lambda_z * (off - self.epsilon)
        return loss

    def _gradient(self, network: nn.Module, sensitive: Batch, concealed: Batch, names: Tensors) -> dict[str, Tensor]:
        """Return the gradient of the two losses of Eq. 10, summed over concealed samples."""
        own = _probabilities(sensitive.labels, concealed.labels.shape[1]).to(concealed.labels)
        mixed = self.lambda_g * concealed.labels + (1 - self.lambda_g) * own
        parameters = {name: p for name, p in network.named_parameters() if name in names and p.requires_grad}
        with torch.enable_grad():
            loss = F.cross_entropy(network(concealed.images), mixed, reduction="sum")
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return {n: g.to(names[n]) for n, g in zip(parameters, found, strict=True) if g is not None}

    def _starts(self, sensitive: Batch, num_classes: int, client: Client) -> Batch:
        """Return the images where the search starts, and the labels that the concealed samples keep."""
        rng, images = client.rng, sensitive.images
        others = client.data[~client.data.sensitive] if self.start in ("other", "mixup") else None
        pool = others if others is not None and len(others) else client.aux
        if self.start == "aux" and pool is None:
            raise DefenceError("Defence 'dcs2' with start=aux needs public images, got none. Give --aux.")
        if self.start == "noise" or pool is None or not len(pool):
            space = _space(client.model, images)
            noise = rng.normal(images.shape).to(images)
            begun = space.to_pixels(noise)
            labels = rng.integers(0, num_classes, (len(images),)).to(images.device)
        else:
            drawn = pool[rng.integers(0, len(pool), (len(images),)).to(pool.images.device)]
            begun, labels = drawn.images.to(images), drawn.labels
            strange = labels >= num_classes  # public images may have other classes
            if bool(strange.any()):
                labels = torch.where(strange, rng.integers(0, num_classes, labels.shape).to(labels), labels)
        mixed = 0.7 * begun + 0.3 * images if self.start == "mixup" else begun
        return Batch(mixed, _probabilities(labels, num_classes).to(images), sensitive.sensitive)


def projected(gradient: Tensors, reference: Tensors, margin: float = 0.0) -> dict[str, Tensor]:
    r"""Return the nearest gradient that does not point against the reference (Eqs. 11 and 12 in closed form).

    If :math:`\langle g, g_c \rangle < 0`, a share v of the reference is added: the smallest :math:`v \ge m` that makes
    the inner product zero or positive.

    Example:
        >>> projected({"w": torch.tensor([-1.0, 1.0])}, {"w": torch.tensor([2.0, 0.0])})["w"]
        tensor([0., 1.])
    """
    product = sum(float((gradient[name].double() * reference[name].double()).sum()) for name in reference)
    size = sum(float(tensor.double().square().sum()) for tensor in reference.values())
    if product >= 0 or size == 0:
        return dict(gradient)
    share = max(margin, -product / size)
    return {name: tensor + share * reference[name] for name, tensor in gradient.items()}


def _space(network: nn.Module, images: Tensor) -> Space:
    channels, height, width = images.shape[1:]
    return Space(network, (channels, height, width), images)


def _distance(network: nn.Module, images: Tensor, others: Tensor) -> float:
    """Return the mean Euclidean distance of two batches (N, C, H, W), in normalised pixels."""
    space = _space(network, images)
    with torch.no_grad():
        return float((space.from_pixels(images) - space.from_pixels(others)).flatten(1).norm(dim=1).mean())


def _flat(gradients: Tensors) -> Tensor:
    """Concatenate gradients (N, ...) by name to (N, numbers)."""
    return torch.cat([tensor.flatten(1) for tensor in gradients.values()], 1)


def _probabilities(labels: Tensor, num_classes: int) -> Tensor:
    return F.one_hot(labels, num_classes).float() if labels.dim() == 1 else labels


def _times(guess: Tensors, seen: Tensors, *, factor: float) -> dict[str, Tensor]:
    return {name: tensor * factor for name, tensor in guess.items()}
