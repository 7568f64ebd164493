"""PRECODE: the variational bottleneck, its loss, and the attacks that bypass it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from gradveil.attacks import build_attack
from gradveil.attacks.parts.countermoves import countermoves
from gradveil.attacks.parts.local_training import replay_of
from gradveil.defences import Client, build_defence
from gradveil.defences.countermove import Arrived
from gradveil.defences.parts.accounting import Releases
from gradveil.defences.precode import Bottleneck, divergence
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError
from gradveil.federated.protocol import ONE_GRADIENT, LocalSettings, Protocol
from gradveil.models import create_model
from gradveil.registry import components
from gradveil.secret_stream import SecretStream, layer_stream
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.scene import psnr


def make(spec="precode:size=5", model="lenet-dlg", shape=(1, 12, 12)):
    return build_defence(spec).on_model(create_model(model, shape, 3, 0), SecretStream(0))


def some(count=3):
    rng = torch.Generator().manual_seed(1)
    return Batch(torch.rand(count, 1, 12, 12, generator=rng), torch.arange(count) % 3, torch.zeros(count) > 0)


def test_the_bottleneck_is_the_equation():
    network = make()
    block = network.fc.precode
    features = torch.randn(4, 108)
    encoded = features @ block.encoder.weight.T + block.encoder.bias
    spread = (1 + encoded[:, 5:].exp()).log()
    torch.manual_seed(7)
    drawn = layer_stream().normal((4, 5))
    torch.manual_seed(7)
    expected = (encoded[:, :5] + spread * drawn) @ block.decoder.weight.T + block.decoder.bias
    assert torch.allclose(block.train()(features), expected, atol=1e-5)
    mean = encoded[:, :5] @ block.decoder.weight.T + block.decoder.bias
    assert torch.allclose(block.eval()(features), mean, atol=1e-5)


def test_the_divergence_is_torchs_in_bits():
    encoded = torch.randn(6, 14, dtype=torch.float64)
    mean, spread = encoded[:, :7], nn.functional.softplus(encoded[:, 7:])
    expected = kl_divergence(Normal(mean, spread), Normal(torch.zeros(()), torch.ones(()))).sum(1)
    assert torch.allclose(divergence(encoded), expected / torch.log(torch.tensor(2.0)).double())


@pytest.mark.parametrize("model", ["resnet20:width=4", "lenet-dlg"])
def test_the_gradient_gains_that_of_the_divergence(model):
    defence, network, batch = build_defence("precode:size=5,beta=0.3"), make(model=model).train(), some()
    parameters = dict(network.named_parameters())
    plain = {name: torch.randn_like(p) for name, p in parameters.items()}
    kept = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    before = torch.get_rng_state()
    client = Client(0, 1, network, {}, batch, {}, {}, SecretStream(0))
    found = defence.on_gradient(plain, batch, client)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(kept[name], tensor) for name, tensor in network.state_dict().items())
    (block,) = (layer for layer in network.modules() if isinstance(layer, Bottleneck))
    encoded = []
    handle = block.encoder.register_forward_hook(lambda layer, inputs, output: encoded.append(output))
    network(batch.images)
    handle.remove()
    term = 0.3 * divergence(encoded[0]).mean()
    slopes = torch.autograd.grad(term, list(parameters.values()), allow_unused=True)
    assert sum(slope is not None for slope in slopes) >= 4
    for (name, tensor), slope in zip(plain.items(), slopes, strict=True):
        expected = tensor if slope is None else tensor + slope
        assert torch.allclose(found[name], expected, atol=1e-5), name


@pytest.mark.parametrize("model", list(components("models")))
def test_every_model_of_the_zoo_gets_one_before_its_last_layer(model):
    small = {"densenet121": ":growth=4", "convnet": ":width=4", "vgg16": ":width=4"}
    spec = model + small.get(model, ":width=4" if "resnet" in model else "")
    shape = (3, 32, 32)
    if model == "logistic":
        shape = (3, 8, 8)
    network = make(model=spec, shape=shape).eval()
    names = [name for name, _ in network.named_parameters()]
    assert sum(isinstance(layer, Bottleneck) for layer in network.modules()) == 1
    last = ["linear"] if model in ("patches", "frozen") else ["linear", "linear"]  # a head has no bias of its own
    assert [name.split(".")[-2] for name in names][-4 - len(last) :] == ["encoder"] * 2 + ["decoder"] * 2 + last
    assert network(torch.rand(2, *shape)).shape == (2, 3)
    build_defence("precode:size=5").check(network, shape)


class Own(nn.Module):
    """A user's network; with ``traced=False`` it branches on the data, so torch.fx cannot trace it."""

    def __init__(self, way, *, traced=True):
        super().__init__()
        self.way, self.traced = way, traced
        self.last, self.gate, self.conv = nn.Linear(144, 3), nn.Linear(144, 144), nn.Conv2d(1, 3, 12)

    def forward(self, images):
        if not self.traced and images.sum() > 1e9:
            return images
        return self.way(self, images, images.flatten(1))


