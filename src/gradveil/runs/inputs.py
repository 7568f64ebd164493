"""The files that an attack starts from: a model, clients' tensors, public and private images, of any framework.

Weights and updates are safetensors, .npz, or torch's own files, of which only tensors are read (``weights_only``).
"""

import json
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.data import load_dataset
from gradveil.data.arrays import read_arrays
from gradveil.data.pixels import to_batch, to_unit
from gradveil.defences import Defence, build_defence
from gradveil.engines.devices import defended
from gradveil.engines.simulation import check_output
from gradveil.errors import ConfigError, DataError
from gradveil.models import create_model, load_weights
from gradveil.models.base import has_room, parse_normalisation
from gradveil.models.weights import fill
from gradveil.runs.update_spec import UpdateSpec
from gradveil.storage import load_tensors, read_metadata
from gradveil.threat import Known, Observation
from gradveil.threat.received import received
from gradveil.threat.seen import hold_private
from gradveil.types import Batch
from gradveil.validate import is_file

PUBLIC_IMAGES = 500
"""An attack is given at most this many public images."""
TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Endings of torch's own files."""
PICKLED = (".pkl", ".pickle")
"""Endings of files that are never opened."""
INSIDE = ("state_dict", "model_state_dict", "model", "net")
"""Where a checkpoint may hold the model's tensors beside other things."""
PREFIXES = ("module.", "_orig_mod.", "model.")
"""What wrappers put before the names of a model's tensors."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return tensors by name, from safetensors, .npz or a torch file; nothing in a file is ever run."""
    _check_file(path)
    ending = path.suffix.lower()
    if ending == ".npz":
        return _read_arrays(path)
    return _read_torch(path) if ending in TORCH else load_tensors(path)


def _read_torch(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a torch file. Raise DataError if it holds anything but tensors and plain values."""
    if not zipfile.is_zipfile(path):
        raise DataError(
            f"{path} must be a torch file of tensors (torch.save of a state_dict, torch 1.6 or later), got another "
            "kind of pickle, which is never opened. Save model.state_dict() again."
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, KeyError, EOFError, AttributeError) as error:
        forbidden = re.search(r"GLOBAL (\S+)", str(error))
        what = forbidden[1][:100] if forbidden else f"what torch does not read ({type(error).__name__})"
        raise DataError(
            f"{path} must hold tensors and plain values only, for no code in it is run, got {what}. "
            "Save model.state_dict() alone: torch.save(model.state_dict(), path)."
        ) from error
    inner = next(
        (found[key] for key in INSIDE if isinstance(found, Mapping) and isinstance(found.get(key), Mapping)), found
    )
    if not isinstance(inner, Mapping):
        raise DataError(f"{path} must hold tensors by name, got {type(inner).__name__}. Save model.state_dict().")
    tensors = {str(name): value for name, value in inner.items() if isinstance(value, Tensor)}
    if not tensors:
        raise DataError(f"{path} must hold tensors by name, got none. Save model.state_dict().")
    return tensors


def named(tensors: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return tensors under the network's own names: without a wrapper's prefix, and unnamed arrays by their order.

    Frameworks such as Flower save the values of ``model.state_dict()`` as a list, which numpy calls arr_0, arr_1, ...
    """
    wanted = list(network.state_dict())
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in tensors) and not any(name.startswith(prefix) for name in wanted):
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if set(tensors) == {f"arr_{number}" for number in range(len(tensors))}:
        trained = [name for name, _ in network.named_parameters()]
        for names in (wanted, trained):
            if len(names) == len(tensors):
                return {name: tensors[f"arr_{number}"] for number, name in enumerate(names)}
    return dict(tensors)


def read_sent(path: Path, network: nn.Module, spec: UpdateSpec) -> dict[str, Tensor]:
    """Return what a client sent, by the network's names: a change or a gradient; whole weights become their change."""
    sent = named(read_tensors(path), network)
    if spec.kind != "weights":
        return sent
    before = network.state_dict()
    unlike = [name for name, tensor in sent.items() if name in before and before[name].shape != tensor.shape]
    if unlike:
        raise ConfigError(
            f"{unlike[0]} of {path} must have the shape of the model's, got {tuple(sent[unlike[0]].shape)}."
        )
    return {
        name: tensor.to(before[name]) - before[name] if name in before else tensor
        for name, tensor in sent.items()
        if tensor.is_floating_point()
    }


def load_network(spec: UpdateSpec, model_file: Path, device: torch.device) -> tuple[nn.Module, Defence | None]:
    """Return the network with the weights of a file, and the stated defence, or None if none is stated."""
    channels, height, width = spec.shape
    shape = (channels, height, width)
    defence = build_defence(spec.defence) if spec.defence else None
    _check_file(model_file)
    _check_size(spec, shape, model_file)
    network: nn.Module = create_model(
        spec.model, shape, spec.num_classes, seed=0, normalisation=parse_normalisation(spec.normalise, channels)
    )
    if defence is not None:
        network = defended(network, defence, 0, "server")
        hold_private(network, defence)
    private = defence.private if defence else lambda _: False
    try:
        if model_file.suffix.lower() in (*TORCH, ".npz"):
            fill(network, named(read_tensors(model_file), network), model_file, private)
        else:
            load_weights(network, model_file, private)
    except ConfigError as error:
        raise ConfigError(f"{error}{_other_defence(model_file, spec.defence)}") from error
    check_output(network.to(device), shape, spec.num_classes, device)
    return network, defence


