"""The rounds that a training saves, as its server has them: the model, the updates, and what is known about them.

Beside each ``update-0.safetensors`` lies ``update-0.toml``, the specification that ``gradveil attack`` and ``gradveil
diagnose`` need; its first lines are the command to type.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w

from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.defences import planned_defence
from gradveil.federated.protocol import Protocol
from gradveil.federated.server import Round, learning_rate
from gradveil.storage import save_tensors, write_atomic
from gradveil.types import Update


def save_round(out: Path, played: Round, settings: TrainSettings, dataset: Dataset) -> None:
    """Save the model that a chosen round began with and each client's update, as a server would have them."""
    if played.number not in settings.save_rounds:
        return
    folder = out / "rounds" / f"{played.number:06d}"
    how = Protocol.of(settings).local
    facts = {
        "round": str(played.number),
        "model": settings.model,
        "defence": settings.defence,
        "algorithm": how.algorithm,
        "epochs": str(how.epochs),
        "batch_size": str(how.batch_size),
        "lr": repr(learning_rate(settings, played.number)),
        "momentum": repr(how.momentum),
        "nesterov": str(how.nesterov).lower(),
        "batch_norm": how.batch_norm,
        "weight_decay": repr(how.weight_decay),
        "normalise": settings.normalise,
    }
    save_tensors(folder / "model.safetensors", played.received, facts)
    seen: Mapping[str, Update] = {str(client): update for client, update in played.sent.items()}
    if settings.aggregation == "secure":
        seen = {str(client): played.sent[client] for client in played.early} | {"mean": played.mean}
    for client, update in seen.items():
        own = {"client": client, "num_examples": str(update.num_examples), "buffers": ",".join(update.buffers)}
        save_tensors(folder / f"update-{client}.safetensors", {**update.tensors, **update.buffers}, facts | own)
        spec = specification(settings, dataset, played.number, update.num_examples)
        command = f"--model-file model.safetensors --update update-{client}.safetensors --spec update-{client}.toml"
        head = f"# To attack this update, type in this folder:\n# gradveil attack {command} --attack gs --out attack\n"
        write_atomic(folder / f"update-{client}.toml", (head + tomli_w.dumps(spec)).encode())


def specification(settings: TrainSettings, dataset: Dataset, number: int, images: int) -> dict[str, Any]:
    """Return what a server knows about an update, by the keys of the specification of saved updates.

    Args:
        settings: of the training.
        dataset: its data set; the server knows the shape, the classes and the normalisation.
        number: of the round.
        images: number of images behind the update; 0 is left out.
    """
    local = {key: list(value) if isinstance(value, tuple) else value for key, value in _local(settings).items()}
    stated = {"num_examples": images} if images else {}
    return {
        "model": settings.model,
        "shape": list(dataset.shape),
        "num_classes": dataset.num_classes,
        "kind": "change",
        "lr": learning_rate(settings, number),
        **stated,
        "normalise": _normalisation(settings.normalise, dataset),
        "defence": planned_defence(settings).spec,
        **local,
    }


def _local(settings: TrainSettings) -> dict[str, Any]:
    return asdict(Protocol.of(settings).local)


def _normalisation(text: str, dataset: Dataset) -> str:
    """Return a normalisation as a specification states it: the data set's own as numbers."""
    if text != "dataset":
        return text
    return "/".join(",".join(map(repr, map(float, values))) for values in (dataset.mean, dataset.std))