def gated(net, images, flat):
    return net.last(flat * net.gate(flat).sigmoid())


def softened(net, images, flat):
    return net.last(flat).log_softmax(1)


def beside(net, images, flat):
    return net.conv(images).flatten(1) + net.last(flat)


def behind(net, images, flat):
    return net.conv(net.gate(flat).view_as(images)).flatten(1)


def unused(net, images, flat):
    return net.conv(images).flatten(1) + 0 * net.last(flat).detach()


def twice(net, images, flat):
    return net.last(flat) + net.last(-flat)


def own_with_bottleneck(network):
    defence = build_defence("precode:size=5")
    result = defence.on_model(network, SecretStream(0))
    defence.check(result, (1, 12, 12))
    return next(name for name, layer in result.named_modules() if isinstance(layer, Bottleneck))


@pytest.mark.parametrize("way", [gated, softened])
def test_in_a_users_network_it_stands_before_the_layer_that_is_called_last(way):
    assert own_with_bottleneck(Own(way)) == "last.precode"


@pytest.mark.parametrize(
    ("network", "found"),
    [
        (Own(gated, traced=False), r"'gate\.linear', 'last'"),
        (Own(beside), r"'conv', 'last\.linear'"),
        (Own(behind), r"'gate\.linear', 'conv'"),
        (Own(unused), "'conv'"),
        (Own(twice), r"'last\.precode\.encoder', 'last\.precode\.decoder', 'last\.linear'"),
    ],
)
def test_a_network_whose_result_comes_from_elsewhere_is_refused_before_any_work(network, found):
    with pytest.raises(ConfigError, match=rf"alone must give the network's result, got it from {found}\."):
        own_with_bottleneck(network)


def test_server_and_clients_share_the_bottleneck_and_it_trains(tiny):
    with Simulation(replace(tiny, defence="precode:size=8", model="mlp:hidden=8"), workers=0) as simulation:
        start = {name: tensor.clone() for name, tensor in simulation.model.items()}
        rows = list(simulation.run())
    assert not simulation.net.has_private
    assert any("precode.encoder" in name for name in start)
    assert all(not torch.equal(start[name], tensor) for name, tensor in simulation.model.items())
    assert rows[-1]["accuracy"] > 0


def test_an_empty_batch_has_no_divergence():
    network, batch = make().train(), some()
    plain = {name: torch.randn_like(p) for name, p in network.named_parameters()}
    client = Client(0, 1, network, {}, batch, {}, {}, SecretStream(0))
    assert build_defence("precode:size=5").on_gradient(plain, batch[slice(0, 0)], client) is plain


def test_it_trains_behind_dp_sgd_without_a_guarantee(tiny):
    settings = replace(tiny, defence="dp-sgd+precode:size=8", model="mlp:hidden=8", rounds=1)
    with Simulation(settings, workers=0) as simulation:
        (row,) = simulation.run()
        assert math.isfinite(row["loss"])
        assert simulation.defence.budget(Releases(8, 4, 2, 1)) is None


# --- attacks that bypass it -------------------------------------------------------------------------------------------


def seen_by(*grants, model="lenet-dlg", spec="precode:size=16", size=1):
    network = create_model(model, (1, 12, 12), 4, 0).eval()
    coarse = torch.rand(2 * size, 1, 4, 4, generator=torch.Generator().manual_seed(3))
    truth = nn.functional.interpolate(coarse, (12, 12), mode="bilinear").view(2, size, 1, 12, 12)
    private = [Batch(own, torch.arange(size), torch.zeros(size) > 0) for own in truth]
    threat = ThreatModel.of("labels", "num-examples", *grants)
    return truth, observe(network, private, threat=threat, num_classes=4, defence=build_defence(spec))


def test_a_first_layer_gives_the_image_whatever_comes_behind():
    truth, seen = seen_by(model="mlp:hidden=20")
    result = build_attack("linear")(seen, torch.Generator())
    assert psnr(truth[:, 0], result.images[:, 0]).min() > 60