def observe_files(spec: UpdateSpec, model_file: Path, updates: Sequence[Path], device: torch.device) -> Observation:
    """Return what the files and the specification show a server."""
    network, defence = load_network(spec, model_file, device)
    channels, height, width = spec.shape
    shape = (channels, height, width)
    return received(
        network,
        [read_sent(path, network, spec) for path in updates],
        shape=shape,
        num_classes=spec.num_classes,
        kind="gradient" if spec.kind == "gradient" else "change",
        lr=1.0 if spec.lr is None else spec.lr,
        num_examples=spec.num_examples,
        known=Known(
            public_data=public_images(spec.public_data, shape, device) if spec.public_data else None,
            class_averages=_averages(spec, shape).to(device) if spec.class_averages else None,
            labels=None if spec.labels is None else torch.tensor(spec.labels),
            local_steps=spec.local_steps(),
            defence=defence,
        ),
    )


def _check_size(spec: UpdateSpec, shape: tuple[int, int, int], model_file: Path) -> None:
    """Raise ConfigError before any memory is taken if a large model has more numbers than its file has bytes."""
    given = model_file.stat().st_size
    if not has_room(spec.model, shape, spec.num_classes, given):
        raise ConfigError(
            f"model must be that of {model_file}, got {spec.model!r} with more numbers than the file's {given:,} "
            "bytes. Check the model, its settings, the shape and the number of classes."
        )


def _other_defence(model_file: Path, given: str) -> str:
    """Return a hint if a file's metadata name another defence than the one given, or ""."""
    with suppress(DataError):
        saved = read_metadata(model_file).get("defence", "")
        if saved and saved != (given or "none"):
            return f" The file was saved under defence {saved!r}: put `defence = {json.dumps(saved)}` into the spec."
    return ""


def public_images(dataset: str, shape: tuple[int, int, int], device: torch.device) -> Batch:
    """Return the first test images of a data set."""
    there = load_dataset(dataset)
    if there.shape != shape:
        raise ConfigError(f"public_data must be images of shape {shape}, got {there.shape} in {dataset!r}.")
    return to_batch(there.test.images[:PUBLIC_IMAGES], there.test.labels[:PUBLIC_IMAGES]).to(device)


def _averages(spec: UpdateSpec, shape: tuple[int, int, int]) -> Tensor:
    """Return the mean image of each class, (classes, C, H, W) in [0, 1]."""
    path = Path(spec.class_averages)
    images = images_of(path)
    if tuple(images.shape) != (spec.num_classes, *shape):
        wanted = (spec.num_classes, *shape)
        raise DataError(f"images of {path} must be an image per class, {wanted}, got {tuple(images.shape)}.")
    return images.float()


def read_truth(path: Path, seen: Observation, num_examples: int | None) -> Tensor:
    """Return the private images (T, B, C, H, W) in [0, 1].

    The file may leave out B if each update has one image, and T if there is one update.
    """
    images, targets = images_of(path), seen.num_targets
    got = tuple(images.shape)
    if images.dim() == 4:
        images = images[None] if targets == 1 else images[:, None]
    fits = images.dim() == 5 and len(images) == targets and images.shape[2:] == seen.shape and len(images[0])
    if not fits or (num_examples and images.shape[1] != num_examples):
        size = f"({targets}, {num_examples or 'examples'}, {', '.join(map(str, seen.shape))})"
        raise DataError(f"images of {path} must have shape {size}, got {got}.")
    return images


def images_of(path: Path) -> Tensor:
    """Return the ``images`` of an .npz file as numbers in [0, 1]."""
    _check_file(path)
    arrays = _read_arrays(path)
    if "images" not in arrays:
        raise DataError(f"{path} must hold an array 'images', got {', '.join(arrays) or 'nothing'}.")
    images = to_unit(arrays["images"], torch.float64)
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise DataError(f"images of {path} must be bytes or numbers in [0, 1], got others. De-normalise them first.")
    return images


def _check_file(path: Path) -> None:
    if path.suffix.lower() in PICKLED:
        raise ConfigError(
            f"{path} must be safetensors, .npz or a torch file of tensors, got a pickled one ({path.suffix}), which "
            "can run code and is never opened. Where it was made, convert it: "
            f"safetensors.torch.save_file(tensors_by_name, {path.with_suffix('.safetensors').name!r})."
        )
    if not is_file(path):
        raise ConfigError(f"There is no file {str(path)!r}. Check the path.")


def _read_arrays(path: Path) -> dict[str, Tensor]:
    """Return the arrays of an .npz file; uint8 stays uint8, all other types become float64."""
    arrays = read_arrays(path, "an .npz file of arrays of numbers by name", widest=8)
    odd = next((name for name, array in arrays.items() if array.dtype.kind not in "fiub"), None)
    if odd is not None:
        raise DataError(
            f"{path} must be an .npz file of arrays of numbers by name, but it holds {odd} of type "
            f"{arrays[odd].dtype}. "
            "Save it again with numpy.savez; arrays of Python objects are not loaded."
        )
    return {
        name: torch.from_numpy(array.copy() if array.dtype == np.uint8 else array.astype(np.float64))
        for name, array in arrays.items()
    }
