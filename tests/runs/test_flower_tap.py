"""The tap of a Flower app: the strategy trains as without it, and the files are what the server saw."""

import stat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy
from typer.testing import CliRunner

from gradveil.cli import app as app_of_commands
from gradveil.config import read_settings
from gradveil.data import load_dataset
from gradveil.errors import ConfigError
from gradveil.models import create_model
from gradveil.runs.flower_tap import FlowerTap
from gradveil.storage import load_tensors
from tests.engines.flower_apps import OwnGrid, _a_task, content  # noqa: F401 - a fixture

LR = 0.1
FACTS = {"model": "lenet-dlg", "shape": (1, 28, 28), "num_classes": 10, "epochs": 1, "batch_size": 0}


def network():
    return create_model("lenet-dlg", (1, 28, 28), 10, seed=0)


def app():
    """Return an app whose node n takes one step of SGD on its own digit."""
    digits, client = load_dataset("mnist-5k").train, ClientApp()

    @client.train()
    def train(message, context):
        number, model = context.node_config["partition-id"], network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(model.parameters(), message.content["config"]["lr"])
        images, labels = (torch.from_numpy(part[number * 500 : number * 500 + 1])
                          for part in (digits.images, digits.labels))  # fmt: skip
        F.cross_entropy(model(images / 255), labels).backward()
        optimiser.step()
        reply = content(model.state_dict())
        reply["metrics"]["num-examples"] = 1
        return Message(reply, reply_to=message)

    return client


def run(strategy, rounds=2, nodes=2):
    arrays = ArrayRecord(network().state_dict())
    return strategy.start(OwnGrid(app(), nodes), arrays, rounds, train_config=ConfigRecord({"lr": LR})).arrays


def averaging(kind=FedAvg):
    return kind(fraction_evaluate=0.0)


def bits(arrays):
    return {name: array.data for name, array in arrays.items()}


@pytest.mark.parametrize("kind", [FedAvg, FedMedian])
def test_the_wrapped_strategy_trains_the_same_bits(kind, tmp_path):
    strategy = averaging(kind)
    assert bits(run(averaging(kind))) == bits(run(FlowerTap(strategy, tmp_path / "tapped", **FACTS)))
    assert not {"configure_train", "aggregate_train"} & set(vars(strategy))


