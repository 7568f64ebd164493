"""BatchNorm statistics of guesses, and an attacker's estimate of those of the private batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.networks.watch import inputs_of
from gradveil.threat import Knowledge, Observation

Statistics = Mapping[str, tuple[Tensor, Tensor]]
"""Mean and variance (T, channels) at the input of each BatchNorm layer, by the layer's name."""


@contextmanager
def watched(network: nn.Module) -> Iterator[Callable[[int], Statistics]]:
    """Watch forward passes, and give a function that returns the last one's statistics for a number of groups."""
    with inputs_of(network, batch_norms(network)) as inputs:

        def statistics(groups: int) -> Statistics:
            found = {}
            for name, tensor in inputs.items():
                grouped = tensor.reshape(groups, -1, *tensor.shape[1:])  # (groups, B, channels, ...)
                rest = [axis for axis in range(grouped.dim()) if axis not in (0, 2)]
                variance, mean = torch.var_mean(grouped, rest, correction=0)
                found[name] = (mean, variance)
            return found

        yield statistics


def batch_norms(network: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers by name."""
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, _BatchNorm)}


def likely_statistics(seen: Observation) -> Statistics:
    r"""Return the likely statistics (T, channels) of each client's batch; empty without BatchNorm.

    These are the granted ones, if any. Otherwise they follow from changed running statistics: after one step with
    momentum m, a client sends :math:`m (\mu_{batch} - \mu_{running})`, which gives the batch's own (the variance up to
    a factor n / (n - 1)). Otherwise they are the running statistics of the broadcast network, which describe the
    training data as a whole (GradInversion), unless these were never trained.
    """
    if seen.knows(Knowledge.BATCH_STATISTICS):
        return seen.batch_statistics
    found = {}
    for name, layer in batch_norms(seen.network).items():
        if layer.running_mean is None or layer.running_var is None:
            continue
        mean, variance = (t.expand(seen.num_targets, -1) for t in (layer.running_mean, layer.running_var))
        changes = [seen.buffers.get(f"{name}.{key}") for key in ("running_mean", "running_var")]
        moved = [change for change in changes if change is not None and bool(change.any())]
        if len(moved) == 2 and seen.single_step and layer.momentum:
            found[name] = (mean + moved[0] / layer.momentum, variance + moved[1] / layer.momentum)
        elif bool(layer.running_mean.any()):
            found[name] = (mean, variance)
    return found
