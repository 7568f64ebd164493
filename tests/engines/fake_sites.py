"""Nodes without a site behind them, for many rounds in little time: each sends its number as an update, or a fault."""

import logging

import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict

from gradveil.config import TrainSettings
from gradveil.engines import nodes
from gradveil.engines.flower import AnswerLimits, flower_training
from tests.engines.test_flower import Mailbox
from tests.security.sites import private_set

RUN = TrainSettings(
    dataset="mnist-5k", model="logistic", clients=3, rounds=100, lr=0.05, normalise="none", batch_size=0,
)  # fmt: skip
IMAGES = 12


class Clock:
    """A clock that only sleeping moves; what ``during`` names happens while the server sleeps, by the second."""

    def __init__(self, during=None):
        self.now, self.during = 0.0, dict(during or {})

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for second in [second for second in self.during if second <= self.now]:
            self.during.pop(second)()


class FakeSites(Mailbox):
    """Nodes 10, 11, ... of clients 0, 1, ...; some are silent, some are unavailable, and answers can be changed."""

    def __init__(self, clients=RUN.clients):
        self.numbers = {10 + number: number for number in range(clients)}
        self.silent, self.unavailable, self.asked = set(), set(), []
        self.change = lambda number, kind, content: content

    def get_node_ids(self):
        return list(self.numbers)

    def restart(self, number, node):
        """Start a new node with a client's number; the old one stays on the list, but says nothing more."""
        self.silent |= {old for old, owner in self.numbers.items() if owner == number}
        self.numbers[node] = number

    def send_and_receive(self, messages, *, timeout=None):
        (message,) = messages
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        self.asked.append((kind, node))
        if node in self.silent:
            return []
        if node in self.unavailable:
            return [Message(Error(5, "Node Unavailable."), reply_to=message)]
        number = self.numbers[node]
        content = self.change(number, kind, self.answer(number, kind, message.content))
        return [Message(content, reply_to=message)]

    def answer(self, number, kind, content):
        if kind == "query":
            return RecordDict({"facts": ConfigRecord({"number": number, "images": IMAGES, "sensitive": 0})})
        model = content.array_records["model"].to_torch_state_dict()
        facts = {"images": IMAGES, "alarms": 0, "report-names": [], "report-values": []}
        update = ArrayRecord({name: torch.full_like(tensor, float(number + 1)) for name, tensor in model.items()})
        return RecordDict({"facts": ConfigRecord(facts), "tensors": update, "buffers": ArrayRecord({})})


def training_with(grid, monkeypatch, run=RUN, during=None, **limits):
    """Return a training over fake sites, and the clock by which it waits."""
    clock = Clock(during)
    monkeypatch.setattr(nodes, "time", clock)
    monkeypatch.setattr(nodes.LOG, "propagate", True)
    nodes.LOG.setLevel(logging.INFO)
    return flower_training(grid, run, private_set(seed=9), AnswerLimits(**limits)), clock


def mean_of(training, clients):
    """Return whether a model moved by the mean of these clients' updates since ``before``."""
    wanted = sum(client + 1 for client in clients) / len(clients)
    return lambda before: all(
        torch.allclose(training.model[name] - tensor, torch.full_like(tensor, wanted), atol=1e-4)
        for name, tensor in before.items()
    )