def test_the_files_are_the_model_and_the_change_of_each_node(tmp_path):
    run(FlowerTap(averaging(), tmp_path, **FACTS))
    first = tmp_path / "round-1"
    names = ["10.safetensors", "10.toml", "11.safetensors", "11.toml", "model.safetensors"]
    assert sorted(path.name for path in first.iterdir()) == names
    assert {stat.S_IMODE(path.stat().st_mode) for path in first.iterdir()} == {0o600}
    sent, change = load_tensors(first / "model.safetensors"), load_tensors(first / "10.safetensors")
    assert all(torch.equal(sent[name], tensor) for name, tensor in network().state_dict().items())
    model = network()
    digits = load_dataset("mnist-5k").train
    loss = F.cross_entropy(model(torch.from_numpy(digits.images[:1]) / 255), torch.from_numpy(digits.labels[:1]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert torch.allclose(change[name], -LR * gradient, atol=1e-6)
    spec = read_settings(first / "10.toml")
    assert (spec["lr"], spec["num_examples"], spec["kind"]) == (LR, 1, "change")


def test_attack_and_diagnose_take_the_files_as_they_are(tmp_path, monkeypatch):
    run(FlowerTap(averaging(), tmp_path / "tapped", **FACTS), rounds=1)
    monkeypatch.chdir(tmp_path / "tapped" / "round-1")
    command = Path("11.toml").read_text().splitlines()[1].removeprefix("# gradveil ").split()
    files = command[command.index("--model-file") : command.index("--attack")]
    found = CliRunner().invoke(app_of_commands, ["diagnose", *files])
    assert (found.exit_code, "nothing found" in found.output) == (0, True)
    quick = [*command[:-1], f"{command[-1]}:iterations=3", "--out", "attacked"]
    assert CliRunner().invoke(app_of_commands, quick).exit_code == 0
    assert Path("attacked/images/target-0.png").exists()


def test_a_defence_that_edits_the_network_is_not_tapped(tmp_path):
    for defence in ("fedkl", "clip:norm=1.0+fedkl"):
        with pytest.raises(ConfigError, match=r"which edits the network\. To attack such updates"):
            FlowerTap(averaging(), tmp_path / "no", **FACTS, defence=defence)
    FlowerTap(averaging(), tmp_path / "yes", **FACTS, defence="soteria")


def test_rounds_and_bytes_are_bounded(tmp_path, caplog):
    run(FlowerTap(averaging(), tmp_path / "one", rounds=[2], **FACTS), rounds=3)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["round-2"]
    run(FlowerTap(averaging(), tmp_path / "few", max_bytes=150_000, **FACTS), rounds=3)
    size = sum(path.stat().st_size for path in (tmp_path / "few").rglob("*.*"))
    assert 0 < size <= 150_000
    assert caplog.text.count("max_bytes is reached") == 1


class Odd(FedAvg):
    """A strategy with a ``start`` of its own, that sends node 11 another model than node 10."""

    started = 0

    def start(self, *args, **kwargs):
        self.started += 1
        return super().start(*args, **kwargs)

    def configure_train(self, server_round, arrays, config, grid):
        for message in super().configure_train(server_round, arrays, config, grid):
            if message.metadata.dst_node_id == 11:
                other = {name: t + 0.01 for name, t in message.content["arrays"].to_torch_state_dict().items()}
                message.content = content(other)
                message.content["config"] = config
            yield message


def test_each_update_stands_beside_the_model_that_its_node_received(tmp_path):
    strategy = FlowerTap(Odd(fraction_evaluate=0.0), tmp_path, **FACTS)
    run(strategy, rounds=1)
    assert strategy.started == 1
    models = sorted(path.name for path in (tmp_path / "round-1").glob("model*"))
    assert len(models) == 2
    for node in (10, 11):
        command = (tmp_path / "round-1" / f"{node}.toml").read_text().splitlines()[1]
        used = load_tensors(tmp_path / "round-1" / command.split()[4])
        moved = torch.cat([(used[name] - tensor).flatten() for name, tensor in network().state_dict().items()])
        assert torch.allclose(moved, torch.full_like(moved, 0.01 * (node == 11)), atol=1e-6)


def test_a_reply_that_does_not_fit_is_left_out_and_the_training_goes_on(tmp_path, caplog):
    tap = FlowerTap(averaging(), tmp_path, **{**FACTS, "model": "lenet5"})
    assert run(tap, rounds=1)
    assert "left out a reply of round 1" in caplog.text
    assert not list(tmp_path.rglob("*.toml"))


def test_a_full_disk_does_not_end_the_training(tmp_path, caplog):
    tap = FlowerTap(averaging(), tmp_path / "here", **FACTS)
    (tmp_path / "here").write_text("no folder")
    assert bits(run(tap)) == bits(run(averaging()))
    assert "left out a reply" in caplog.text


def test_wrong_facts_are_found_before_the_training(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="new or empty"):
        FlowerTap(averaging(), tmp_path / "full", **FACTS)
    with pytest.raises(ConfigError, match="Did you mean 'epochs'"):
        FlowerTap(averaging(), tmp_path / "new", epoch=1, **FACTS)

    class Local(torch.nn.Linear):
        """A network that no other process can build."""

        def __init__(self):
            super().__init__(784, 10)

    with pytest.raises(ConfigError, match="this process only"):
        FlowerTap(averaging(), tmp_path / "new", **{**FACTS, "model": Local})


def test_it_is_a_strategy_that_another_can_wrap(tmp_path):
    tap = FlowerTap(averaging(), tmp_path, **FACTS)
    assert isinstance(tap, Strategy)
    assert tap.fraction_train == 1.0
    with pytest.raises(AttributeError):
        tap.nothing  # noqa: B018
