"""The tripwire: each check finds its attack and nothing in honest models; a client that refuses sends nothing."""

import copy
import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradveil import create_model, load_dataset
from gradveil.attacks.base import Attack, Scene, build_attack
from gradveil.config import TrainSettings
from gradveil.engines.simulation import Simulation
from gradveil.engines.tripwire import Finding, TripwireWarning, check_model, check_update, inspect, inspect_attack
from gradveil.errors import TripwireError
from gradveil.runs.train import train
from gradveil.storage import save_tensors
from gradveil.types import Batch

SHAPE, PIXELS = (1, 28, 28), 784
SCENE = Scene(SHAPE, 10)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def digits():
    train = load_dataset("mnist-5k").train
    pick = torch.randperm(len(train.labels), generator=rng())[:256].numpy()
    images, labels = torch.from_numpy(train.images[pick]).float() / 255, torch.from_numpy(train.labels[pick])
    return Batch(images, labels, torch.zeros(256, dtype=torch.bool))


def checks(findings):
    return {finding.check for finding in findings}


def imprint(digits, bins=64, query=None):
    """Return a published imprint before a network: one query, thresholds at quantiles, equal columns behind."""
    query = torch.ones(PIXELS) / PIXELS if query is None else query
    answers = digits.images.flatten(1) @ query
    rows, back = nn.Linear(PIXELS, bins), nn.Linear(bins, PIXELS)
    with torch.no_grad():
        rows.weight.copy_(query.expand(bins, -1))
        rows.bias.copy_(-torch.quantile(answers, torch.arange(bins) / bins))
        back.weight.fill_(1.0)
    network = create_model("lenet5", SHAPE, 10, seed=0)
    return nn.Sequential(nn.Flatten(), rows, nn.ReLU(), back, nn.Unflatten(1, SHAPE), network)


def trap_rows(count, size=PIXELS, seed=0):
    """Return published trap weights: a random half negative, the rest 0.95 times the same magnitudes."""
    magnitudes = torch.randn(count, size // 2, generator=rng(seed)).abs() / 2
    order = torch.rand(count, size, generator=rng(seed + 1)).argsort(1)
    return torch.cat([-magnitudes, 0.95 * magnitudes], 1).gather(1, order)


def trapped(count=200, hidden=200):
    network = create_model(f"mlp:hidden={hidden}", SHAPE, 10, seed=0)
    with torch.no_grad():
        network.linear1.weight[:count] = trap_rows(count)
        network.linear1.bias[:count] = 0
    return network


@pytest.mark.parametrize("spec", ["mlp", "mlp:activation=sigmoid,init=uniform", "lenet5", "lenet-dlg", "logistic"])
def test_honest_models_raise_no_alarm(spec, digits):
    network = create_model(spec, SHAPE, 10, seed=1)
    assert inspect(network, digits, create_model(spec, SHAPE, 10, seed=2)) == []
    optimiser = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    for some in torch.arange(256).repeat(4).split(32):
        optimiser.zero_grad()
        F.cross_entropy(network(digits.images[some]), digits.labels[some]).backward()
        optimiser.step()
    assert inspect(network, digits) == []


@pytest.mark.parametrize("init", [nn.init.normal_, nn.init.uniform_, nn.init.orthogonal_, nn.init.zeros_])
@pytest.mark.parametrize("size", [(2, 9), (16, 25), (300, 30), (64, 784)])
def test_honest_initialisations_raise_no_alarm(init, size, digits):
    options = {"a": -0.5, "b": 0.5} if init is nn.init.uniform_ else {}
    for seed in range(2):
        layer = nn.Linear(size[1], size[0])
        init(layer.weight, generator=rng(seed), **options) if init is not nn.init.zeros_ else init(layer.weight)
        random = nn.Linear(PIXELS, size[1])
        network = nn.Sequential(nn.Flatten(), random, nn.Tanh(), layer, nn.ReLU(), nn.Linear(size[0], 10))
        assert [finding for finding in inspect(network, digits) if finding.layer == "3"] == []


def test_nearly_parallel_filters_are_honest_but_equal_ones_are_not(digits):
    network = create_model("lenet5", SHAPE, 10, seed=0)
    first = next(layer for layer in network.modules() if isinstance(layer, nn.Conv2d))
    with torch.no_grad():
        other = torch.randn(3, *first.weight.shape[1:], generator=rng())
        unit = first.weight[0] / first.weight[0].norm()
        near = unit + 0.15 * other / other.flatten(1).norm(dim=1).view(3, 1, 1, 1)
        first.weight[:3] = near
        cosines = F.cosine_similarity(near.flatten(1), near[:1].flatten(1))
        assert cosines[1:].min() > 0.95
        assert inspect(network, digits) == []
        first.weight[:3] = unit
        assert checks(inspect(network, digits)) == {"parallel-rows"}


def test_a_convolution_over_the_whole_image_is_inspected_as_a_linear_layer(digits):
    linear = imprint(digits)
    with torch.no_grad():
        rows = linear[1]
        noise = torch.randn(rows.weight.shape, generator=rng())
        rows.weight.add_(0.1 * noise / noise.norm(dim=1, keepdim=True) * rows.weight.norm(dim=1, keepdim=True))
        layer = nn.Conv2d(1, len(rows.weight), 28)
        layer.weight.copy_(rows.weight.view_as(layer.weight))
        layer.bias.copy_(rows.bias)
    convolved = nn.Sequential(layer, nn.Flatten(), *linear[2:])
    found = [{(f.check, f.family) for f in inspect(net, digits) if f.layer == name} for net, name in
             ((linear, "1"), (convolved, "0"))]  # fmt: skip
    assert found[0] == found[1]
    assert ("isolated-cells", "imprint") in found[1]


class Spy(nn.Module):
    """A layer that returns its input, and records the number of images and whether gradients are tracked."""

    met: ClassVar[list[tuple[int, bool]]] = []

    def forward(self, images):
        self.met.append((len(images), images.requires_grad))
        return images


@pytest.mark.parametrize(("side", "count"), [(32, 256), (48, 113), (96, 64)])
def test_large_images_cost_no_more_memory_than_small_ones(side, count):
    Spy.met.clear()
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(4), Spy(), nn.Flatten(),
        nn.Linear(64, 8), nn.ReLU(inplace=True), Spy(), nn.Linear(8, 100),
    )  # fmt: skip
    images = torch.rand(300, 3, side, side, generator=rng())
    inspect(network, Batch(images, torch.arange(300) % 100, torch.zeros(300, dtype=torch.bool)))
    assert Spy.met == [(count, False), (count, True)] * 2


