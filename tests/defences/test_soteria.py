import copy
import math
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.defences import Arrived, Chain, Client, build_defence, soteria
from gradveil.defences.prune import Prune
from gradveil.defences.soteria import Soteria, feature_scores
from gradveil.errors import ConfigError, DefenceError
from gradveil.federated.client import train_locally
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.models import create_model
from gradveil.registry import components
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch

SHAPE = (1, 28, 28)


def make_batch(count, seed=0, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 6, 6, generator=rng, dtype=torch.float64).to(dtype)
    return Batch(images, torch.randint(0, 3, (count,), generator=rng), torch.zeros(count) > 0)


def make_model(between=None, activation=nn.Sigmoid):
    torch.manual_seed(1)
    layers = OrderedDict(
        conv=nn.Conv2d(1, 3, 3), between=between or nn.Identity(), act=activation(), pool=nn.MaxPool2d(2),
        flatten=nn.Flatten(), hidden=nn.Linear(12, 7), tanh=nn.Tanh(), last=nn.Linear(7, 3),
    )  # fmt: skip
    return nn.Sequential(layers).double()


def make_client(model, batch, seed=0):
    return Client(0, 1, model, {}, batch, {}, {}, SecretStream(seed))


def plain_gradient(model, batch):
    model = copy.deepcopy(model)  # in training mode its statistics would change
    loss = F.cross_entropy(model(batch.images), batch.labels)
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def protect(defence, model, batch, seed=0):
    return defence.on_gradient(plain_gradient(model, batch), batch, make_client(model, batch, seed))


def representation(model, images, layer=-1):
    return model[:layer](images)


def naive_norms(model, images, layer=-1, order=2):
    """Compute the norms by one backward pass per feature and image, as the authors' code does."""
    rows = []
    for image in images:
        leaf = image.unsqueeze(0).requires_grad_()
        features = representation(model, leaf, layer)[0]
        slopes = [torch.autograd.grad(feature, leaf, retain_graph=True)[0] for feature in features]
        rows.append(torch.stack([torch.linalg.vector_norm(slope, order) for slope in slopes]))
    return torch.stack(rows)


def naive(model, batch, number, layer=-1, order=2):
    """Return the layer's weight gradient by Algorithms 1 and 2, with a loop over images and features."""
    norms, total = naive_norms(model, batch.images, layer, order), 0
    for index in range(len(batch)):
        one = batch[slice(index, index + 1)]
        r = representation(model, one.images, layer).detach()
        output = model[layer](r).requires_grad_()
        logits = output if layer == -1 else model[layer + 1 :](output)
        (delta,) = torch.autograd.grad(F.cross_entropy(logits, one.labels), output)
        for feature in (r[0].abs() / norms[index]).argsort(descending=True)[:number]:
            r[0, feature] = 0
        total = total + torch.outer(delta[0], r[0])
    return total / len(batch)


def close(one, other, atol=1e-12):
    return one.keys() == other.keys() and all(torch.allclose(one[k], other[k], atol=atol, rtol=1e-9) for k in one)


