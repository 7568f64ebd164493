"""A Flower client without gradveil: LeNet-5 on its half of an .npz file, as Flower's quickstart trains."""

import time

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from lenet import lenet5
from torch import nn

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one epoch; the answer says how long the training alone took."""
    torch.set_num_threads(1)
    number, clients = int(context.node_config["partition-id"]), int(context.run_config["clients"])
    with np.load(str(context.run_config["data"])) as file:
        images, labels = file["x_train"][number::clients], file["y_train"][number::clients]
    inputs = torch.from_numpy(images).float().div(255).sub(0.1307).div(0.3081).view(-1, 1, 28, 28)
    targets = torch.from_numpy(labels).long()
    model = lenet5()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    start = time.perf_counter()
    for indices in torch.randperm(len(inputs)).split(32):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs[indices]), targets[indices]).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": len(inputs), "train-seconds": time.perf_counter() - start})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
