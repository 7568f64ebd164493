"""One real site in this process, and whoever holds its connection: messages as Flower carries them, and no network."""

from dataclasses import asdict, replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage

from gradveil.config import TrainSettings
from gradveil.data import Dataset, Split
from gradveil.engines.flower_site import client_app

SIDE, CLASSES, IMAGES = 8, 4, 12
RUN = TrainSettings(
    model="logistic", defence="gaussian:std=0.1", clients=1, rounds=9, lr=0.05, momentum=0.0, batch_size=0,
    normalise="none",
)  # fmt: skip


def private_set(images=IMAGES, seed=0):
    """Return a site's private images, drawn anew for each test."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (images + 6, 1, SIDE, SIDE)).astype(np.uint8)
    labels = (np.arange(images + 6) % CLASSES).astype(np.int64)
    train, test = Split(pixels[:images], labels[:images]), Split(pixels[images:], labels[images:])
    return Dataset("private", train, test, CLASSES, (0.5,), (0.5,))


def start(settings=RUN):
    """Return the weights of a logistic model, all zero."""
    return {"linear.weight": torch.zeros(CLASSES, SIDE * SIDE), "linear.bias": torch.zeros(CLASSES)}


class OneSite:
    """A site that agreed to one run and gets messages from a server that need not be honest."""

    def __init__(self, folder, run=RUN, data=None, agreed=None, **policy):
        own = private_set() if data is None else data
        self.app = client_app(lambda context: own)
        agreed = run if agreed is None else agreed
        self.node = {
            "partition-id": 0, "private-folder": str(folder), "defence": agreed.defence, "model": agreed.model,
        }  # fmt: skip
        self.node |= {key.replace("_", "-"): value for key, value in policy.items()}
        self.run = run

    def ask(self, kind, run=None, **records):
        """Send a message and return the answer's content as it arrives."""
        message = Message(RecordDict(records), dst_node_id=1, message_type=kind)
        run_config = {k.replace("_", "-"): "/".join(map(str, v)) if isinstance(v, tuple) else v
                      for k, v in asdict(run or self.run).items()}  # fmt: skip
        run_config.pop("bad-answers", None)  # so that the tests run on versions without it, too
        context = Context(1, 1, self.node, RecordDict(), run_config)
        arrived = message_from_proto(message_to_proto(message))
        return carried(self.app(arrived, context)).content

    def train(self, number=1, model=None, lr=None, run=None, trained=0):
        run = run or self.run
        return self.ask(
            "train", run, **shared(number, model or start(), trained), public=ArrayRecord({}),
            step=ConfigRecord({"lr": run.lr if lr is None else lr}),
        )  # fmt: skip

    def evaluate(self, model, images="own", after=0, own=True):
        asked = ConfigRecord({"images": [images], "own": [own]})
        return self.ask("evaluate", **shared(after, model, 0), requests=asked)

    def answered(self, run):
        """Return this site as another run meets it."""
        other = OneSite.__new__(OneSite)
        other.__dict__.update(self.__dict__, run=run)
        return other


def shared(number, model, trained):
    return {
        "model": ArrayRecord(dict(model)), "round": ConfigRecord({"number": number}),
        "network": ConfigRecord({"shape": [1, SIDE, SIDE], "num-classes": CLASSES}),
        "before": ConfigRecord({"trained": trained}),
    }  # fmt: skip


def carried(message):
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


def update_of(answer):
    """Return the bytes of the update in an answer, or None if the site sent an error."""
    if "error" in answer.config_records:
        return None
    arrays = answer.array_records["tensors"].to_torch_state_dict()
    return b"".join(arrays[name].numpy().tobytes() for name in sorted(arrays))


def code(answer):
    """Return the code of an answer that is an error, or "" for any other answer."""
    return answer.config_records["error"].get("code", "a text") if "error" in answer.config_records else ""


def with_seed(seed):
    return replace(RUN, seed=seed)
