"""Updates that arrived from somewhere else: what any framework saved becomes what an attack looks at."""

import copy
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from gradveil.defences.base import Defence
from gradveil.errors import ConfigError
from gradveil.federated.protocol import LocalSettings
from gradveil.threat import Knowledge, Observation, ThreatModel
from gradveil.types import Batch
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
    labels: Tensor | ArrayLike | None = None,
    local_steps: LocalSettings | None = None,
    defence: Defence | None = None,
    public_data: Batch | None = None,
    class_averages: Tensor | None = None,
    batch_statistics: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Observation:
    """Wrap updates of one model as an `Observation`. Each fact that is given counts as known to the attacker.

    Args:
        network: the model as it was when the clients received it; left as it is.
        updates: one client's tensors by parameter name, or several clients'. Changed running statistics of BatchNorm
            may be among them.
        shape: (C, H, W) of an image.
        num_classes: of the task.
        kind: ``change`` (weights after minus weights before) or ``gradient``.
        lr: the clients' learning rate, for changes.
        num_examples: images behind each update.
        labels: (B,) or (T, B) their labels.
        local_steps: how the clients trained; by default a single step on all of their images.
        defence: what the clients ran.
        public_data: images from elsewhere.
        class_averages: (classes, C, H, W).
        batch_statistics: mean and variance (T, channels) of the private batch by the name of the BatchNorm layer.

    Raises:
        ConfigError: where a tensor is missing, unknown or of the wrong shape, or the facts contradict each other.
    """
    one_of("kind", kind, ["change", "gradient"])
    in_range("lr", lr, 0, open_low=True)
    clients = [updates] if isinstance(updates, Mapping) else list(updates)
    if not clients or not all(isinstance(client, Mapping) for client in clients):
        raise ConfigError("updates must be tensors by name, or a list of such for at least one client, got none.")
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigError(f"shape must be channels, height and width, e.g. (1, 28, 28), got {shape}.")
    in_range("num_classes", num_classes, 1)
    if num_examples is not None:
        in_range("num_examples", num_examples, 1, MOST_EXAMPLES)
        if not isinstance(num_examples, int):
            raise ConfigError(f"num_examples must be a whole number, got {num_examples}.")
    if (
        local_steps is not None
        and local_steps.algorithm == "fedsgd"
        and local_steps.batch_size not in (0, num_examples)
    ):
        raise ConfigError(f"batch_size of fedsgd must be num_examples, or 0 for all, got {local_steps.batch_size}.")
    labels = None if labels is None else torch.as_tensor(labels)
    if class_averages is not None and tuple(class_averages.shape) != (num_classes, *shape):
        wanted = (num_classes, *shape)
        raise ConfigError(f"class_averages must have shape {wanted}, got {tuple(class_averages.shape)}.")
    steps = 1 if local_steps is None else local_steps.num_steps(num_examples or 1)
    if steps > 1 and num_examples is None:
        raise ConfigError("num_examples must be given with local_steps of several steps, got None.")
    if steps > 1 and kind == "gradient":
        raise ConfigError(f"A gradient comes from one step, got local_steps of {steps}. Give kind='change'.")
    parameters = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    if not parameters:
        raise ConfigError("The network must have parameters that require a gradient, got none.")
    parts = [_fitting(network, client, number) for number, client in enumerate(clients)]
    factor = -lr if kind == "gradient" else 1.0
    facts: dict[Knowledge, object] = {
        Knowledge.LABELS: _checked_labels(labels, len(clients), num_examples, num_classes),
        Knowledge.NUM_EXAMPLES: num_examples if labels is None else labels.shape[-1],
        Knowledge.LOCAL_STEPS: local_steps,
        Knowledge.DEFENCE: defence,
        Knowledge.PUBLIC_DATA: public_data,
        Knowledge.CLASS_AVERAGES: class_averages,
        Knowledge.BATCH_STATISTICS: None
        if batch_statistics is None
        else {name: tuple(t.to(parts[0][parameters[0]]) for t in pair) for name, pair in batch_statistics.items()},
    }
    given = {knowledge: fact for knowledge, fact in facts.items() if fact is not None}
    buffers = [name for name in parts[0] if name not in parameters and all(name in part for part in parts)]
    return Observation(
        network=copy.deepcopy(network).eval(),
        updates={name: torch.stack([part[name] for part in parts]) * factor for name in parameters},
        buffers={name: torch.stack([part[name] for part in parts]) for name in buffers},
        shape=shape,
        num_classes=num_classes,
        single_step=steps == 1,
        threat=ThreatModel(frozenset(given)),
        _facts=given,
        _step_size=lr,
    )


def _fitting(network: nn.Module, update: Arrays, number: int) -> dict[str, Tensor]:
    """The update's floating-point tensors in the network's type and place; an error where they do not fit it."""
    parameters = dict(network.named_parameters(remove_duplicate=False))  # a state_dict has tied ones under each name
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
    """(T, B), sorted, since their order says nothing."""
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
