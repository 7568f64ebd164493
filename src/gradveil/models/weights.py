"""Pretrained weights from safetensors files, which hold tensors only: loading one never runs code."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from gradveil.errors import ConfigError, DataError
from gradveil.storage import load_tensors

SHOWN = 3
"""Number of names of each kind that an error message shows."""


def load_weights(network: nn.Module, path: Path, private: Callable[[str], bool] = lambda _: False) -> None:
    """Load a safetensors file into a network, completely or not at all.

    Every parameter and buffer of the network must be in the file, with the same shape, and nothing else may be; only
    BatchNorm's counter ``num_batches_tracked``, which many files leave out, may be absent. Tensors whose name is
    ``private`` keep their values, and no file may hold them.
    """
    try:
        tensors = load_tensors(path)
    except DataError as error:
        raise ConfigError(
            f"Weights {str(path)!r} must be a readable safetensors file, got: {error.__cause__ or error}. "
            "Save others with safetensors.torch.save_file(model.state_dict(), path); pickled ones are never opened."
        ) from error
    fill(network, tensors, path, private)


def fill(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    path: Path,
    private: Callable[[str], bool] = lambda _: False,
) -> None:
    """Set a network's tensors to those of a file that was read, completely or not at all; see `load_weights`."""
    shared = {name: tensor for name, tensor in network.state_dict().items() if not private(name)}
    problems = misfits(shared, tensors)
    if problems:
        raise ConfigError(
            f"Weights {str(path)!r} must have the names and shapes of the network, got {'; '.join(problems)}. "
            "Check the model, its settings, the image's channels and the number of classes."
        )
    network.load_state_dict(tensors, strict=False)


def misfits(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """Return why ``given`` can't be loaded, one phrase per kind of problem; empty if it can."""
    missing = [name for name in wanted if name not in given and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in given if name not in wanted]
    shapes = [
        f"{name} {tuple(given[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted
        if name in given and given[name].shape != wanted[name].shape
    ]
    sorts = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes}
    return [f"{sort}: {_first(names)}" for sort, names in sorts.items() if names]


def _first(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