def test_a_network_without_a_layer_that_sees_an_image_as_a_whole(digits):
    network = nn.Sequential(nn.Conv2d(1, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert inspect(network, digits) == []
    with torch.no_grad():
        network[0].weight.copy_(network[0].weight[:1].expand_as(network[0].weight))
    assert checks(inspect(network, digits)) == {"parallel-rows"}


def test_the_output_convolution_of_a_network_is_not_inspected(digits):
    network = nn.Sequential(nn.Conv2d(1, 10, 28), nn.Flatten())
    with torch.no_grad():
        network[0].weight.copy_(network[0].weight[:1].expand_as(network[0].weight))
    assert inspect(network, digits) == []


def test_a_single_image_that_activates_a_layer_is_no_alarm(digits):
    network = create_model("mlp:hidden=200", SHAPE, 10, seed=0)
    images = digits.images.clone()
    images[0] += 9  # as after a failed training: units that only an outlier activates
    with torch.no_grad():
        network.linear1.weight.abs_()
        brightest = network.linear1(digits.images.flatten(1)).amax(0)
        network.linear1.bias.sub_(1.01 * brightest)
    assert inspect(network, replace(digits, images=images)) == []


@pytest.mark.parametrize(("moving", "alarm"), [(1, False), (2, False), (3, True)])
def test_nearly_parallel_rows_count_if_three_images_activate_them(moving, alarm, digits):
    network = create_model("mlp:hidden=200", SHAPE, 10, seed=0)
    with torch.no_grad():
        noise = torch.randn(5, PIXELS, generator=rng())
        common = torch.rand(PIXELS, generator=rng(1))
        rows = common / common.norm() + 0.15 * noise / noise.norm(dim=1, keepdim=True)
        network.linear1.weight[:5] = rows
        brightest = (digits.images.flatten(1) @ rows.T).topk(moving + 1, dim=0).values
        network.linear1.bias[:5] = -brightest[-2:].mean(0)  # the number of images that activate each row
    assert bool(inspect(network, digits)) == alarm


def test_an_imprint_is_found_by_three_checks(digits):
    found = [finding for finding in inspect(imprint(digits), digits) if finding.layer == "1"]
    assert checks(found) == {"parallel-rows", "bias-ladder", "isolated-cells"}
    assert {finding.family for finding in found} == {"imprint"}
    parallel = next(finding for finding in found if finding.check == "parallel-rows")
    assert parallel == Finding("parallel-rows", "1", "imprint", 1.0, "64 of 64 rows are parallel; honest rows are not.")
    ladder = next(finding for finding in found if finding.check == "bias-ladder")
    answers = digits.images.flatten(1).mean(1)
    cells = torch.bucketize(answers, torch.quantile(answers, torch.arange(64) / 64)).unique()
    assert ladder.score == pytest.approx(len(cells) / 256, abs=2 / 256)


def noise(layer, share):
    extra = F.normalize(torch.randn(layer.weight.shape, generator=rng()), dim=1)
    layer.weight += share * extra * layer.weight.norm(dim=1, keepdim=True)


def shuffle(layer):
    order = torch.randperm(len(layer.weight), generator=rng())
    layer.weight.copy_(layer.weight[order])
    layer.bias.copy_(layer.bias[order])


def gains(layer):
    factors = torch.rand(len(layer.weight), generator=rng()) + 0.1
    layer.weight *= factors[:, None]
    layer.bias *= factors


def rim(layer):
    """Return rows that look orthogonal, by weights on pixels that are always black."""
    layer.weight[:, :28] = torch.randn(len(layer.weight), 28, generator=rng())


def half(layer):
    layer.weight[::2] = torch.randn(layer.weight[::2].shape, generator=rng())
    layer.bias[::2] = 0


@pytest.mark.parametrize("change", [lambda layer: noise(layer, 0.1), shuffle, gains, rim, half])
@pytest.mark.parametrize("bins", [8, 64])
def test_a_changed_imprint_is_still_found(change, bins, digits):
    network = imprint(digits, bins)
    with torch.no_grad():
        change(network[1])
    found = [finding for finding in check_model(network, digits) if finding.layer == "1"]
    assert {"parallel-rows", "bias-ladder"} <= checks(found)


def test_an_imprint_that_misses_the_images_is_found_by_its_weights(digits):
    network = imprint(digits)
    with torch.no_grad():
        network[1].bias.sub_(10)
    assert "parallel-rows" in checks(finding for finding in check_model(network, digits) if finding.layer == "1")


@pytest.mark.parametrize(
    ("spec", "model", "layer", "check"),
    [
        ("imprint:form=one-shot,bins=64", "lenet5", "inserted.rows", "ramp"),
        ("imprint:form=one-shot,bins=2000", "lenet5", "inserted.rows", "ramp"),
        ("imprint:form=one-shot,bins=64,where=first", "mlp", "linear1", "twin-rows"),
        ("imprint:form=one-shot,bins=64,where=first,gain=1", "mlp", "linear1", "twin-rows"),
        ("imprint:form=sparse", "lenet5", "inserted.rows", "bias-ladder"),
    ],
)
def test_an_imprint_with_ramps_or_with_a_single_bin_is_found(spec, model, layer, check, digits):
    network = create_model(model, SHAPE, 10, seed=0)
    assert inspect(network, digits) == []
    found = inspect_attack(build_attack(spec), network, SCENE._replace(public_data=digits[:128]), digits, rng())
    assert (check, layer, "imprint") in {(finding.check, finding.layer, finding.family) for finding in found}


def test_a_pair_of_rows_without_a_gap_or_with_columns_of_its_own_is_honest(digits):
    network = create_model("mlp", SHAPE, 10, seed=0)
    with torch.no_grad():
        network.linear1.weight[1], network.linear1.bias[1] = network.linear1.weight[0], network.linear1.bias[0]
        network.linear2.weight[:, 1] = -network.linear2.weight[:, 0]
        assert inspect(network, digits) == []  # copies of one row
        network.linear1.bias[1] += 0.01
        assert checks(inspect(network, digits)) == {"twin-rows"}
        network.linear2.weight[:, 1] = network.linear2.weight[:, 2]
    assert inspect(network, digits) == []


def test_trap_weights_are_found(digits):
    found = check_model(trapped(), digits)
    assert {"mirrored-rows", "balanced-rows"} <= checks(found)
    assert {(finding.layer, finding.family) for finding in found} == {("linear1", "trap-weights")}


def test_few_traps_are_found_by_their_mirrored_halves(digits):
    assert checks(check_model(trapped(count=5), digits)) == {"mirrored-rows"}


def test_noisy_traps_are_found_by_their_balance(digits):
    network = trapped()
    with torch.no_grad():
        noise(network.linear1, 0.3)
    assert checks(check_model(network, digits)) == {"balanced-rows"}


def test_rows_that_one_image_passes_are_found_in_model_and_gradient(digits):
    forty = digits[torch.arange(40)]
    pixels = F.normalize(forty.images.flatten(1), dim=1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 40), nn.ReLU(), nn.Linear(40, 10))
    with torch.no_grad():
        network[1].weight.copy_(pixels)
        closest = (pixels @ forty.images.flatten(1).T).sort(1).values[:, -2:]
        network[1].bias.copy_(-closest.mean(1))  # between the row's best image and the next
    assert checks(check_model(network, forty)) == {"single-firing"}
    found = check_update(network, forty)
    assert checks(found) == {"isolated-rows"}
    assert found[0].score > 0.5
    assert "of the gradient come from one image only (of 40 images); at most 5.8 are expected" in found[0].sentence
    assert inspect(network, digits[torch.arange(20)]) == []  # single images activate honest rows too


def test_rows_that_detect_one_of_many_classes_are_no_alarm():
    """Each row is activated by the four images of its class, of which at most a few are inspected."""
    labels = torch.arange(200).repeat(4)
    data = Batch(F.one_hot(labels, 200).float().view(-1, 1, 10, 20), labels, torch.zeros(800, dtype=torch.bool))
    network = nn.Sequential(nn.Flatten(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 200))
    with torch.no_grad():
        network[1].weight.copy_(torch.rand(200, 200, generator=rng()).neg().fill_diagonal_(1))
        network[1].bias.zero_()
    assert (network[1](data.images.flatten(1)) > 0).sum(0).eq(4).all()
    assert inspect(network, data) == []


@pytest.mark.parametrize("confidence", [20.0, 500.0])  # at the second the others' gradients are exactly 0
def test_one_badly_classified_image_is_no_alarm(confidence, digits):
    network = create_model("mlp", SHAPE, 10, seed=0)
    with torch.no_grad():
        network.linear.weight.mul_(1e-3)
        network.linear.bias.copy_(confidence * F.one_hot(torch.tensor(3), 10))
    labels = torch.full((40,), 3)
    labels[7] = 4
    assert check_update(network, replace(digits[torch.arange(40)], labels=labels)) == []


def test_the_layer_that_gives_the_result_may_have_parallel_rows(digits):
    network = create_model("logistic", SHAPE, 10, seed=0)
    with torch.no_grad():
        network.linear.weight.copy_(network.linear.weight[:1].expand(10, -1))
    assert inspect(network, digits) == []


def test_parallel_filters_are_found(digits):
    network = create_model("lenet5", SHAPE, 10, seed=0)
    with torch.no_grad():
        network.conv2.weight[3:9] = network.conv2.weight[3] * torch.arange(1, 7).view(6, 1, 1, 1)
    (finding,) = check_model(network, digits)
    assert (finding.check, finding.layer, finding.score) == ("parallel-rows", "conv2", 6 / 16)


@pytest.mark.parametrize(
    ("change", "layer", "sentence"),
    [
        (
            lambda net: setattr(net, "act1", nn.Identity()),
            "act1",
            "ReLU() was agreed on, got Identity().",
        ),
        (
            lambda net: net.add_module("extra", nn.Linear(10, 10, bias=False)),
            "extra",
            "nothing was agreed on, got Linear(weight (10, 10)).",
        ),
        (
            lambda net: setattr(net, "linear", nn.Linear(200, 12)),
            "linear",
            "Linear(weight (10, 200), bias (10,)) was agreed on, got Linear(weight (12, 200), bias (12,)).",
        ),
    ],
)
def test_differences_from_the_agreed_network_are_named(change, layer, sentence, digits):
    agreed = create_model("mlp", SHAPE, 10, seed=0)
    network = copy.deepcopy(agreed)
    change(network)
    found = check_model(network, digits, agreed)
    assert Finding("not-agreed", layer, "any", 1.0, sentence) in found
    assert checks(check_model(network, digits)) == set()


def test_the_network_and_the_random_state_do_not_change(digits):
    network = imprint(digits).train()
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    assert inspect(network, digits) == inspect(network, digits)
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert network.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in network.parameters())
    assert not any(layer._forward_hooks for layer in network.modules())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_images_are_enough_to_inspect_weights_and_raise_no_alarm(count, digits):
    few = digits[torch.arange(count)]
    assert inspect(create_model("mlp", SHAPE, 10, seed=0), few) == []
    assert "mirrored-rows" in checks(inspect(trapped(), few))
    assert "parallel-rows" in checks(inspect(imprint(digits), few))