def test_a_value_worked_by_hand():
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    model[1].weight.data = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])  # norms 5, 1, 2
    model[2].weight.data.zero_()  # both classes at 1/2, so delta = (-1/2, 1/2)
    batch = Batch(torch.tensor([[[[1.0, 1.0]]]]), torch.tensor([0]), torch.tensor([False]))
    # r = (7, 1, 2), scores 1.4, 1, 1
    found = protect(Soteria(count=1), model, batch)["2.weight"]
    assert found.tolist() == [[0.0, -0.5, -1.0], [0.0, 0.5, 1.0]]
    found = protect(Soteria(prune=0.6), model, batch)["2.weight"]  # 1.8, rounded up; the first of the equal ones
    assert found.tolist() == [[0.0, 0.0, -1.0], [0.0, 0.0, 1.0]]
    # by norm 1: 7, 1, 2 and scores 1, 1, 1; by norm inf: 4, 1, 2 and 1.75, 1, 1
    assert protect(Soteria(count=1, norm=1.0), model, batch)["2.weight"][1].tolist() == [0.0, 0.5, 1.0]
    # the authors': 5 / 7.1, 1 / 1.1, 2 / 2.1; the smallest is pruned
    assert protect(Soteria(count=1, scores="batch"), model, batch)["2.weight"][1].tolist() == [0.0, 0.5, 1.0]
    assert protect(Soteria(count=2, scores="batch"), model, batch)["2.weight"][1].tolist() == [0.0, 0.0, 1.0]


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 9), st.integers(0, 7), st.sampled_from([1.0, 2.0, math.inf]), st.integers(0, 9))
def test_the_gradient_is_the_naive_loops(count, number, norm, seed):
    model, batch = make_model(), make_batch(count, seed)
    found = protect(Soteria(prune=number / 7, norm=norm), model, batch)
    expected = {**plain_gradient(model, batch), "last.weight": naive(model, batch, number, order=norm)}
    assert close(found, expected)


def test_few_images_and_products_at_a_time_give_the_same(monkeypatch):
    model, batch = make_model(), make_batch(5)
    expected = protect(Soteria(), model, batch)
    monkeypatch.setattr(soteria, "_MOST_NUMBERS", 80)
    assert close(protect(Soteria(), model, batch), expected)


@pytest.mark.parametrize("layers", [("hidden",), ("hidden", "last")])
def test_other_layers_and_several(layers):
    model, batch = make_model(), make_batch(4)
    found = protect(Soteria(layers=layers, prune=0.5), model, batch)
    expected = {**plain_gradient(model, batch), "hidden.weight": naive(model, batch, 6, layer=-3)}
    if "last" in layers:
        expected["last.weight"] = naive(model, batch, 4)
    assert close(found, expected)
    assert build_defence(f"soteria:layers={'/'.join(layers)}").layers == layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("between", [None, nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False)])
