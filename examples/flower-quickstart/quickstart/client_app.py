"""The client app. One line protects what leaves the client: the list of mods."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import gradveil
from quickstart.task import Net, load_data
from quickstart.task import train as train_fn

app = ClientApp(mods=[gradveil.flower.protect("gaussian:std=0.01")])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model on this client's images, and reply with the new weights."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    number, clients = context.node_config["partition-id"], context.node_config["num-partitions"]
    loader = load_data(number, clients, context.run_config["batch-size"])
    loss = train_fn(net, loader, context.run_config["local-epochs"], message.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
