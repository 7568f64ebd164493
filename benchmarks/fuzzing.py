"""What `benchmarks/reliability.py` fuzzes: every reader with files to start from.

To add a target, add one line to `TARGETS`: a name, a function that returns contents to start from, and a function that
reads a file. A target is in order if it returns, or raises an error of gradveil; anything else is a finding.
"""

import functools
import gzip
import io
import json
import os
import pickle
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from PIL import Image
from safetensors.torch import save
from scipy.io import savemat

from gradveil.attacks import build_any_attack
from gradveil.config import TrainSettings, make_train_settings, read_settings, to_toml
from gradveil.data.formats import read_cifar_binary, read_cifar_python, read_idx, read_svhn
from gradveil.data.own import read_npz
from gradveil.data.pictures import read_pictures
from gradveil.defences import build_defence
from gradveil.engines.messages import finite, listed, read_arrays, read_config, whole
from gradveil.engines.run_folder import RunFolder, settings_hash
from gradveil.federated.answers import ExpectedUpdate, check_score, check_sent
from gradveil.federated.client import Score
from gradveil.generators.base import load_generator
from gradveil.models import create_model, load_weights
from gradveil.report.audit import write_report
from gradveil.report.training import rewrite_page
from gradveil.runs.inputs import read_tensors
from gradveil.runs.update_spec import read_spec
from gradveil.storage import PrivateFolder, load_tensors, read_metadata, save_tensors
from gradveil.threat.received import received
from gradveil.threat.tap import load_tapped
from gradveil.types import Update
from mutations import mutated

Seeds = Callable[[], Sequence[bytes]]


@dataclass(frozen=True)
class Target:
    """Something that reads files.

    Attributes:
        seeds: contents from which the mutations start.
        read: reads a file.
        share: part of the inputs that it gets, relative to the others; slow ones get few.
    """

    seeds: Seeds
    read: Callable[[Path], object]
    share: float = 1.0


def _npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def _written(write: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "file"))
        return Path(folder, "file").read_bytes()


def _idx() -> list[bytes]:
    plain = struct.pack(">4B3I", 0, 0, 8, 3, 5, 6, 6) + bytes(range(180))
    return [plain, gzip.compress(plain)]


def _cifar() -> list[bytes]:
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2], b"filenames": [b"a", b"b"]}
    return [pickle.dumps(batch, protocol) for protocol in range(5)]


def _mat() -> list[bytes]:
    content = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [1, 2]}
    return [_written(lambda path, p=p: savemat(str(path), content, do_compression=p, appendmat=False)) for p in (0, 1)]


def _own() -> list[bytes]:
    images, labels = np.zeros((4, 6, 6), np.uint8), np.arange(4)
    return [_npz(x_train=images, y_train=labels, x_test=images, y_test=labels)]


def _pictures() -> list[bytes]:
    found = []
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp"):
        for mode in ("L", "RGB"):
            buffer = io.BytesIO()
            Image.effect_noise((12, 9), 60).convert(mode).save(buffer, kind)
            found.append(buffer.getvalue())
    return found


@functools.cache
def _network() -> torch.nn.Module:
    return create_model("logistic", (1, 6, 6), 4, seed=0)


def _tensors() -> list[bytes]:
    weights = {name: tensor.clone() for name, tensor in _network().state_dict().items()}
    sealed = _written(lambda path: save_tensors(path, weights, {"round": "1"}))
    return [save(weights, {"round": "1"}), save({"a": torch.ones(2, 2).half(), "b": torch.arange(3)}), sealed]


def _generator() -> list[bytes]:
    made = {f"{n}.{kind}": torch.zeros(shape) for n, kind, shape in
            ((0, "weight", (8, 4)), (0, "bias", (8,)), (2, "weight", (8, 8)), (2, "bias", (8,)),
             (4, "weight", (36, 8)), (4, "bias", (36,)))}  # fmt: skip
    return [save(made), save(made, {"generator": "mlp-gan:latent=4,hidden=8", "classes": "4"})]


def _spec() -> list[bytes]:
    return [
        b'model = "mlp"\nshape = [1, 6, 6]\nnum_classes = 4\nkind = "change"\nlr = 0.1\nnum_examples = 2\n'
        b'labels = [1, 2]\nepochs = 2\nbatch_size = 1\nmomentum = 0.9\ndefence = "clip:norm=1.0+gaussian:std=0.1"\n'
    ]


def _begun() -> list[bytes]:
    return [to_toml(TrainSettings(rounds=4))]


