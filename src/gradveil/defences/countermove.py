"""Countermoves: how an attacker who knows a defence compares its guess with the gradient it saw."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gradveil.types import Tensors


@dataclass(frozen=True)
class Countermove:
    """How an attacker who knows the defence compares the gradient of its guess with the one it saw.

    Both are mean gradients by parameter name, each (T, shape of the parameter) for T targets.

    Attributes:
        sent: applies the defence to a guess's gradient (first argument), given the gradient seen (second);
            differentiable in the first. None leaves the guess's gradient unchanged.
        distance: the distance that fits the defence's noise: l2, l1 or cosine; "" keeps the attack's own.
        noise: standard deviation of the noise in each entry of a tensor, by tensor name; empty without noise. The
            attacker uses it to weigh the distance against its prior on images.
        weights: factor of each tensor's part in the distance, by tensor name; 0 leaves the tensor out, the default
            is 1.
        passes_noise: whether ``sent`` keeps the strength of noise that was added before it, in entries that survive.
        zeroes: whether the last thing that the defence does is to set entries to zero and send the others unchanged, so
            that an attacker may compute what stood there.
        look: transforms the gradient seen before the comparison; None compares it unchanged.
        decoys: number of images that the defence hides behind each private one; below 1 if only some images have one.
            The attacker searches them too, with unknown soft labels and no prior, and adds their gradients to the
            guess's before ``sent``.
        own_label: share of the private image's own label in the labels of its decoys.
        unknowns: modules whose output is secret and the same for all images of a client, by module name; the attacker
            searches these outputs together with the images. Each function takes a number of rows and a random
            generator and returns first guesses (rows, numbers).
        outputs: known outputs (T, numbers) of modules, by module name.
        penalties: terms that the client adds to each example's loss: functions of a module's output, by module name.
        separate: whether the attacker first tries to separate the private image's part of the gradient from its
            decoy's by linear algebra; separated parts are matched without decoys.
        soft_labels: whether clients train on mixtures of labels, so that unknown labels are searched as mixtures.
        adds_up: whether what a client did not send in one round is sent in a later one (error feedback), so that the
            sum of all rounds is compared, if several are seen, and ``sent`` is applied to sums.
        decode: attacks that turn guesses of the images the network saw into private images, applied in order; each is
            the spec of a `gradveil.attacks.decoder.Decoder`.
    """

    sent: Callable[[Tensors, Tensors], Tensors] | None = None
    distance: str = ""
    noise: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    passes_noise: bool = False
    zeroes: bool = False
    look: Callable[[Tensors], Tensors] | None = None
    decoys: float = 0
    own_label: float = 0.0
    unknowns: Mapping[str, Callable[[int, torch.Generator], Tensor]] = field(default_factory=dict)
    outputs: Tensors = field(default_factory=dict)
    penalties: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    separate: bool = False
    soft_labels: bool = False
    adds_up: bool = False
    decode: tuple[str, ...] = ()

    @property
    def alters(self) -> bool:
        """Whether the defence changes the gradient."""
        return self.sent is not None or self.look is not None or bool(self.noise)


def combined(first: Countermove, second: Countermove) -> Countermove:
    """Return the countermove to two defences that are applied one after the other.

    Noise adds up, and the later defence decides the distance. If the second defence scales or rounds the first one's
    noise, its strength is unknown: then there is no likelihood, and the distance is the second's or the attack's own.
    Decoys can be separated by linear algebra only if the other defence leaves the gradient unchanged, or sets entries
    of it to zero afterwards.
    """
    if first.noise and second.sent is not None and not second.passes_noise:
        first = replace(first, noise={}, distance="")
    functions = [move.sent for move in (first, second) if move.sent is not None]

    def sent(guess: Tensors, seen: Tensors) -> Tensors:
        for function in functions:
            guess = function(guess, seen)
        return guess

    looks = [move.look for move in (second, first) if move.look is not None]  # what was done last is undone first

    def look(seen: Tensors) -> Tensors:
        for function in looks:
            seen = function(seen)
        return seen

    names = {**first.noise, **second.noise}
    noise = {name: math.hypot(first.noise.get(name, 0.0), second.noise.get(name, 0.0)) for name in names}
    weights = {
        name: first.weights.get(name, 1.0) * second.weights.get(name, 1.0) for name in (*first.weights, *second.weights)
    }
    return Countermove(
        sent if functions else None,
        second.distance or first.distance,
        noise,
        weights,
        look=look if looks else None,
        decoys=first.decoys + second.decoys,
        own_label=max(first.own_label, second.own_label),
        unknowns={**first.unknowns, **second.unknowns},
        outputs={**first.outputs, **second.outputs},
        penalties={**first.penalties, **second.penalties},
        soft_labels=first.soft_labels or second.soft_labels,
        adds_up=first.adds_up or second.adds_up,
        decode=second.decode + first.decode,
        zeroes=second.zeroes or (first.zeroes and not second.alters),
        separate=(first.separate and (second.zeroes or not second.alters)) or (second.separate and not first.alters),
    )


@dataclass(frozen=True)
class Arrived:
    """What a server has of T clients; an attacker who knows the defence chooses its countermove by it.

    Attributes:
        gradients: mean gradients as received (after ``on_server``), (T, ...) by name.
        steps: length of each local step (learning rate times the step's weight in the update); the update is minus
            their sum times the mean gradient.
        batch_size: images of a client per local step; a mean over clients if the update is theirs.
        public: what was broadcast beside the model.
        network: as broadcast, with the attacker's own values for private tensors, or None if it is not available.
        secrets: each client's private tensors before the round, as far as the threat model grants them; else empty.
        secret_changes: their changes in the round, as far as the threat model grants them; else empty.
        rounds: the number of rounds of the same images, from the training's first on, that are attacked together; the
            gradients are of the first.
        clients: the number of clients whose mean arrived.
    """

    gradients: Tensors
    steps: Sequence[float]
    batch_size: float = 1
    public: Tensors = field(default_factory=dict)
    network: nn.Module | None = None
    secrets: Sequence[Tensors] = ()
    secret_changes: Sequence[Tensors] = ()
    rounds: int = 1
    clients: int = 1

    @property
    def even_weights(self) -> dict[str, float]:
        """One over each tensor's norm, so that small tensors count as much as large ones in a match."""
        norms = {name: float(tensor.flatten(1).norm(dim=1).mean()) for name, tensor in self.gradients.items()}
        return {name: 1 / norm for name, norm in norms.items() if norm > 0}
