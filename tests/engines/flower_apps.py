"""Somebody's own Flower app, and a grid in this process that carries its messages as Flower's bytes."""

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture(autouse=True)
def _a_task(monkeypatch):
    """Set the task that Flower expects of a process that makes messages."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class OwnGrid:
    """A grid that hands every message to a user's ClientApp; node n is partition n - 10."""

    def __init__(self, app, nodes=2, run_config=None, **node_config):
        self.app, self.run_config, self.node_config = app, run_config or {}, node_config
        self.nodes = [10 + number for number in range(nodes)]
        self.came = []

    def get_node_ids(self):
        return self.nodes

    def context(self, node):
        config = {"partition-id": node - 10, "num-partitions": len(self.nodes), **self.node_config}
        return Context(7, node, config, RecordDict(), self.run_config)

    def send_and_receive(self, messages, *, timeout=None):
        return [self.answer(message) for message in messages]

    def answer(self, message):
        context = self.context(message.metadata.dst_node_id)
        reply = self.app(carried(message), context)
        assert not context.state
        self.came.append(message_to_proto(reply).SerializeToString())
        back = message_from_proto(ProtoMessage.FromString(self.came[-1]))
        back.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
        return back


def carried(message):
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


def content(tensors, **metrics):
    return RecordDict({"arrays": ArrayRecord(tensors), "metrics": MetricRecord({"num-examples": 5, **metrics})})


def asked(tensors, kind="train", **more):
    """Return a server's message with a model."""
    records = {"arrays": ArrayRecord(tensors), **more}
    return Message(content=RecordDict(records), message_type=kind, dst_node_id=10)


def app_that_adds(change, mods, extra=None):
    """Return an app whose train function adds a change to the received weights by name."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message, context):
        arrays = next(iter(message.content.array_records.values())).to_torch_state_dict()
        new = {name: (tensor + change[name]).to(tensor.dtype) for name, tensor in arrays.items() if name in change}
        reply = content(new, loss=0.5)
        for name, record in (extra or {}).items():
            reply[name] = record
        return Message(reply, reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        return Message(content({"w": torch.ones(1)}), reply_to=message)

    return app