@pytest.mark.parametrize("training", [True, False])
def test_with_nothing_pruned_the_gradient_stays(dtype, between, training):
    model = make_model(between).to(dtype).train(training)
    model.append(nn.BatchNorm1d(3).to(dtype).train(training))  # mixes images after the layer
    batch = make_batch(5, dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert close(protect(Soteria(prune=0.0), model, batch), plain_gradient(model, batch), tolerance)


def test_in_a_step_of_training_it_is_what_is_sent():
    model, batch = make_model(), make_batch(4)
    net = FlatModel(copy.deepcopy(model))
    how, order = LocalSettings("fedsgd", batch_size=0), SecretStream(0)
    received = net.values[net.shared].clone()
    update = train_locally(net, received, make_client(net.module, batch), Soteria(), how, 0.5, order)
    expected = {**plain_gradient(model, batch), "last.weight": naive(model, batch, 5)}
    assert close(dict(update.tensors), {name: -0.5 * tensor for name, tensor in expected.items()})


def test_batch_norm_in_training_mode_has_its_statistics_held_fixed():
    norm = nn.BatchNorm2d(3, momentum=None).double()
    model, batch = make_model(norm, activation=nn.ReLU).train(), make_batch(6)
    kept = copy.deepcopy(model.state_dict())
    found = protect(Soteria(prune=0.4), model, batch)
    assert model.training
    assert all(torch.equal(kept[key], value) for key, value in model.state_dict().items())
    fixed = copy.deepcopy(model).eval()
    with torch.no_grad():
        fixed[1].running_var, fixed[1].running_mean = torch.var_mean(model[0](batch.images), (0, 2, 3), correction=0)
    assert torch.allclose(found["last.weight"], naive(fixed, batch, 3), atol=1e-12)


def test_dropout_draws_from_the_clients_stream_and_is_off_for_the_ranking():
    torch.manual_seed(0)
    model, batch = make_model(nn.Dropout(0.5)).train(), make_batch(4)
    gradient, before = plain_gradient(model, batch), torch.get_rng_state()
    results = [
        Soteria().on_gradient(gradient, batch, make_client(model, batch, seed))["last.weight"] for seed in (0, 0, 1)
    ]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(("model", "forward"), [("lenet-dlg", True), ("lenet5", False), ("convnet:width=32", False)])
def test_features_are_ranked_forward_where_that_is_cheaper(model, forward, monkeypatch):
    """Forward mode is used for few channels and at most twice as many pixels as features."""
    asked = []
    monkeypatch.setattr(
        "gradveil.defences.soteria.jacobian_row_norms",
        lambda features, images, *, forward, **rest: asked.append(forward) or features(images).abs(),
    )
    network = create_model(model, (1, 28, 28), 10, 0)
    images = torch.rand(1, 1, 28, 28)
    batch = Batch(images, torch.zeros(1, dtype=torch.long), torch.zeros(1) > 0)
    Soteria().on_gradient(plain_gradient(network, batch), batch, make_client(network, batch, 0))
    assert asked == [forward]


@pytest.mark.parametrize("probes", [0, 4])
def test_networks_that_draw_in_training_are_ranked_without(probes):
    torch.manual_seed(0)

    class Drops(nn.Module):
        def forward(self, features):
            return F.dropout(features, 0.5, self.training)

    model, batch = make_model(Drops()).train(), make_batch(4)
    gradient = plain_gradient(model, batch)
    results = [
        Soteria(probes=probes).on_gradient(gradient, batch, make_client(model, batch, 0))["last.weight"]
        for _ in range(2)
    ]
    assert torch.equal(*results)


def test_soft_labels():
    model, batch = make_model(), make_batch(4)
    soft = replace(batch, labels=F.one_hot(batch.labels, 3).double() * 0.7 + 0.1)
    assert torch.allclose(protect(Soteria(count=3), model, soft)["last.weight"], naive(model, soft, 3), atol=1e-12)


def test_dead_features_go_last_and_features_without_slope_first():
    inputs, norms = torch.tensor([[0.0, 0.0, -2.0, 3.0]]), torch.tensor([[0.0, 1.0, 4.0, 0.0]])
    assert feature_scores(inputs, norms).tolist() == [[0.0, 0.0, 0.5, math.inf]]
    assert Soteria(count=2)._pruned("fc", inputs, norms).tolist() == [[False, False, True, True]]
    model, batch = make_model(activation=nn.ReLU), make_batch(3)
    model[0].bias.data.fill_(-100.0)  # all dead: the second Linear sees its own bias only
    found = protect(Soteria(), model, batch)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    assert (found["last.weight"].abs().sum(0) > 0).tolist() == [False] * 5 + [True] * 2


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 6), st.floats(0, 1), st.integers(0, 9))
def test_scores_of_the_batch_are_the_authors(count, prune, seed):
    model, batch = make_model(), make_batch(count, seed)
    found = protect(Soteria(prune=prune, scores="batch", layers=("hidden",)), model, batch)["hidden.weight"]
    r = representation(model, batch.images, -3).detach()
    score = (naive_norms(model, batch.images, -3) / (r + 0.1)).sum(0).numpy()
    mask = torch.from_numpy(np.abs(score) >= np.percentile(score, 100 * prune))  # as in the authors' code
    assert torch.allclose(found, plain_gradient(model, batch)["hidden.weight"] * mask, atol=1e-12)


