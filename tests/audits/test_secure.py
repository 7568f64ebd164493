"""Under secure aggregation the server sees the mean of a round's updates, and that mean is what is attacked."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from gradveil.attacks import build_attack
from gradveil.attacks.parts.countermoves import countermoves
from gradveil.audits import audit
from gradveil.audits.membership import load_local_model
from gradveil.audits.settings import make_audit_settings
from gradveil.audits.tapping import world_of
from gradveil.config import TrainSettings
from gradveil.data import load_dataset
from gradveil.defences import build_defence
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError
from gradveil.federated.protocol import Protocol
from gradveil.metrics import align
from gradveil.randomness import stream
from gradveil.report.audit_folder import read_audit
from gradveil.report.result import protocol_words
from gradveil.runs.train import train
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.threat.tap import SUM
from gradveil.types import Batch
from tests.audits.test_one_world import privacy


@pytest.mark.parametrize("protocol", ["lab", "fedavg"])
@pytest.mark.parametrize("defence", ["none", "gaussian:std=0.01", "entangle"])
def test_the_attacked_mean_is_that_of_the_replayed_clients(small, tmp_path, protocol, defence):
    settings = small(
        defences=defence, aggregation="secure", rounds=3, tap="1/3", protocol=protocol, clients=4,
        attacks="gs:iterations=2", partition="iid:images=6", batch_size=4, knows="labels,num-examples,local-steps",
    )  # fmt: skip
    result = audit(settings, tmp_path / "run", workers=0)
    assert not result.failed
    world = world_of(settings, defence, 0, load_dataset(settings.dataset))
    means, guards = {}, {0} if defence == "entangle" else set()
    with Simulation(world.training, workers=0) as simulation:
        for number in range(1, 4):
            played = simulation.step(number)[1]
            others = [update for client, update in played.recovered.items() if client not in guards]
            if others:  # rounds that are not tapped keep no updates
                plain = {  # the naive mean: clients have equally many images
                    name: sum(u.tensors[name].double() for u in others).div(len(others)).float()
                    for name in others[0].tensors
                }
                for name, tensor in played.mean.tensors.items():
                    assert torch.allclose(tensor, plain[name], atol=1e-9)
                means[number] = played.mean.sha256()
    rows = [row for row in privacy(result) if row["defence"] == defence]
    assert [(row["round"], row["client"], row["target"]) for row in rows] == [(1, SUM, 0), (3, SUM, 0)]
    assert [row["update_sha256"] for row in rows] == [means[1], means[3]]
    each = 1 if protocol == "lab" else 6
    assert {row["images"] for row in rows} == {each * (4 - len(guards))}
    assert {row["local_steps"] for row in rows} == {1 if protocol == "lab" else 2}
    assert all((row["signal_to_noise"] is not None) == defence.startswith("gaussian") for row in rows)
    assert read_audit(result.out).notes == ()


def test_single_updates_are_neither_listed_nor_saved(small, tmp_path):
    settings = small(defences="entangle", aggregation="secure", clients=4, attacks="gs:iterations=2", tap="1")
    result = audit(settings, tmp_path / "run", workers=0)
    listed = [json.loads(path.read_bytes())["1"] for path in sorted(result.out.glob("trainings/*/updates.json"))]
    assert [sorted(each) for each in listed] == [["-1"], ["-1", "0"]]  # the guard's update is public
    few = TrainSettings(
        model="logistic", clients=3, rounds=1, partition="iid:images=4", aggregation="secure", save_rounds=(1,)
    )
    train(few, tmp_path / "train", workers=0)
    saved = tmp_path / "train" / "rounds" / "000001"
    names = sorted(path.name for path in saved.iterdir())
    assert names == ["model.safetensors", "update-mean.safetensors", "update-mean.toml"]
    before, mean = (load_file(saved / name) for name in ("model.safetensors", "update-mean.safetensors"))
    after = load_file(tmp_path / "train" / "model.safetensors")
    assert all(torch.allclose(before[name] + mean[name], after[name], atol=1e-7) for name in before)


def test_an_attack_finds_the_images_of_all_clients_in_their_mean():
    rng = torch.Generator().manual_seed(0)
    images = [torch.rand(1, 1, 4, 4, generator=rng) for _ in range(2)]
    batches = [Batch(image, torch.tensor([label]), torch.tensor([False])) for label, image in enumerate(images)]
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 6))
    torch.nn.init.normal_(network[1].weight, generator=rng)
    seen = observe(
        network, batches, threat=ThreatModel.of("labels", "num-examples"), num_classes=6,
        protocol=Protocol(aggregation="secure"),
    )  # fmt: skip
    apart = observe(network, batches, threat=ThreatModel.of("labels", "num-examples"), num_classes=6)
    assert (seen.num_targets, seen.num_examples, seen.labels.tolist()) == (1, 2, [[0, 1]])
    for name, tensor in seen.updates.items():
        assert torch.allclose(tensor[0], apart.updates[name].mean(0))
    found = build_attack("gs:iterations=400,lr=0.1,sign=none,tv=0")(seen, stream(0, "attack")).images[0]
    truth = torch.cat([batch.images for batch in batches])
    assert (align(truth, found) - truth).square().mean() < (truth.mean() - truth).square().mean() / 2


def test_membership_is_inferred_from_the_mean_alone():
    settings = TrainSettings(
        model="logistic", clients=3, rounds=1, partition="iid:images=4", aggregation="secure", save_rounds=(1,)
    )
    with Simulation(settings, workers=0) as simulation:
        played = simulation.step(1)[1]
        models = []
        for client in (0, 1):
            load_local_model(simulation.net.module, played, client, alone=False)
            models.append({name: tensor.clone() for name, tensor in simulation.net.module.state_dict().items()})
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"clients": 1}, "needs two clients or more per round"),
        ({"clients": 2, "sampled": 1}, "needs two clients or more per round"),
        ({"looks": 2}, "looks must be 1 with aggregation secure"),
        ({"rounds": 0}, "rounds must be at least 1 with aggregation secure"),
        ({"defences": "ca-fl"}, "whose server works on single updates"),
        ({"aggregation": "masked"}, "Unknown aggregation 'masked'"),
    ],
)
def test_bad_settings_are_refused(bad, match):
    with pytest.raises(ConfigError, match=match):
        make_audit_settings({"aggregation": "secure"} | bad)


def test_a_round_of_one_client_beside_the_guard_is_refused(small, tmp_path):
    settings = small(defences="entangle", aggregation="secure", clients=2, attacks="gs:iterations=2")
    with pytest.raises(ConfigError, match="two clients or more in a round that are no guards, got 1"):
        audit(settings, tmp_path / "run", workers=0)
    assert not (tmp_path / "run").exists()


def test_a_training_refuses_defences_whose_server_needs_single_updates():
    with pytest.raises(ConfigError, match="whose server works on single updates"):
        Simulation(TrainSettings(defence="ca-fl", aggregation="secure", partition="iid:images=4"), workers=0)


def test_observe_refuses_a_mean_of_one():
    batch = Batch(torch.rand(1, 1, 4, 4), torch.tensor([0]), torch.tensor([False]))
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    with pytest.raises(ConfigError, match="two clients or more and a single round, got 1 clients"):
        observe(network, [batch], threat=ThreatModel(), num_classes=2, protocol=Protocol(aggregation="secure"))


def test_the_page_says_that_the_server_sees_only_means():
    said = protocol_words({"protocol": "lab", "images": 1, "rounds": 5, "tap": [1], "aggregation": "secure"})
    assert "the server sees only their mean" in said[0]


@pytest.mark.parametrize("defence", ["gaussian:std=0.02", "laplace:scale=0.02", "dp-sgd:sampling=shuffle,clip=0.01"])
def test_a_knowing_attacker_expects_the_noise_of_a_mean(defence):
    """The noise of a mean is weaker by the root of the number of clients, and dp-sgd's by its batch too."""
    rng = torch.Generator().manual_seed(0)
    images = [torch.rand(2, 1, 6, 6, generator=rng) for _ in range(9)]
    batches = [Batch(each, torch.tensor([0, 1]), torch.zeros(2, dtype=torch.bool)) for each in images]
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 40), torch.nn.Linear(40, 4))
    threat, how = ThreatModel.of("labels", "num-examples", "defence"), Protocol(aggregation="secure", lr=0.5)
    noisy = observe(network, batches, threat=threat, num_classes=4, protocol=how, defence=build_defence(defence))
    silent = build_defence(defence if defence.startswith("dp") else "none")
    silent = replace(silent, noise=0.0) if defence.startswith("dp") else silent
    plain = observe(network, batches, threat=threat, num_classes=4, protocol=how, defence=silent)
    (move,) = [move for name, move in countermoves(noisy).items() if name == "likelihood"]
    apart = torch.cat([(noisy.mean_gradients[n] - plain.mean_gradients[n]).flatten() for n in noisy.updates])
    assert float(apart.std()) == pytest.approx(next(iter(move.noise.values())), rel=0.1)


def test_clients_of_different_sizes_count_alike_in_the_lab(small, tmp_path):
    settings = small(
        defences="gaussian:std=1e-7", aggregation="secure", clients=4, partition="dirichlet:alpha=1.0", tap="1",
        attacks="gs:iterations=2",
    )  # fmt: skip
    rows = [row for row in privacy(audit(settings, tmp_path / "run", workers=0)) if row["defence"] != "none"]
    assert rows[0]["signal_to_noise"] > 100  # the only difference from the mean of plain gradients is the tiny noise
