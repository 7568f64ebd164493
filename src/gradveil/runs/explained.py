"""From the recorded steps of a training loop to the keys of a specification: optimiser, rhythm of batches, loss, modes.

Every function takes what was recorded and returns keys of `gradveil.runs.update_spec.UpdateSpec`, or raises
`UnexplainedError` with the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradveil.errors import UnexplainedError

CLOSE = 1e-3
"""Relative difference within which two recorded numbers count as equal."""


@dataclass(frozen=True)
class RecordedBatch:
    """One batch that contributed to a step.

    Attributes:
        images: what the model was given, (N, C, H, W).
        labels: (N,).
        num_classes: outputs of the model.
        smoothing: label smoothing of the loss.
        scale: what the gradient of the mean loss was multiplied by.
        training: whether each module was in training mode, by name.
        random: state of torch's generator before the forward pass, or None if it is not needed.
        keys: a short digest of each image.
    """

    images: Tensor
    labels: Tensor
    num_classes: int
    smoothing: float
    scale: float
    training: Mapping[str, bool]
    random: Tensor | None = None
    keys: tuple[bytes, ...] = ()


@dataclass
class RecordedStep:
    """One step of the optimiser.

    Attributes:
        batches: the batches since the last step.
        group: the settings of the optimiser's parameter group.
        norm: norm of the gradient with which the step was taken.
        factor: that norm over the norm of the gradient that backward left.
    """

    batches: list[RecordedBatch]
    group: dict[str, Any] = field(default_factory=dict)
    norm: float = 0.0
    factor: float = 1.0


def rhythm(steps: Sequence[Sequence[RecordedBatch]]) -> dict[str, int]:
    """Return epochs, batch_size, accumulate and num_examples of steps of batches.

    Epochs are recognised by a smaller last batch, or because the same images return; images that differ each time
    (augmentation) count as different images.
    """
    if len(steps) == 1:
        sizes = [len(batch.labels) for batch in steps[0]]
        if len({*sizes}) > 1:
            raise UnexplainedError(
                f"accumulated batches must be equally large, got {sizes[:8]}. Drop the last, smaller one."
            )
        one = {"epochs": 1, "batch_size": 0, "num_examples": sum(sizes)}
        return one if len(sizes) == 1 else one | {"batch_size": sizes[0], "accumulate": len(sizes)}
    fitting = [count for count in range(1, len(steps) + 1) if len(steps) % count == 0 and _is_regular(steps, count)]
    if not fitting:
        sizes = [sum(len(batch.labels) for batch in step) for step in steps]
        raise UnexplainedError(
            f"steps must be of equally many images, but for the last of an epoch, got {sizes[:8]}. Use one batch size."
        )
    returning = {count: _returning(steps, count) for count in fitting if count > 1}
    best = max(returning, key=lambda count: (returning[count], count), default=0)
    epochs = best if best and returning[best] >= 0.5 else min(fitting)
    once = steps[: len(steps) // epochs]
    found = {"epochs": epochs, "batch_size": len(once[0][0].labels)}
    found["num_examples"] = sum(len(batch.labels) for step in once for batch in step)
    return found if len(once[0]) == 1 else found | {"accumulate": len(once[0])}


def _is_regular(steps: Sequence[Sequence[RecordedBatch]], epochs: int) -> bool:
    """Return whether all epochs have the same batches by size, all alike but the last batch and the last step."""
    each = len(steps) // epochs
    sizes = [[len(batch.labels) for batch in step] for step in steps]
    first = sizes[:each]
    if any(sizes[start : start + each] != first for start in range(0, len(sizes), each)):
        return False
    flat = [size for step in first for size in step]
    full = all(len(step) == len(first[0]) for step in first[:-1]) and len(first[-1]) <= len(first[0])
    return full and all(size == flat[0] for size in flat[:-1]) and flat[-1] <= flat[0]


def _returning(steps: Sequence[Sequence[RecordedBatch]], epochs: int) -> float:
    """Return the share of the first epoch's images that come again in every other; images that it has twice count once.

    So of three batches that come twice, two epochs of three (1) fit better than three of two (1/2) or one of six.
    """
    each = len(steps) // epochs
    parts = [
        [key for step in steps[start : start + each] for batch in step for key in batch.keys]
        for start in range(0, len(steps), each)
    ]
    return min(len({*parts[0]} & {*part}) for part in parts[1:]) / max(1, len(parts[0]))


def optimiser_keys(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a torch optimiser's parameter group. Raise UnexplainedError if its steps can't be replayed."""
    odd = [key for key in ("amsgrad", "maximize", "dampening") if group.get(key)]
    if name not in ("SGD", "Adam", "AdamW") or odd:
        what = f"torch.optim.{name}" + (f" with {odd[0]}" if odd else "")
        raise UnexplainedError(
            f"The optimiser must be torch.optim.SGD, Adam or AdamW, got {what}, whose steps attacks can't replay. "
            'Record with one of these, or save one gradient and describe it with kind = "gradient".'
        )
    keys: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}
    if name == "SGD":
        return keys | {"momentum": float(group["momentum"]), "nesterov": bool(group["nesterov"])}
    betas = [float(beta) for beta in group["betas"]]
    return keys | {"optimiser": name.lower(), "betas": betas, "eps": float(group["eps"])}