def test_probes_rank_like_the_exact_norms():
    model = create_model("lenet-dlg", (1, 12, 12), 4, seed=0).double().eval()
    rng = torch.Generator().manual_seed(0)
    images = torch.rand(3, 1, 12, 12, generator=rng, dtype=torch.float64)
    batch = Batch(images, torch.tensor([0, 1, 2]), torch.zeros(3) > 0)
    network, sizes, rng = copy.deepcopy(model), [108], SecretStream(0)
    exact = Soteria()._row_norms(network, ["fc"], images, sizes, rng)[0]
    assert torch.allclose(exact, naive_norms(model, images), atol=1e-12)
    fast = Soteria(probes=96)
    many = torch.stack([fast._row_norms(network, ["fc"], images, sizes, rng)[0].square() for _ in range(30)])
    relative = many / exact.square()  # a mean of 96 squares of normal numbers has variance 2 / 96
    assert bool(((relative.mean(0) - 1).abs() < 5 * math.sqrt(2 / 96 / 30)).all())  # unbiased
    assert bool((relative.std(0) < 2 * math.sqrt(2 / 96)).all())
    chosen, guessed = (d._pruned("fc", model[:-1](images), n) for d, n in ((Soteria(), exact), (fast, many[0].sqrt())))
    assert (chosen & guessed).sum() >= 0.9 * chosen.sum()
    assert not torch.equal(
        protect(fast, model, batch, 1)["fc.weight"], protect(Soteria(prune=0.0), model, batch)["fc.weight"]
    )
    assert torch.equal(protect(fast, model, batch, 1)["fc.weight"], protect(fast, model, batch, 1)["fc.weight"])


def test_as_many_probes_as_features_are_exact():
    model, batch = make_model(), make_batch(3)
    assert close(protect(Soteria(probes=7), model, batch), protect(Soteria(), model, batch))


def test_an_empty_batch_passes():
    model, gradient = make_model(), {"last.weight": torch.ones(3, 7)}
    assert Soteria().on_gradient(gradient, make_batch(0), make_client(model, make_batch(1))) is gradient


def test_in_a_chain_only_the_layers_weight_is_replaced():
    model, batch = make_model(), make_batch(4)
    chain = Chain((Prune(where="gradient", fraction=0.9), Soteria(count=2)))
    found, gradient = protect(chain, model, batch), plain_gradient(model, batch)
    pruned = Prune(where="gradient", fraction=0.9).perturb(gradient, SecretStream(0))
    assert close(found, {**pruned, "last.weight": naive(model, batch, 2)})


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(36, 36), nn.Linear(36, 3)

    def forward(self, x):
        return self.last(self.first(self.first(x.flatten(1))))


class Behind(Twice):
    def forward(self, x):
        return self.last(nn.functional.linear(self.first(x.flatten(1)).tanh(), self.first.weight))


@pytest.mark.parametrize(
    ("model", "settings_", "words"),
    [
        (nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten()), {}, "has no nn.Linear. Use a model"),
        (make_model(), {"layers": ("fc",)}, "got 'fc'. Set layers to some of: hidden, last"),
        (make_model(), {"layers": ("conv",)}, "got 'conv'"),
        (nn.Sequential(nn.Flatten(2), nn.Linear(36, 3), nn.Flatten()), {}, r"got \(2, 1, 36\) at '1'. Flatten"),
        (Twice(), {"layers": ("first",)}, "got 2 uses of 'first'"),
        (Behind(), {"layers": ("first",)}, "used nowhere else, got 'first'"),
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 3).requires_grad_(False)), {}, "not trained under this name"),
        (make_model(), {"count": 8}, "at most the 7 features of layer 'last' to zero, got count=8"),
    ],
)
def test_networks_that_it_can_not_protect(model, settings_, words):
    model, batch = model.double(), make_batch(2)
    gradient = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(DefenceError, match=words):
        Soteria(**settings_).on_gradient(gradient, batch, make_client(model, batch))


def test_what_is_not_finite_is_not_sent():
    model, batch = make_model(activation=nn.ReLU), make_batch(2)
    model.hidden.weight.data.fill_(math.nan)
    gradient = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with pytest.raises(DefenceError, match="finite features only"):
        Soteria().on_gradient(gradient, batch, make_client(model, batch))


