"""The specification of saved updates: a TOML file with what is known about them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gradveil.config import (
    TrainSettings,
    absolute_dataset,
    absolute_path,
    read_settings,
    refuse_code,
    with_absolute_paths,
)
from gradveil.data.own import MAX_CLASSES
from gradveil.errors import ConfigError
from gradveil.federated.protocol import LocalSettings
from gradveil.registry import convert
from gradveil.validate import in_range, one_of

MOST_VALUES = 50_000_000
"""Values (channels x height x width) of an image at most."""
MOST_EXAMPLES = 10_000_000
"""Images behind an update at most."""
_LOCAL = tuple(field.name for field in dataclasses.fields(LocalSettings))
_SINGLE = {
    "batch_norm",
    "weight_decay",
    "optimiser",
    "betas",
    "eps",
    "clip_norm",
    "label_smoothing",
    "reduction",
    "dropout",
}
"""Keys of local training that a single step on all images has too."""


@dataclass(frozen=True)
class UpdateSpec:
    """What is known about the updates: the TOML file that goes with them. The attacker knows every fact in it.

    Attributes:
        model: a model of the zoo or the user's own file.py:factory.
        shape: (C, H, W) of an image.
        num_classes: number of classes of the task.
        kind: change (weights after minus weights before), weights (those after training) or gradient.
        lr: the clients' learning rate; a change needs it.
        num_examples: number of images behind each update.
        labels: labels of these images: one list for all updates, or a list per update.
        normalise: what the clients did to images in [0, 1]: none, imagenet, or mean/std as 0.5/0.5.
        defence: the defence that the clients used, or "" if it is not known.
        public_data: a data set whose first test images are of the same kind, or "".
        class_averages: an .npz file with the mean image of each class as ``images`` (classes, C, H, W), or "".
        algorithm: fedavg or fedsgd; this and the following describe local training, see `LocalSettings`.
        epochs: local epochs; without this and ``batch_size`` an update is one step on all images.
        batch_size: images per local step; 0 means all of them.
        momentum: momentum of local SGD.
        nesterov: whether it is Nesterov momentum.
        weight_decay: L2 penalty.
        batch_norm: average, local or freeze.
        optimiser: sgd, adam or adamw.
        betas: of Adam.
        eps: of Adam.
        accumulate: batches whose gradients are averaged for one step.
        clip_norm: largest norm of a step's gradient; 0 does not clip.
        label_smoothing: share of each label that is spread over all classes.
        reduction: mean or sum of the losses of a step's images.
        dropout: on or off.
    """

    model: str
    shape: tuple[int, ...]
    num_classes: int
    kind: str
    lr: float | None = None
    num_examples: int | None = None
    labels: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    normalise: str = "none"
    defence: str = ""
    public_data: str = ""
    class_averages: str = ""
    algorithm: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    weight_decay: float | None = None
    batch_norm: str | None = None
    optimiser: str | None = None
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    accumulate: int | None = None
    clip_norm: float | None = None
    label_smoothing: float | None = None
    reduction: str | None = None
    dropout: str | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ConfigError(f"shape must be channels, height and width, e.g. [1, 28, 28], got {list(self.shape)}.")
        if math.prod(self.shape) > MOST_VALUES:
            raise ConfigError(
                f"shape must be of an image with at most {MOST_VALUES:,} values, got {list(self.shape)}. Correct it."
            )
        in_range("num_classes", self.num_classes, 1)
        in_range("num_classes", self.num_classes, high=MAX_CLASSES)
        one_of("kind", self.kind, ["change", "weights", "gradient"])
        if self.kind != "gradient" and self.lr is None:
            raise ConfigError(
                f"lr must be the clients' learning rate if kind is {self.kind!r}, got none. Add a line: lr = ..."
            )
        if self.num_examples is not None:
            in_range("num_examples", self.num_examples, 1)
            in_range("num_examples", self.num_examples, high=MOST_EXAMPLES)
        lists = [row if isinstance(row, tuple) else (row,) for row in self.labels or ()]
        if self.labels is not None and (not lists or len({len(row) for row in lists}) != 1 or not lists[0]):
            raise ConfigError(f"labels must be a list, or lists of one length, got {_short(self.labels)}.")
        count = len(lists) if lists and not isinstance((self.labels or ())[0], tuple) else len(lists[0]) if lists else 0
        if self.labels is not None and (self.num_examples or 1) > 1 and count != self.num_examples:
            raise ConfigError(
                f"labels must be those of the {self.num_examples} images of num_examples, got {count}. Correct one of "
                "them, or leave it out."
            )
        for label in [label for row in lists for label in row]:
            in_range("labels", label, 0, self.num_classes - 1)
        given = [name for name in _LOCAL if getattr(self, name) is not None]
        several = [name for name in given if name not in _SINGLE]
        if several and self.epochs is None and self.batch_size is None:
            raise ConfigError(
                f"{several[0]} is of several local steps, which need epochs or batch_size, got neither. "
                "A single step on all images is epochs = 1, batch_size = 0."
            )
        odd = "momentum" if self.momentum else "optimiser" if self.optimiser not in (None, "sgd") else ""
        if self.kind == "gradient" and odd:
            raise ConfigError(
                f'{odd} is of the step after the gradient, got {getattr(self, odd)!r} with kind = "gradient". '
                'Leave it out, or give the change of the weights: kind = "change".'
            )
        self._training()
        self.local_steps()

    def local_steps(self) -> LocalSettings | None:
        """Return how the clients trained, or None for a single step of plain SGD on all of their images."""
        local: dict[str, Any] = {name: getattr(self, name) for name in _LOCAL if getattr(self, name) is not None}
        if not local:
            return None
        if self.epochs is None and self.batch_size is None:
            local |= {"epochs": 1, "batch_size": 0}
        usual = asdict(LocalSettings(), dict_factory=dict)
        if local.get("algorithm") == "fedsgd":  # its single step has no momentum
            local |= {"momentum": 0.0, "nesterov": False}
        return LocalSettings(**usual | local)

    def _training(self) -> TrainSettings:
        """Return the same facts as settings of a training, which checks those that it has."""
        shared = [name for name in _LOCAL if name in {field.name for field in dataclasses.fields(TrainSettings)}]
        usual = {name: getattr(LocalSettings(), name) for name in shared}
        local: dict[str, Any] = {name: getattr(self, name) for name in shared if getattr(self, name) is not None}
        names: dict[str, Any] = {
            "model": self.model,
            "defence": self.defence or "none",
            "lr": 1.0 if self.lr is None else self.lr,
        }
        return TrainSettings(**{**usual, **names, **local})

    def resolved(self) -> "UpdateSpec":
        """Return the specification with derived values filled in and absolute paths of the user's own files."""
        settings = with_absolute_paths(self._training())
        how = self.local_steps()
        first = self.labels[0] if self.labels else None
        count = len(first) if isinstance(first, tuple) else len(self.labels or ()) or None
        return replace(
            self,
            **({} if how is None else asdict(how)),
            model=settings.model,
            defence=settings.defence if self.defence else "",
            public_data=absolute_dataset(self.public_data) if self.public_data else "",
            class_averages=absolute_path(self.class_averages),
            lr=settings.lr,
            num_examples=count if self.num_examples is None else self.num_examples,
        )