def test_soft_labels_and_non_finite_numbers(digits):
    soft = replace(digits, labels=F.one_hot(digits.labels, 10).float())
    assert inspect(trapped(), soft) == inspect(trapped(), digits)
    broken = create_model("mlp", SHAPE, 10, seed=0)
    with torch.no_grad():
        broken.linear1.weight.fill_(torch.nan)
    assert inspect(broken, digits) == []


@dataclass(frozen=True)
class Traps(Attack):
    """A defence that alters the model as a malicious server would."""

    def alter(self, network, seen, rng):
        with torch.no_grad():
            network.linear1.weight.copy_(trap_rows(200))
        return nn.Sequential(network)

    def run(self, seen, rng):
        raise NotImplementedError


def test_an_attack_can_be_measured(digits):
    network = create_model("mlp", SHAPE, 10, seed=0)
    before = copy.deepcopy(network.state_dict())
    found = inspect_attack(Traps(), network, SCENE, digits, rng())
    assert checks(found) == {"mirrored-rows", "balanced-rows"}
    assert "not-agreed" in checks(inspect_attack(Traps(), network, SCENE, digits, rng(), agreed=True))
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


SETTINGS = TrainSettings(clients=2, rounds=2, partition="iid:images=40", model="mlp", momentum=0.0)