def test_the_attacker_leaves_out_zero_columns_or_the_layer():
    weight = torch.tensor([[[1.0, 0.0, 0.0], [2.0, 0.0, 3.0]], [[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]])
    seen = {"fc1.weight": torch.ones(2, 3, 2), "fc2.weight": weight, "fc2.bias": torch.zeros(2, 2)}
    guess = {name: torch.full_like(tensor, 5.0) for name, tensor in seen.items()}
    moves = Soteria().adaptive(Arrived(seen, [1.0]))
    sent = moves["columns"].sent(guess, seen)
    assert sent["fc2.weight"].tolist() == [[[5.0, 0.0, 5.0]] * 2, [[0.0, 5.0, 5.0]] * 2]
    assert torch.equal(sent["fc1.weight"], guess["fc1.weight"])
    assert torch.equal(sent["fc2.bias"], guess["fc2.bias"])
    assert list(moves) == ["layer", "columns"]
    assert moves["layer"].weights == {"fc2.weight": 0.0}
    only = {name: seen[name] for name in ("fc2.weight", "fc2.bias")}  # leaving out fc2.weight leaves no weights
    assert list(Soteria().adaptive(Arrived(only, [1.0]))) == ["columns", "layer"]
    assert Soteria(layers=("fc1", "other")).adaptive(Arrived(seen, [1.0]))["layer"].weights == {"fc1.weight": 0.0}


@pytest.mark.parametrize("name", list(components("models")))
def test_the_last_matrix_is_the_last_layers_in_every_model_of_the_zoo(name):
    with torch.device("cpu" if name in ("patches", "frozen") else "meta"):  # a frozen trunk is hashed
        network = components("models")[name]().build((3, 32, 32), 10)
    shapes = {key: torch.empty(1, *p.shape, device="meta") for key, p in network.named_parameters()}
    (layer,) = soteria._last_linear(network)
    assert Soteria().adaptive(Arrived(shapes, [1.0]))["layer"].weights == {f"{layer}.weight": 0.0}


@pytest.mark.parametrize(
    "wrong",
    ["prune=1.1", "prune=-0.1", "count=-1", "scores=sum", "norm=3", "probes=-1", "probes=8,norm=1", "layers=a/a"],
)
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        build_defence(f"soteria:{wrong}")


def test_the_certificate_is_theorem_1_for_what_is_pruned():
    """On a linear network the bound is |r - r'| over the largest singular value; more pruning gives a higher bound."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 3))
    images = torch.rand(4, 1, 4, 4)
    batch = Batch(images, torch.tensor([0, 1, 2, 0]), torch.zeros(4) > 0)
    bounds = [Soteria(count=count).certificate(network, batch, SecretStream(0)) for count in (0, 1, 6)]
    stretch = torch.linalg.matrix_norm(network[1].weight.detach(), 2)
    everything = network[1](images.flatten(1)).detach().norm(dim=1) / stretch
    torch.testing.assert_close(bounds[2], everything, rtol=1e-3, atol=1e-4)
    assert (bounds[1] < bounds[2]).all()
    assert (bounds[1] > 0).all()
    assert Soteria(prune=0.0).certificate(network, batch, SecretStream(0)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("settings", "text"), [({"layers": ("fc9",)}, "got 'fc9'"), ({"count": 9999}, "count=9999")])
def test_networks_that_it_can_not_protect_are_refused_before_training(settings, text):
    with pytest.raises(ConfigError, match=text):
        Soteria(**settings).check(create_model("mlp:hidden=8", SHAPE, 10, seed=0), SHAPE)
    with pytest.raises(ConfigError, match=r"no nn\.Linear"):
        Soteria().check(nn.Sequential(nn.Conv2d(1, 10, 28), nn.Flatten()), SHAPE)
    Soteria().check(create_model("mlp:hidden=8", SHAPE, 10, seed=0), SHAPE)


def test_a_chain_checks_its_members():
    with pytest.raises(ConfigError, match="count=9999"):
        build_defence("prune+soteria:count=9999").check(create_model("mlp:hidden=8", SHAPE, 10, seed=0), SHAPE)
