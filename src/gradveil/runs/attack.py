"""Attack updates that any framework saved as files; write pictures and numbers to a folder."""

import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import Tensor, nn

from gradveil.attacks import Attack, build_attack
from gradveil.attacks.parts.countermoves import countermoves
from gradveil.data import load_dataset
from gradveil.data.arrays import read_arrays
from gradveil.data.pixels import to_batch, to_unit
from gradveil.defences import build_defence
from gradveil.engines.devices import defended
from gradveil.engines.run_folder import RunFolder, to_lines
from gradveil.engines.simulation import check_output, usable_device
from gradveil.errors import ConfigError, DataError, RunFolderError, TrainingError
from gradveil.metrics import align, schema_of, score_targets
from gradveil.metrics.columns import STANDARD
from gradveil.models import create_model, load_weights
from gradveil.models.base import has_room, parse_normalisation
from gradveil.randomness import stream
from gradveil.report.pictures import strip_png
from gradveil.rows import Schema
from gradveil.runs.update_spec import UpdateSpec
from gradveil.storage import load_tensors, read_metadata, to_safetensors, write_atomic
from gradveil.threat import Known, Observation, Reconstruction
from gradveil.threat.received import received
from gradveil.threat.seen import hold_private
from gradveil.types import Batch
from gradveil.validate import in_range, is_file

PUBLIC_IMAGES = 500
"""An attack is given at most this many public images."""
PICKLED = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt")


@dataclass(frozen=True)
class Scoring:
    """How guesses are scored.

    Attributes:
        truth: an .npz file with the private ``images``, or None for no scores; the attack never sees it.
        metrics: the metrics to compute, by name or as ``file.py:Class``.
    """

    truth: Path | None = None
    metrics: tuple[str, ...] = STANDARD

    def __post_init__(self) -> None:
        if not self.metrics:
            raise ConfigError("metrics must name at least one, got an empty list. Add --metrics with a name.")
        _ = self.schema  # raises if a metric is unknown, or if two have the same field

    @property
    def schema(self) -> Schema:
        """The columns of the rows, those of the metrics included."""
        return schema_of(self.metrics)


def attack_files(
    model_file: Path,
    updates: Sequence[Path],
    spec: UpdateSpec,
    attack: str,
    out: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    scoring: Scoring = Scoring(),
) -> list[dict[str, Any]]:
    """Attack all updates at once; save settings, rows, images and reconstruction in ``out``, and return the rows.

    Everything is read and checked before the folder is made. The same files and arguments give the same rows, except
    for ``seconds``, which is each target's share of the total.

    Args:
        model_file: the weights that the server broadcast (safetensors).
        updates: one file per client, with tensors by parameter name (safetensors or .npz).
        spec: what is known about them.
        attack: an attack with its settings, ``name:key=value``.
        out: a folder that is new or empty.
        seed: seed of the attack's random draws.
        device: device on which the attack runs.
        scoring: the private images and the metrics, for scores.
    """
    in_range("seed", seed, 0, 2**63 - 1)
    spec = spec.resolved()
    chosen = build_attack(attack)
    _check_new(out)
    seen = _observe(spec, model_file, updates, usable_device(device))
    _check_needs(chosen, seen)
    truth = scoring.truth
    private = None if truth is None else _read_truth(truth, seen, spec.num_examples)
    settings = {
        "attack": chosen.spec,
        "seed": seed,
        "device": device,
        "model_file": str(model_file.resolve()),
        "updates": [str(path.resolve()) for path in updates],
        "truth": "" if truth is None else str(truth.resolve()),
        "metrics": list(scoring.metrics),
        "spec": {key: value for key, value in asdict(spec).items() if value is not None},
    }
    with RunFolder(out):
        started = time.perf_counter()
        try:
            result = chosen(seen, stream(seed, "attack"))
        except RuntimeError as error:  # torch's own, e.g. out of memory, or a layer that it can't differentiate
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise TrainingError(f"The attack failed while running: {first}. Nothing was saved.") from error
        share = (time.perf_counter() - started) / seen.num_targets
        facts = {
            "defence": spec.defence or "unknown",
            "attack": chosen.spec,
            "adaptive": bool(countermoves(seen)) and getattr(chosen, "adapt", "none") != "none",
            "seed": seed,
            "seconds": round(share, 3),
        }
        rows = [
            scoring.schema.row("attack", facts | _found(seen, result, target, private, scoring))
            for target in range(seen.num_targets)
        ]
        pictures = {f"images/target-{target}.png": strip_png(guess) for target, guess in enumerate(result.images)}
        tensors = {"images": result.images, "labels": result.labels}
        files = {
            "settings.toml": tomli_w.dumps(settings).encode(),
            "reconstruction.safetensors": to_safetensors(tensors, {"attack": chosen.spec, "seed": str(seed)}),
            **pictures,
            "rows.jsonl": to_lines(rows),  # last: if it exists, all files exist
        }
        for name, content in files.items():
            write_atomic(out / name, content)
    return rows


