"""The client app of one site, which answers as gradveil does if it is client 0, and otherwise breaks its updates.

It imports no torch, so that a message costs little. A site that breaks its answers trains once, and starts from that
answer in every round. `benchmarks/flower_fuzz.py` plays it.
"""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from gradveil.engines.site_kinds import app_of
from gradveil.engines.warm_site import client_app
from mutations import mutated

Parts = dict[str, ArrayRecord | ConfigRecord]
honest = client_app()


def _values(rng: random.Random, array: np.ndarray) -> np.ndarray:
    return array * np.float32(rng.choice([np.nan, np.inf]))


def _type(rng: random.Random, array: np.ndarray) -> np.ndarray:
    return array.astype(rng.choice(["float64", "float16", "int32", "bool", "complex64", "U3"]))


def _shape(rng: random.Random, array: np.ndarray) -> np.ndarray:
    return np.zeros([rng.randrange(7) for _ in range(rng.choice([0, 3, 4]))], np.float32)


def _tensor(change: Callable[[random.Random, np.ndarray], np.ndarray], rng: random.Random, parts: Parts) -> Parts:
    """Return an answer with one tensor changed."""
    name = rng.choice(sorted(parts["tensors"]))
    return parts | {
        "tensors": ArrayRecord({**parts["tensors"], name: Array(change(rng, parts["tensors"][name].numpy()))})
    }


def _missing_tensor(rng: random.Random, parts: Parts) -> Parts:
    name = rng.choice(sorted(parts["tensors"]))
    return parts | {"tensors": ArrayRecord({key: array for key, array in parts["tensors"].items() if key != name})}


def _further_tensor(rng: random.Random, parts: Parts) -> Parts:
    return parts | {
        "tensors": ArrayRecord({**parts["tensors"], rng.randbytes(8).hex(): Array(np.zeros(2, np.float32))})
    }


def _length(rng: random.Random, parts: Parts) -> Parts:
    """Return an answer in which one tensor has fewer or more bytes than its header says."""
    name = rng.choice(sorted(parts["tensors"]))
    data = parts["tensors"][name].data
    other = rng.choice([data[: rng.randrange(len(data))], data + rng.randbytes(9)])
    return parts | {"tensors": ArrayRecord({**parts["tensors"], name: Array("float32", (4,), "numpy.ndarray", other)})}


def _count(rng: random.Random, parts: Parts) -> Parts:
    wrong = rng.choice([-1, 10**9, 2**62, 0.5, "12", True, float("nan"), [1, 2]])
    return parts | {"facts": ConfigRecord({**parts["facts"], "images": wrong})}


def _missing_value(rng: random.Random, parts: Parts) -> Parts:
    name = rng.choice(sorted(parts["facts"]))
    return parts | {"facts": ConfigRecord({key: value for key, value in parts["facts"].items() if key != name})}


def _missing_record(rng: random.Random, parts: Parts) -> Parts:
    return dict(rng.sample(sorted(parts.items()), len(parts) - 1))


def _bytes(rng: random.Random, parts: Parts) -> Parts:
    """Return an answer whose serialised bytes were changed at random, such that Flower itself can still read it."""
    content = recorddict_to_proto(RecordDict(parts)).SerializeToString()
    while True:
        with suppress(Exception):  # Flower's own; such bytes never leave a site
            return dict(recorddict_from_proto(ProtoRecordDict.FromString(mutated(content, rng))).items())


WAYS: dict[str, Callable[[random.Random, Parts], Parts]] = {
    "NaN or infinity": lambda rng, parts: _tensor(_values, rng, parts),
    "type of a tensor": lambda rng, parts: _tensor(_type, rng, parts),
    "shape of a tensor": lambda rng, parts: _tensor(_shape, rng, parts),
    "length of a tensor's bytes": _length,
    "missing tensor": _missing_tensor,
    "further tensor": _further_tensor,
    "number of images": _count,
    "missing value": _missing_value,
    "missing record": _missing_record,
    "random changes of bytes": _bytes,
}


def answer(kind: str, message: Message, context: Context) -> Message:
    """Answer as gradveil does, except that updates of all clients but the first are broken."""
    number, folder = context.node_config["partition-id"], Path(context.node_config["private-folder"])
    if kind != "train" or number == 0:
        return honest(message, context)
    kept, round_number = folder / "answer", message.content["round"]["number"]
    if not kept.exists():
        reply = honest(message, context)
        if "tensors" not in reply.content:
            return reply
        kept.write_bytes(recorddict_to_proto(reply.content).SerializeToString())
    parts = dict(recorddict_from_proto(ProtoRecordDict.FromString(kept.read_bytes())).items())
    rng = random.Random(f"{number} {round_number}")
    way = rng.choice(list(WAYS))
    broken = RecordDict(WAYS[way](rng, parts))
    with (folder / "broken.jsonl").open("a") as file:
        file.write(json.dumps({"round": round_number, "client": number, "way": way}) + "\n")
    return Message(broken, reply_to=message)


app = app_of(answer)