def _short(labels: Sequence[object], most: int = 12) -> str:
    """Return labels as text, only the first of many.

    Example:
        >>> _short(range(5_000), most=3)
        '[0, 1, 2, ...] (5,000)'
    """
    shown = ", ".join(map(str, labels[:most]))
    return f"[{shown}]" if len(labels) <= most else f"[{shown}, ...] ({len(labels):,})"


def read_spec(path: Path) -> UpdateSpec:
    """Return the specification in a TOML file, resolved; an unknown key is an error with a did-you-mean.

    The file may come from elsewhere, so that it must not name Python files, see `gradveil.config.refuse_code`.
    """
    values = read_settings(path)
    refuse_code(values, path)
    return make_spec(values, str(path))


def make_spec(given: Mapping[str, object], source: str) -> UpdateSpec:
    """Return the specification with these values, resolved; ``source`` tells in errors where they are from."""
    values = convert(UpdateSpec, given, owner="the specification")
    needed = [field.name for field in dataclasses.fields(UpdateSpec) if field.default is dataclasses.MISSING]
    lacking = [name for name in needed if name not in values]
    if lacking:
        raise ConfigError(
            f"{source} must state {', '.join(needed)}, got no {' and no '.join(lacking)}. Add {' and '.join(lacking)}."
        )
    return UpdateSpec(**values).resolved()