def clipping(steps: Sequence[RecordedStep]) -> float:
    """Return the norm to which gradients were clipped between backward and step, or 0 if they never were."""
    cut = [step for step in steps if step.factor < 1 - CLOSE]
    if not cut:
        return 0.0
    norm = cut[0].norm
    alike = all(abs(step.norm - norm) <= CLOSE * norm for step in cut)
    below = all(step.norm <= norm * (1 + CLOSE) for step in steps)
    if not (alike and below):
        raise UnexplainedError(
            "Gradients must reach the optimiser as backward left them, or clipped to one norm, got other changes "
            f"(norms {', '.join(f'{step.norm:.4g}' for step in cut[:4])}). Leave the gradients alone, or clip by norm."
        )
    return norm


def loss_keys(steps: Sequence[RecordedStep], keys: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return label smoothing, and rate, decay, eps and clipping for the scale of the loss.

    A loss that is F times the mean over the step's images takes the steps of the mean loss with other settings:
    :math:`\eta (F g + \lambda w) = \eta F (g + \frac{\lambda}{F} w)`.
    """
    smoothings = {batch.smoothing for step in steps for batch in step.batches}
    if len(smoothings) > 1:
        raise UnexplainedError(f"All steps must have the same label smoothing, got {sorted(smoothings)}. Use one.")
    found: dict[str, Any] = {"label_smoothing": smoothings.pop()}
    scales = [sum(batch.scale for batch in step.batches) for step in steps]
    counts = [sum(len(batch.labels) for batch in step.batches) for step in steps]
    if all(abs(scale / count - 1) < CLOSE for scale, count in zip(scales, counts, strict=True)) and max(counts) > 1:
        return found | {"reduction": "sum"}
    if any(abs(scale / scales[0] - 1) > CLOSE for scale in scales):
        raise UnexplainedError(
            f"All steps must scale their loss alike, got factors {scales[:4]}. Divide by one number."
        )
    scale = scales[0]
    if abs(scale - 1) < CLOSE:
        return found
    found["clip_norm"] = keys.get("clip_norm", 0.0) / scale
    if keys.get("optimiser", "sgd") == "sgd":
        return found | {"lr": keys["lr"] * scale, "weight_decay": keys["weight_decay"] / scale}
    decay = keys["weight_decay"] / (1 if keys["optimiser"] == "adamw" else scale)
    return found | {"eps": keys["eps"] / scale, "weight_decay": decay}


def mode_keys(steps: Sequence[RecordedStep], norms: Sequence[str], dropouts: Sequence[str]) -> dict[str, str]:
    """Return batch_norm and dropout, from the modes of the modules with these names during the forward passes."""
    found: dict[str, str] = {}
    for key, names, words in (("batch_norm", norms, ("average", "freeze")), ("dropout", dropouts, ("on", "off"))):
        modes = {batch.training[name] for step in steps for batch in step.batches for name in names}
        if len(modes) > 1:
            raise UnexplainedError(
                f"Layers of {key} must all be in one mode, got both training and evaluation. Use one."
            )
        if modes:
            found[key] = words[0] if modes.pop() else words[1]
    return found


def pixel_range(steps: Sequence[RecordedStep]) -> tuple[str, str]:
    """Return ``normalise`` for inputs, and a note if it is inferred from the darkest and brightest values."""
    images = torch.cat([batch.images.detach().float().cpu() for step in steps for batch in step.batches])
    low, high = images.amin((0, 2, 3)), images.amax((0, 2, 3))
    if bool((low >= 0).all()) and bool((high <= 1).all()):
        return "none", ""
    spread = (high - low).clamp_min(1e-6)
    mean, std = (-low / spread).tolist(), (1 / spread).tolist()
    text = "/".join(",".join(f"{number:.6g}" for number in numbers) for numbers in (mean, std))
    return text, (
        "normalise is inferred: the darkest and the brightest input of each channel count as 0 and 1. "
        'If you know the mean and standard deviation, pass them: Recorder(..., normalise="0.5/0.5").'
    )