def play(mode, network=None):
    with Simulation(replace(SETTINGS, tripwire=mode), workers=0, network=network) as simulation:
        rows = [row["loss"] for row in simulation.run()]
        return rows, simulation.model


def test_refusing_sends_nothing_and_names_what_was_found():
    with pytest.raises(TripwireError, match=r"client \d received in round 1 must contain no traps, got \d: .*linear1"):
        play("refuse", trapped)


def test_warnings_come_once_per_client_and_round_and_change_nothing():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows, model = play("warn", trapped)
    assert [item.category for item in caught] == [TripwireWarning] * 4
    silent_rows, silent = play("off", trapped)
    assert rows == silent_rows
    assert all(torch.equal(model[name], silent[name]) for name in model)


@pytest.mark.parametrize("workers", [0, 2])
def test_rounds_count_the_clients_that_warn(workers, tmp_path):
    save_tensors(tmp_path / "trapped.safetensors", trapped().state_dict())
    settings = replace(SETTINGS, model="mlp:hidden=200", weights=str(tmp_path / "trapped.safetensors"), rounds=1)
    for mode, rest in (("warn", {"tripwire_warnings": 2}), ("off", {})):
        with (
            warnings.catch_warnings(record=True) as caught,
            Simulation(replace(settings, tripwire=mode), workers=workers) as simulation,
        ):
            warnings.simplefilter("always")
            (row,) = simulation.run()
        assert {key: value for key, value in row.items() if key.startswith("tripwire")} == rest
        assert len(caught) == (2 if mode == "warn" else 0)


