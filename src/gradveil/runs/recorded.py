"""A recorded training loop in the words of a specification: what `gradveil.runs.recorder.Recorder` saw, explained."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from gradveil.errors import ConfigError, UnexplainedError
from gradveil.models import create_model
from gradveil.models.base import parse_normalisation
from gradveil.models.weights import misfits
from gradveil.runs.explained import (
    CLOSE,
    RecordedBatch,
    RecordedStep,
    clipping,
    loss_keys,
    mode_keys,
    optimiser_keys,
    pixel_range,
    rhythm,
)
from gradveil.runs.loop_hooks import flat, reference_of
from gradveil.storage import write_atomic


@dataclass(frozen=True)
class Recording:
    """The steps of a training loop, and the model that they began with.

    Attributes:
        before: the model before the first step.
        steps: what the optimiser did, in order; at least one.
        optimiser: the name of its class.
        factory: how to build the model again.
        normalise: what was done to images in [0, 1]; "" is inferred from the darkest and the brightest input.
    """

    before: nn.Module
    steps: Sequence[RecordedStep]
    optimiser: str
    factory: Callable[..., nn.Module] | str
    normalise: str

    def keys(self, *, tell_labels: bool) -> tuple[dict[str, Any], str]:
        """Return the keys of the specification, and a note on them. Raise UnexplainedError if it can't say it."""
        groups = [{key: value for key, value in step.group.items() if key != "initial_lr"} for step in self.steps]
        if any(group != groups[0] for group in groups):
            raise UnexplainedError(
                "The optimiser's settings must stay the same in all steps, got others (a scheduler?)."
            )
        keys = optimiser_keys(self.optimiser, groups[0]) | {"clip_norm": clipping(self.steps)}
        keys |= loss_keys(self.steps, keys)
        named = dict(self.before.named_modules())
        norms = [name for name, layer in named.items() if isinstance(layer, _BatchNorm)]
        dropouts = [name for name, layer in named.items() if isinstance(layer, _DropoutNd) and layer.p]
        keys |= mode_keys(self.steps, norms, dropouts)
        beats = rhythm([step.batches for step in self.steps])
        first = self.steps[0].batches[0]
        shape, classes = list(first.images.shape[1:]), first.num_classes
        normalise, note = (self.normalise, "") if self.normalise else pixel_range(self.steps)
        spec = {"model": self._named(shape, classes), "shape": shape, "num_classes": classes, "kind": "change"}
        spec |= keys | beats | {"normalise": normalise}
        if tell_labels:
            spec["labels"] = self._once("labels").tolist()
        return spec, note

    def write_truth(self, path: Path, normalise: str) -> None:
        """Write the private images of the first epoch, in [0, 1], to a file that only its owner can read."""
        images = self._once("images")
        found = parse_normalisation(normalise, images.shape[1])
        if found is not None:
            mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (found.mean, found.std))
            images = images * std + mean
        write_atomic(path, b"", mode=0o600)
        np.savez(path, images=images.clamp(0, 1).numpy()[None])

    def _once(self, part: str) -> Tensor:
        """Return the images or labels of the first epoch."""
        beats = rhythm([step.batches for step in self.steps])
        once = self.steps[: len(self.steps) // beats["epochs"]]
        return torch.cat([getattr(batch, part).detach().cpu() for step in once for batch in step.batches])

    def _named(self, shape: list[int], classes: int) -> str:
        """Return the text that builds the model again. Raise UnexplainedError if it builds another one."""
        text = self.factory if isinstance(self.factory, str) else reference_of(self.factory)
        try:
            again = create_model(text, (shape[0], shape[1], shape[2]), classes, seed=0)
            problems = misfits(again.state_dict(), self.before.state_dict()) or _unlike(again, self.before)
        except ConfigError as error:
            problems = [str(error)]
        if problems:
            raise UnexplainedError(
                f"The model must be built again by {text!r}, got: {problems[0]}. Pass a function without arguments "
                "that returns such a model: Recorder(..., factory=...)."
            )
        return text


def check_gradient(before: nn.Module, batches: Sequence[RecordedBatch], left: Tensor, *, rounded: bool) -> None:
    """Compute the first step's gradient again; raise UnexplainedError if the loss has other parts.

    Args:
        before: the model before the step.
        batches: what the loss was computed of.
        left: the gradient that backward left, as one vector.
        rounded: whether the loop used torch.autocast.
    """
    network = copy.deepcopy(before)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for batch in batches:
            for name, layer in network.named_modules():
                layer.training = batch.training[name]
            if batch.random is not None:
                torch.set_rng_state(batch.random)
            loss = F.cross_entropy(network(batch.images), batch.labels, label_smoothing=batch.smoothing)
            (batch.scale * loss).backward()  # type: ignore[no-untyped-call]
    found = flat({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
    if found.shape != left.shape or float((found - left).norm()) > 10 * CLOSE * float(left.norm()):
        if rounded:
            raise UnexplainedError(
                "Attacks replay gradients of full precision, got those of torch.autocast, which differ by more "
                f"than {10 * CLOSE:.0%}. Record a round without autocast."
            )
        raise UnexplainedError(
            "The gradient must be that of the cross-entropy of the model's output, got another one. Take other "
            "terms out of the loss (a penalty is weight_decay of the optimiser), and feed the model images alone."
        )


def _unlike(built: nn.Module, trained: nn.Module) -> list[str]:
    """Return the parameters that one of two networks trains and the other does not, in words."""
    other = dict(trained.named_parameters())
    pairs = [(name, p.requires_grad, other[name].requires_grad) for name, p in built.named_parameters()]
    words = {True: "trained", False: "frozen"}
    return [f"{name} is {words[one]} there and {words[two]} here" for name, one, two in pairs if one != two]
