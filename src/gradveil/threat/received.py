"""Updates from elsewhere: tensors that any framework saved become an `Observation`."""

import copy
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from gradveil.errors import ConfigError
from gradveil.federated.protocol import ONE_GRADIENT, Protocol
from gradveil.threat.first_step import behind_first_step
from gradveil.threat.knowledge import Knowledge, Known, ThreatModel
from gradveil.threat.model import Observation, Script
from gradveil.validate import in_range, one_of

MOST_EXAMPLES = 100_000
"""More images than any attack here can search."""
Arrays = Mapping[str, Tensor | ArrayLike]


def received(
    network: nn.Module,
    updates: Arrays | Sequence[Arrays],
    *,
    shape: tuple[int, int, int],
    num_classes: int,
    kind: str = "change",
    lr: float = 1.0,
    num_examples: int | None = None,
    known: Known | None = None,
) -> Observation:
    """Return updates of one model as an `Observation`. Each fact that is given counts as known to the attacker.

    Args:
        network: the model as the clients received it; not changed.
        updates: one client's tensors by parameter name, or a list of several clients' tensors. They may include changed
            running statistics of BatchNorm.
        shape: (C, H, W) of an image.
        num_classes: of the task.
        kind: ``change`` (weights after minus weights before) or ``gradient``.
        lr: the clients' learning rate, for changes.
        num_examples: number of images behind each update.
        known: what else the attacker knows: labels, local training (by default a single step on all images, with
            BatchNorm frozen unless all updates changed its running statistics), the defence, public data, class
            averages, batch statistics.

    Raises:
        ConfigError: if a tensor is missing, unknown or of the wrong shape, or the facts contradict each other.

    Example:
        >>> update = {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}
        >>> received(nn.Linear(4, 2), update, shape=(1, 2, 2), num_classes=2, num_examples=1).threat.names
        ['num-examples']
    """
    known = known or Known()
    one_of("kind", kind, ["change", "gradient"])
    in_range("lr", lr, 0, open_low=True)
    in_range("num_classes", num_classes, 1)
    _check_shapes(shape, num_classes, known)
    _check_num_examples(num_examples)
    steps = _num_steps(known, kind, num_examples)
    parameters = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError("The network must have parameters that require a gradient, got none.")
    parts = [_fitting(network, client, number) for number, client in enumerate(_clients(updates))]
    buffers = [name for name in parts[0] if name not in parameters and all(name in part for part in parts)]
    changes = {name: torch.stack([part[name] for part in parts]) for name in parameters}
    facts = _facts(known, num_examples, num_classes, len(parts), like=parts[0][parameters[0]])
    return Observation(
        network=copy.deepcopy(network).eval(),
        updates=_as_steps(changes, network, known, kind, lr, steps),
        buffers={name: torch.stack([part[name] for part in parts]) for name in buffers},
        shape=shape,
        num_classes=num_classes,
        single_step=steps == 1,
        threat=ThreatModel(frozenset(facts)),
        script=_script(network, known, lr),
        _facts=facts,
        _step_size=lr,
        _batch_norm=None if known.local_steps is None else known.local_steps.batch_norm,
        _dropout="off",
    )


def _as_steps(
    found: dict[str, Tensor], network: nn.Module, known: Known, kind: str, lr: float, steps: int
) -> dict[str, Tensor]:
    """Return the changes of weights that attacks search: of a first step of Adam, those that SGD would have made."""
    if kind == "gradient":
        return {name: tensor * -lr for name, tensor in found.items()}
    if steps == 1 and known.local_steps is not None and known.local_steps.is_adam:
        gradients = behind_first_step(found, network, known.local_steps, lr)
        return {name: gradient * -lr for name, gradient in gradients.items()}
    return found


def _script(network: nn.Module, known: Known, lr: float) -> Script | None:
    """Return what it takes to play the round again, or None if the defence changed the network that was received."""
    if known.defence is not None and known.defence.overrides("on_model"):
        return None
    return Script(copy.deepcopy(network), Protocol(known.local_steps or ONE_GRADIENT, lr))


def _clients(updates: Arrays | Sequence[Arrays]) -> list[Arrays]:
    """Return the updates as a list with one entry per client."""
    clients = [updates] if isinstance(updates, Mapping) else list(updates)
    if not clients or not all(isinstance(client, Mapping) for client in clients):
        raise ConfigError(
            "updates must be tensors by name, or a list of these for at least one client, got none. "
            "Pass a dict of tensors, e.g. a state_dict."
        )
    return clients


def _check_shapes(shape: tuple[int, int, int], num_classes: int, known: Known) -> None:
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(f"shape must be channels, height and width, e.g. (1, 28, 28), got {shape}.")
    wanted = (num_classes, *shape)
    if known.class_averages is not None and tuple(known.class_averages.shape) != wanted:
        raise ConfigError(f"class_averages must have shape {wanted}, got {tuple(known.class_averages.shape)}.")