def test_a_refused_training_can_be_resumed_with_warnings(tmp_path):
    save_tensors(tmp_path / "trapped.safetensors", trapped().state_dict())
    settings = replace(SETTINGS, model="mlp:hidden=200", weights=str(tmp_path / "trapped.safetensors"), rounds=1)
    with pytest.raises(TripwireError, match=r"check the server, or continue with --resume --tripwire warn"):
        train(replace(settings, tripwire="refuse"), tmp_path / "run", workers=0)
    with pytest.warns(TripwireWarning):
        result = train(replace(settings, tripwire="warn"), tmp_path / "run", resume=True, workers=0)
    assert [row["tripwire_warnings"] for row in result.rows] == [2]


def test_honest_runs_finish():
    assert play("refuse")[0] == play("off")[0]


def test_parallel_rows_behind_a_layer_that_is_switched_off_are_honest(digits):
    """As after a training that failed: the layer before passes nothing, or a few images."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 10)]
    network = nn.Sequential(*layers)
    with torch.no_grad():
        layers[3].weight[:] = layers[3].weight[:1] * torch.linspace(0.5, 2, 10)[:, None]
        assert "parallel-rows" in checks(check_model(network, digits))
        most = layers[1](digits.images.flatten(1)).amax(1).sort(descending=True).values
        most = torch.cat([most[:1] + 1, most])
        for passing, alarm in ((0, False), (2, False), (4, True)):
            bound = (most[passing] + most[passing + 1]) / 2
            layers[1].bias.sub_(bound)
            assert checks(check_model(network, digits)) == ({"parallel-rows"} if alarm else set())
            layers[1].bias.add_(bound)
