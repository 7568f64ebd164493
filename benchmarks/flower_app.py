"""The benchmark's work as a Flower app, in its own module so that each Ray actor imports and loads it only once."""

import os
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from gradveil.data.pixels import to_unit
from gradveil.models import Normalisation, create_model
from workload import BATCH, CLIENTS, IMAGES, LR, SAMPLED, load

client_app = ClientApp()


@cache
def actor() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Load what an actor keeps between messages: model, images, labels and the indices of each client's images."""
    torch.set_num_threads(1)
    data = load()
    images = Normalisation(data.mean, data.std)(to_unit(data.train.images))
    parts = torch.from_numpy(np.random.default_rng(0).permutation(CLIENTS * IMAGES).reshape(CLIENTS, IMAGES))
    return create_model("lenet5", data.shape, 10, seed=0), images, torch.from_numpy(data.train.labels), parts


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client for one round."""
    model, images, labels, parts = actor()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    mine = parts[int(context.node_config["partition-id"])]
    for indices in mine[torch.randperm(IMAGES)].split(BATCH):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(images[indices]), labels[indices]).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": IMAGES})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
    )


def run_flower(rounds: int) -> list[float]:
    """Run with one actor per core; return when data and libraries were loaded, and when each round ended."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    ends_file = Path(tempfile.mkdtemp()) / "ends"
    server_app = ServerApp()

    class Timed(FedAvg):
        def aggregate_train(self, server_round, replies):  # noqa: ANN001, ANN202 - Flower's own signature
            result = super().aggregate_train(server_round, replies)
            with ends_file.open("a") as file:
                file.write(f"{time.time()}\n")
            return result

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(
            fraction_train=SAMPLED / CLIENTS,
            fraction_evaluate=0.0,
            min_train_nodes=SAMPLED,
            min_available_nodes=CLIENTS,
        )
        arrays = ArrayRecord(create_model("lenet5", (1, 28, 28), 10, seed=0).state_dict())
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds)

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": os.cpu_count()}}
    ready = time.time()
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=backend)
    return [ready, *(float(line) for line in ends_file.read_text().split())]