def _check_num_examples(num_examples: int | None) -> None:
    if num_examples is not None:
        in_range("num_examples", num_examples, 1, MOST_EXAMPLES)
        if not isinstance(num_examples, int):
            raise ConfigError(f"num_examples must be a whole number, got {num_examples}.")


def _num_steps(known: Known, kind: str, num_examples: int | None) -> int:
    """Return the number of local steps. Raise if they contradict the kind of update or the number of images."""
    how = known.local_steps
    if how is None:
        return 1
    if how.algorithm == "fedsgd" and how.batch_size not in (0, num_examples):
        raise ConfigError(f"batch_size of fedsgd must be num_examples, or 0 for all, got {how.batch_size}.")
    steps = how.num_steps(num_examples or 1)
    if steps > 1 and num_examples is None:
        raise ConfigError("num_examples must be given with local_steps of several steps, got None.")
    if steps > 1 and kind == "gradient":
        raise ConfigError(f"A gradient comes from one step, got local_steps of {steps}. Give kind='change'.")
    return steps


def _facts(
    known: Known, num_examples: int | None, num_classes: int, targets: int, like: Tensor
) -> dict[Knowledge, object]:
    """Return the facts that were given; batch statistics in the type and on the device of ``like``."""
    labels = None if known.labels is None else torch.as_tensor(known.labels)
    statistics = known.batch_statistics
    facts: dict[Knowledge, object] = {
        Knowledge.LABELS: _checked_labels(labels, targets, num_examples, num_classes),
        Knowledge.NUM_EXAMPLES: num_examples if labels is None else labels.shape[-1],
        Knowledge.LOCAL_STEPS: known.local_steps,
        Knowledge.DEFENCE: known.defence,
        Knowledge.PUBLIC_DATA: known.public_data,
        Knowledge.CLASS_AVERAGES: known.class_averages,
        Knowledge.BATCH_STATISTICS: None
        if statistics is None
        else {name: tuple(tensor.to(like) for tensor in pair) for name, pair in statistics.items()},
    }
    return {knowledge: fact for knowledge, fact in facts.items() if fact is not None}


def _fitting(network: nn.Module, update: Arrays, number: int) -> dict[str, Tensor]:
    """Return the update's floating-point tensors in the network's type and on its device. Raise if they do not fit."""
    parameters = dict(network.named_parameters(remove_duplicate=False))  # a state_dict lists tied ones under each name
    buffers = {name: buffer for name, buffer in network.named_buffers() if buffer.is_floating_point()}
    wanted = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    allowed = {**parameters, **dict(network.named_buffers())}
    missing, extra = sorted(wanted - set(update)), sorted(set(update) - set(allowed))
    if missing or extra:
        found = [f"lacks {_some(missing)}"] * bool(missing) + [f"has unknown {_some(extra)}"] * bool(extra)
        close = get_close_matches(extra[0], allowed, n=1, cutoff=0.5) if extra else []
        hint = f" Did you mean {close[0]!r} by {extra[0]!r}?" if close else ""
        raise ConfigError(f"Update {number} must have the model's parameters; it {' and '.join(found)}.{hint}")
    fitting = {}
    for name in [name for name in allowed if name in update and (name in wanted or name in buffers)]:
        try:
            tensor = torch.as_tensor(update[name]).detach().to(allowed[name])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{name!r} of update {number} must be an array of numbers, got: {error}.") from error
        if tensor.shape != allowed[name].shape:
            raise ConfigError(
                f"{name!r} of update {number} must have shape {tuple(allowed[name].shape)} as in the model, "
                f"got {tuple(tensor.shape)}."
            )
        fitting[name] = tensor
    return fitting


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _checked_labels(labels: Tensor | None, targets: int, num_examples: int | None, num_classes: int) -> Tensor | None:
    """Return the labels as (T, B), sorted, as their order is unknown."""
    if labels is None:
        return None
    rows = labels.expand(targets, -1) if labels.dim() == 1 else labels
    if rows.dim() != 2 or len(rows) != targets or (num_examples is not None and rows.shape[1] != num_examples):
        wanted = f"({targets}, {num_examples or 'examples'})"
        raise ConfigError(f"labels must have shape {wanted}, got {tuple(labels.shape)}.")
    if rows.is_floating_point() or bool((rows < 0).any()) or bool((rows >= num_classes).any()):
        raise ConfigError(
            f"labels must be whole numbers from 0 to {num_classes - 1}, got {sorted(set(rows.flatten().tolist()))}."
        )
    return rows.long().sort(1).values
