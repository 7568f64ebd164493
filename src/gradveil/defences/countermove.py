"""What an attacker who knows a defence does about it: how it compares its guess with what it saw."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradveil.types import Tensors


@dataclass(frozen=True)
class Countermove:
    """How an attacker who knows the defence compares the gradient of its guess with the one it saw.

    Both are mean gradients by parameter name, each (T, shape of the parameter) for T targets.

    Attributes:
        sent: what the defence would have made of a guess's gradient (first argument), given the one seen (second);
            differentiable in the first. None leaves it as it is.
        distance: the distance that the defence's noise calls for: l2, l1 or cosine; "" keeps the attack's own.
        noise: standard deviation of the noise in each entry of a tensor, by its name; empty without noise. An attacker
            trades the distance against what it believes of images by this.
        weights: factor of a tensor's part in the distance, by its name; 0 leaves it out, absent is 1.
        passes_noise: whether ``sent`` leaves noise that was added before it as strong as it was, where entries survive.
        look: what of the gradient seen is compared; None compares it as it is.
        decoys: images that the defence hides behind each private one, fewer than 1 where some have none; the attacker
            searches them too, with unknown soft labels and no prior, and adds their gradients to the guess's before
            ``sent``.
        own_label: share of the private image's own label in those of its decoys.
        unknowns: modules whose output is the client's secret and the same for all its images, by name; the attacker
            searches those outputs with the images. Each function draws first guesses (rows, numbers) for so many rows.
        outputs: likewise modules whose output (T, numbers) the attacker knows.
        penalties: what the client adds to each example's loss: a function of a module's output, by the module's name.
        separate: whether the attacker first tries to tell the private image's part of the gradient from its decoy's by
            linear algebra; what is told apart is matched without decoys.
        soft_labels: whether clients train on mixtures of labels, so that unknown ones are searched as such.
        decode: attacks that turn guesses of what the network saw into private images, one after the other; each is
            the text of a `gradveil.attacks.decoder.Decoder`.
    """

    sent: Callable[[Tensors, Tensors], Tensors] | None = None
    distance: str = ""
    noise: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    passes_noise: bool = False
    look: Callable[[Tensors], Tensors] | None = None
    decoys: float = 0
    own_label: float = 0.0
    unknowns: Mapping[str, Callable[[int, torch.Generator], Tensor]] = field(default_factory=dict)
    outputs: Tensors = field(default_factory=dict)
    penalties: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    separate: bool = False
    soft_labels: bool = False
    decode: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arrived:
    """What a server has of T clients, for an attacker who knows the defence to choose its countermove by.

    Attributes:
        gradients: mean gradients as they arrived (after ``on_server``), (T, ...) by name.
        steps: how long each local step was (learning rate times what the step counts for); the update is minus their
            sum times the mean gradient.
        batch_size: images a local step.
        public: what was broadcast beside the model.
        network: as broadcast, with the attacker's own values for what is private; None where it is not at hand.
        secrets: what was granted of each client's private tensors, as they were before the round; empty if nothing.
        secret_changes: what was granted of their change in the round, likewise.
    """

    gradients: Tensors
    steps: Sequence[float]
    batch_size: int = 1
    public: Tensors = field(default_factory=dict)
    network: nn.Module | None = None
    secrets: Sequence[Tensors] = ()
    secret_changes: Sequence[Tensors] = ()

    @property
    def even_weights(self) -> dict[str, float]:
        """One over each tensor's norm, so that small ones are heard beside large ones in a match."""
        norms = {name: float(tensor.flatten(1).norm(dim=1).mean()) for name, tensor in self.gradients.items()}
        return {name: 1 / norm for name, norm in norms.items() if norm > 0}