def read_update(path: Path) -> dict[str, Tensor]:
    """Return a client's tensors by name, from safetensors or .npz; pickled files are never opened."""
    _check_file(path)
    return _read_arrays(path) if path.suffix.lower() == ".npz" else load_tensors(path)


def _observe(spec: UpdateSpec, model_file: Path, updates: Sequence[Path], device: torch.device) -> Observation:
    """Return what the files and the specification show a server."""
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
    try:
        load_weights(network, model_file, defence.private if defence else lambda _: False)
    except ConfigError as error:
        raise ConfigError(f"{error}{_other_defence(model_file, spec.defence)}") from error
    check_output(network.to(device), shape, spec.num_classes, device)
    return received(
        network,
        [read_update(path) for path in updates],
        shape=shape,
        num_classes=spec.num_classes,
        kind=spec.kind,
        lr=1.0 if spec.lr is None else spec.lr,
        num_examples=spec.num_examples,
        known=Known(
            public_data=_public(spec.public_data, shape, device) if spec.public_data else None,
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


def _public(dataset: str, shape: tuple[int, int, int], device: torch.device) -> Batch:
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


def _check_new(out: Path) -> None:
    with suppress(OSError):  # what is no folder, `RunFolder` refuses
        found = sorted(entry.name for entry in out.iterdir() if entry.name != ".lock")
        if found:
            raise RunFolderError(f"{out} must be new or empty, got a folder with {found[0]!r}. Choose another --out.")


def _check_needs(attack: Attack, seen: Observation) -> None:
    needs = attack.needs_for(single_step=seen.single_step)
    lacking = sorted(knowledge.value.replace("-", "_") for knowledge in needs - seen.threat.knows)
    if lacking:
        raise ConfigError(f"Attack {attack.name!r} needs {', '.join(lacking)}, got none. State it in the --spec file.")


def _check_file(path: Path) -> None:
    if path.suffix.lower() in PICKLED:
        raise ConfigError(
            f"{path} must be a safetensors file, got a pickled one ({path.suffix}), which can run code and is never "
            f"opened. Where it was made, convert it: safetensors.torch.save_file(tensors_by_name, "
            f"{path.with_suffix('.safetensors').name!r})."
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


def _read_truth(path: Path, seen: Observation, num_examples: int | None) -> Tensor:
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


def _found(
    seen: Observation, result: Reconstruction, target: int, private: Tensor | None, scoring: Scoring
) -> dict[str, Any]:
    """Return what the attack found for one target, with scores if the truth is known."""
    figures: dict[str, float | None] = {column.key: None for column in scoring.schema.metrics}
    missing = ["no truth was given"]
    if private is not None:
        guess = align(private[target], result.images[target].cpu())
        measured, more = score_targets(private[None, target], guess[None], metrics=scoring.metrics)
        figures |= measured[0]
        missing = more[0]
    return {
        "target": target,
        **figures,
        "converged": bool(result.converged[target]),
        "attacker_loss": _number(float(result.loss[target])),
        "knows": seen.threat.names,
        "labels": result.labels[target].tolist(),
        "why": result.why[target] if result.why else "",
        "unmeasured": missing,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