def _tapped() -> list[bytes]:
    parts = ("update/w", "before/w", "after/w", "private/images", "encodings/images")
    tensors = {f"7/{part}": torch.ones(2, 1, 2, 2) for part in parts} | {"model/w": torch.ones(2, 1, 2, 2)}
    for part in ("private", "encodings"):
        tensors |= {f"7/{part}/labels": torch.zeros(2).long(), f"7/{part}/sensitive": torch.zeros(2).bool()}
    facts = {"round": "1", "lr": "0.1", "examples": '{"7": 2}', "digests": '{"7": "ab"}'}
    return [_written(lambda path: save_tensors(path, tensors, facts)), save(tensors, facts)]


def _settings() -> list[bytes]:
    return [to_toml(TrainSettings()), b'model = "mlp"\n[defence]\nname = "soteria"\nprune = 0.6\n']


def _defences() -> list[bytes]:
    return [b"clip:norm=1.0+gaussian:std=0.1", b"soteria:prune=0.6,probes=8", b"dp-sgd:noise=2,clip=1"]


def _attacks() -> list[bytes]:
    return [b"gs:iterations=10,lr=0.1,tv=1e-4", b"linear", b"grnn:iterations=5"]


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


def _received(path: Path) -> object:
    return received(
        _network(), [read_tensors(path)], shape=(1, 6, 6), num_classes=4, kind="gradient", lr=1.0, num_examples=1
    )


def _weights(path: Path) -> object:
    return load_weights(create_model("logistic", (1, 6, 6), 4, seed=0), path)


def _private(path: Path) -> object:
    folder = PrivateFolder(path.parent / "c" / "private")
    folder.path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o600)
    shutil.move(path, folder.path / "state-000001.safetensors")
    return folder.load_state(2)


_ROW = {"kind": "round", "round": 1, "accuracy": 0.5, "loss": 1.0, "lr": 0.1, "clients": 2, "seconds": 0.1}


def _rows() -> list[bytes]:
    return [b"".join(json.dumps(_ROW | {"round": n}).encode() + b"\n" for n in range(1, 5))]


def _clients() -> list[bytes]:
    clients = [{"client": n, "images": 9, "accuracy_own": 0.5, "accuracy_test": 0.5} for n in range(2)]
    return [b"".join(json.dumps(client).encode() + b"\n" for client in clients)]


def _run_folder(path: Path, name: str) -> RunFolder:
    """Return a folder of a training with the mutated file in the place of one of its own."""
    out = path.parent / "run"
    with RunFolder(out) as folder:
        folder.begin(TrainSettings(rounds=4), "data", resume=False)
        folder.commit(1, _ROW, {"w": torch.ones(3)}, {})
    (out / "clients.jsonl").write_bytes(_clients()[0])
    shutil.move(path, out / name)
    return RunFolder(out)


def _resumed(path: Path, name: str) -> object:
    with _run_folder(path, name) as folder:
        saved = make_train_settings(folder.saved_settings())
        return folder.begin(saved, "data", resume=True)


def _checkpoint() -> list[bytes]:
    settings = settings_hash(TrainSettings(rounds=4))
    facts = {"round": "1", "row": json.dumps(_ROW), "data": "data", "settings": settings}
    return [
        _written(lambda path: save_tensors(path, {"model.w": torch.ones(3)}, facts)),
        save({"model.w": torch.ones(3)}, facts),
    ]


def _page(path: Path, name: str) -> object:
    with _run_folder(path, name) as folder:
        return rewrite_page(folder.path)


def _audit_files() -> dict[str, bytes]:
    images = torch.zeros(1, 1, 1, 6, 6, dtype=torch.uint8)
    row = {"kind": "privacy", "defence": "none", "attack": "gs", "adaptive": False, "seed": 0, "target": 0, "round": 1,
           "psnr": 12.0, "ssim": 0.5, "mse": 0.1, "failed": False, "cell": "p-0", "images": 1, "converged": True,
           "knows": ["labels"], "why": "", "update_sha256": "ab"}  # fmt: skip
    cell = {"name": "p-0", "kind": "privacy", "defence": "none", "attack": "gs", "adaptive": False, "seed": 0,
            "targets": [0], "round": 1}  # fmt: skip
    truth = {"images": images, "labels": torch.zeros(1, 1, dtype=torch.int64)}
    where = {name: torch.zeros(1, dtype=torch.int64) + (name == "round") for name in ("seed", "round", "target")}
    guess = {"truth": images, "images": images, "iterates": images[None], "guessed": torch.ones(1, 1)}
    return {
        "settings.toml": b'kind = "audit"\nmodel = "mlp"\ndefences = ["none"]\nrounds = 2\nprotocol = "lab"\n',
        "plan.json": json.dumps({"identity": {}, "cells": [cell]}).encode(),
        "rows.jsonl": json.dumps(row).encode() + b"\n",
        "truth.safetensors": save(truth | where),
        "cells/p-0.json": json.dumps([row]).encode(),
        "cells/p-0.safetensors": save({name: tensor.clone() for name, tensor in guess.items()}),
    }


