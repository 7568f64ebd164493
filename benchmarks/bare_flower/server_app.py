"""A Flower server without gradveil: federated averaging; writes when each round ended and how long clients trained."""

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from lenet import lenet5

app = ServerApp()


class Timed(FedAvg):
    """Federated averaging that notes the time after each round."""

    def __init__(self, out: str, clients: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        self._out, self._start = Path(out), time.time()

    def aggregate_train(self, server_round, replies):  # noqa: ANN001, ANN201 - Flower's own signature
        """Average, and add a line with the seconds of the round and of the slowest client's training."""
        replies = list(replies)
        trained = max(float(reply.content["metrics"]["train-seconds"]) for reply in replies)
        result = super().aggregate_train(server_round, replies)
        line = {"round": server_round, "seconds": time.time() - self._start, "training": trained}
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._start = time.time()
        return result


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the run's rounds."""
    strategy = Timed(str(context.run_config["out"]), int(context.run_config["clients"]))
    arrays = ArrayRecord(lenet5().state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=int(context.run_config["rounds"]))