def test_knowing_searching_or_leaving_out_what_was_drawn_goes_around_it():
    found = {}
    for adapt in ("none", "solved", "joint", "omit"):
        truth, seen = seen_by("defence")
        attack = build_attack(f"gs:iterations=150,sign=none,schedule=cosine,lr=0.3,tv=1e-6,adapt={adapt}")
        result = attack(seen, torch.Generator().manual_seed(0))
        found[adapt] = float(psnr(truth[:, 0], result.images[:, 0]).mean())
    assert found["solved"] > 25, found
    assert found["joint"] > found["none"] + 3, found
    assert found["omit"] > found["none"] + 0.5, found


def test_what_was_drawn_is_two_divisions_away():
    defence, batch = build_defence("precode:size=5,beta=0.3"), some(1)
    network = make("precode:size=5,beta=0.3").double().train()
    batch = replace(batch, images=batch.images.double())
    parameters = dict(network.named_parameters())
    torch.manual_seed(7)
    drawn = layer_stream().normal((1, 5), torch.float64)
    torch.manual_seed(7)
    loss = nn.functional.cross_entropy(network(batch.images), batch.labels)
    gradient = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    sent = defence.on_gradient(gradient, batch, Client(0, 1, network, {}, batch, {}, {}, SecretStream(0)))
    arrived = Arrived({name: tensor[None] for name, tensor in sent.items()}, [1.0], network=network)
    found = defence.adaptive(arrived)["solved"].outputs["fc.precode.noise"]
    assert torch.allclose(found, drawn, atol=1e-9)
    assert list(defence.adaptive(replace(arrived, steps=[1.0, 1.0]))) == ["omit"]
    assert list(defence.adaptive(replace(arrived, batch_size=2))) == ["omit"]


def test_the_countermoves_name_the_bottleneck_and_what_follows():
    _, seen = seen_by("defence")
    moves = countermoves(seen)
    assert list(moves) == ["solved", "joint", "omit"]
    assert set(moves["omit"].weights) == {name for name in seen.updates if name.startswith("fc.")}
    assert set(moves["omit"].weights.values()) == {0.0}
    assert moves["joint"].unknowns["fc.precode.noise"](3, torch.Generator()).shape == (3, 16)
    _, several = seen_by("defence", size=2)
    assert list(countermoves(several)) == ["omit"]


@pytest.mark.parametrize("local", [ONE_GRADIENT, LocalSettings(epochs=1, batch_size=0, weight_decay=1e-9)])
def test_an_attacker_who_knows_the_loss_explains_the_update(local):
    """With softplus(rho) = 0 nothing is drawn; then the true image's gradient, KL term included, is the update."""
    network = create_model("lenet-dlg", (1, 12, 12), 4, 0).eval()
    defence = build_defence("precode:size=6,beta=0.5")

    class Quiet(type(defence)):
        def on_model(self, model, rng):
            model = super().on_model(model, rng)
            with torch.no_grad():
                model.fc.precode.encoder.weight[6:].zero_()
                model.fc.precode.encoder.bias[6:].fill_(-12.0)
            return model

    batch = some(2)
    threat = ThreatModel.of("labels", "num-examples", "local-steps", "defence")
    how = {"defence": Quiet(size=6, beta=0.5), "protocol": Protocol(local, 1e-3)}
    seen = observe(network, [batch], threat=threat, num_classes=4, **how)
    replay = replay_of(seen, "unroll", torch.Generator())
    knowing = replace(replay, penalties=countermoves(seen)["omit"].penalties)
    wanted = seen.mean_gradients
    for each, good in ((knowing, True), (replay, False)):
        found = each(batch.images, batch.labels, wanted)
        off = max(
            float((found[name].detach() - aim).norm() / aim.norm()) for name, aim in wanted.items() if aim.norm() > 1e-4
        )
        assert (off < 0.02) == good, off


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "message"), [("size=0", "size must be at least 1"), ("beta=-1", "beta must be")])
def test_bad_settings(setting, message):
    with pytest.raises(ConfigError, match=message):
        build_defence(f"precode:{setting}")


def test_a_network_without_a_linear_layer_or_with_a_bottleneck_is_refused():
    bare = nn.Sequential(nn.Conv2d(1, 3, 12), nn.Flatten())
    with pytest.raises(ConfigError, match=r"has no nn\.Linear"):
        build_defence("precode").on_model(bare, SecretStream(0))
    with pytest.raises(ConfigError, match="once in a chain"):
        make("precode+precode")
