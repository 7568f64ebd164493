"""The server app. One line stores what the server sees of each client, if the run names a folder for it."""

import json
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import gradveil
from quickstart.task import MOMENTUM, Net, load_test_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train by federated averaging, and test the model after each round."""
    config = context.run_config
    nodes, net, loader = config["min-nodes"], Net(), load_test_data()
    strategy = FedAvg(config["fraction-train"], 0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    if config["tap"]:
        steps = {"epochs": config["local-epochs"], "batch_size": config["batch-size"], "momentum": MOMENTUM}
        strategy = gradveil.flower.Tap(strategy, config["tap"], model=Net, shape=(1, 28, 28), num_classes=10, **steps)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": test(net, loader)})

    result = strategy.start(
        grid,
        ArrayRecord(net.state_dict()),
        config["num-server-rounds"],
        train_config=ConfigRecord({"lr": config["lr"]}),
        evaluate_fn=evaluate,
    )
    if config["save"]:
        accuracy = {number: metrics["accuracy"] for number, metrics in result.evaluate_metrics_serverapp.items()}
        Path(config["save"]).write_text(json.dumps(accuracy))
