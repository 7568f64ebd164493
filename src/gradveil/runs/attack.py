"""Attack updates that any framework saved as files; write pictures and numbers to a folder."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from torch import Tensor

from gradveil.attacks import Attack, build_attack
from gradveil.attacks.parts.countermoves import countermoves
from gradveil.engines.run_folder import RunFolder, to_lines
from gradveil.engines.simulation import usable_device
from gradveil.errors import ConfigError, RunFolderError, TrainingError
from gradveil.metrics import align, schema_of, score_targets
from gradveil.metrics.columns import STANDARD
from gradveil.randomness import stream
from gradveil.report.pictures import strip_png
from gradveil.rows import Schema
from gradveil.runs.diagnose import diagnose_files
from gradveil.runs.inputs import observe_files, read_truth
from gradveil.runs.update_spec import UpdateSpec
from gradveil.storage import to_safetensors, write_atomic
from gradveil.threat import Observation, Reconstruction
from gradveil.validate import in_range


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


def attack_files(  # noqa: PLR0913 - its arguments are the options of the command
    model_file: Path,
    updates: Sequence[Path],
    spec: UpdateSpec,
    attack: str,
    out: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    scoring: Scoring = Scoring(),
    told: Callable[[str], None] = lambda text: None,
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
        told: called with each diagnosis of an update before the attack starts.
    """
    in_range("seed", seed, 0, 2**63 - 1)
    spec = spec.resolved()
    chosen = build_attack(attack)
    _check_new(out)
    seen = observe_files(spec, model_file, updates, usable_device(device))
    diagnoses = _diagnosed(spec, model_file, updates)
    for path, found in zip(updates, diagnoses, strict=True):
        for text in found:
            told(f"{path}: {text}")
    _check_needs(chosen, seen)
    truth = scoring.truth
    private = None if truth is None else read_truth(truth, seen, spec.num_examples)
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
            scoring.schema.row("attack", facts | _found(seen, result, target, private, scoring, diagnoses[target]))
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


def _diagnosed(spec: UpdateSpec, model_file: Path, updates: Sequence[Path]) -> list[list[str]]:
    """Return what is wrong with each update, in words; the attack runs nevertheless."""
    try:
        return [list(map(str, found)) for found in diagnose_files(model_file, updates, spec)]
    except RuntimeError as error:  # a network that torch can't differentiate twice, or only on another device
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return [[f"the update could not be diagnosed: {first}"] for _ in updates]


def _found(
    seen: Observation,
    result: Reconstruction,
    target: int,
    private: Tensor | None,
    scoring: Scoring,
    diagnoses: Sequence[str],
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
        "why": "; ".join(filter(None, [result.why[target] if result.why else "", *diagnoses])),
        "unmeasured": missing,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