def _audit_file(name: str) -> list[bytes]:
    return [_audit_files()[name]]


def _audit(path: Path, name: str) -> object:
    out = path.parent / "audit"
    for other, content in _audit_files().items():
        (out / other).parent.mkdir(parents=True, exist_ok=True)
        (out / other).write_bytes(path.read_bytes() if other == name else content)
    return write_report(out)


def _both(path: Path) -> object:
    return load_tensors(path), read_metadata(path)


LIKE = {"w": torch.zeros(4, 3), "b": torch.zeros(3)}
"""The tensors of the model that messages are about."""


def _messages() -> list[bytes]:
    """Return answers of clients as Flower sends them: an update, and a score."""
    arrays = ArrayRecord({name: Array(tensor.numpy()) for name, tensor in LIKE.items()})
    update = RecordDict({"update": arrays, "told": ConfigRecord({"images": 5, "loss": 0.5, "counts": [1, 2, 3]})})
    score = RecordDict({"told": ConfigRecord({"images": 9, "loss": 1.5, "counts": [0, 4, 5]})})
    return [recorddict_to_proto(record).SerializeToString() for record in (update, score)]


def _message(path: Path) -> object:
    """Read an answer with the server's checks; bytes that Flower itself refuses never reach them."""
    try:
        content = recorddict_from_proto(ProtoRecordDict.FromString(path.read_bytes()))
    except Exception as error:  # Flower's own
        return error
    expected = ExpectedUpdate(Update(LIKE, 0), Update(LIKE, 0))
    for name in content.config_records:
        values = read_config(content, name)
        counts = tuple(listed(values, "counts", int, 9))
        score = Score(whole(values, "images", 0, 9), finite(values, "loss"), 9, (), counts)
        check_score(score, 9, 3)
    for name in content.array_records:
        read_arrays(content, name, None, 1000)
        check_sent(Update(read_arrays(content, name, LIKE, 0), 5), expected, 9)
    return content


TARGETS: dict[str, Target] = {
    "data: idx": Target(_idx, lambda path: read_idx(path, 3)),
    "data: CIFAR binary": Target(lambda: [bytes(3073 * 2)], lambda path: read_cifar_binary(path, 10), 0.3),
    "data: CIFAR python (pickle)": Target(_cifar, lambda path: read_cifar_python(path, 10)),
    "data: SVHN (MATLAB)": Target(_mat, read_svhn),
    "data: own .npz": Target(_own, read_npz),
    "data: pictures": Target(_pictures, lambda path: read_pictures([path])),
    "update: .npz": Target(lambda: [_npz(**{n: t.numpy() for n, t in _network().state_dict().items()})],
                           lambda path: read_tensors(path.rename(path.with_suffix(".npz")))),
    "update: received by the server": Target(_tensors, _received, 0.5),
    "message: a client's answer": Target(_messages, _message, 0.5),
    "tensors: safetensors": Target(_tensors, _both),
    "tensors: weights": Target(_tensors, _weights, 0.5),
    "tensors: generator": Target(_generator, lambda path: load_generator(str(path), (1, 6, 6), 4), 0.3),
    "tensors: private state": Target(lambda: _tensors()[-1:], _private, 0.15),
    "tensors: tapped round": Target(_tapped, load_tapped, 0.3),
    "settings: TOML": Target(_settings, lambda path: make_train_settings(read_settings(path))),
    "settings: texts of defences": Target(_defences, lambda path: build_defence(_text(path)), 0.15),
    "settings: texts of attacks": Target(_attacks, lambda path: build_any_attack(_text(path)), 0.08),
    "settings: specification of updates": Target(_spec, read_spec),
    "folder: checkpoint": Target(_checkpoint, lambda path: _resumed(path, "checkpoint.safetensors"), 0.03),
    "folder: rows": Target(_rows, lambda path: _resumed(path, "rows.jsonl"), 0.03),
    "folder: settings": Target(_begun, lambda path: _resumed(path, "settings.toml"), 0.03),
    **{f"page of a training: {name}": Target(seeds, functools.partial(_page, name=name), 0.008)
       for name, seeds in {"rows.jsonl": _rows, "clients.jsonl": _clients, "settings.toml": _begun}.items()},
    **{f"page of an audit: {name}": Target(functools.partial(_audit_file, name), functools.partial(_audit, name=name),
                                           0.008) for name in _audit_files()},
}  # fmt: skip
"""All targets. One more is one more line."""


def try_one(target: Target, seeds: Sequence[bytes], rng: random.Random, folder: Path) -> object:
    """Write one mutated file into an empty folder and read it."""
    path = folder / "input"
    path.write_bytes(mutated(rng.choice(seeds), rng))
    return target.read(path)


def empty(folder: Path) -> None:
    """Remove everything in a folder."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)
