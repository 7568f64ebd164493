import math
from dataclasses import replace

import pytest
import torch
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.attacks import build_attack
from gradveil.defences import Arrived, Chain, Client, Releases, Server, build_defence
from gradveil.defences.pogz import Pogz, budget_shares, layers_of
from gradveil.defences.prune import Prune
from gradveil.errors import ConfigError, DefenceError
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update
from tests.attacks.scene import psnr, run, scene
from tests.defences.worker_laws import trains_alike_on_workers

NO_BATCH = Batch(torch.zeros(0, 1, 1, 1), torch.zeros(0).long(), torch.zeros(0) > 0)
QUIET = Pogz(noise=1e-9)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def client(public=None, seed=0):
    return Client(0, 1, nn.Identity(), {}, NO_BATCH, public or {}, {}, SecretStream(seed))


def sent(defence, tensors, public=None, seed=0):
    return defence.on_update(Update(tensors, 1), client(public, seed)).tensors


def broadcast(**importance):
    return {f"importance.{layer}": torch.tensor(value, dtype=torch.float64) for layer, value in importance.items()}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def server(model, state):
    return Server(1, model, {}, state, rng())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.floats(0, 5), st.integers(0, 2))
def test_shares_add_up_to_one_and_follow_the_equation(values, alpha, unknown):
    known = {str(index): value for index, value in enumerate(values)}
    layers = [*known, *(f"new{index}" for index in range(unknown))]
    shares = budget_shares(layers, known, alpha)
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= 0.1 / len(layers) * (1 - 1e-12)
    if not unknown and sum(values) > 0 and min(values) > 1e-3:
        total = sum(value**alpha for value in values)
        for name, value in known.items():
            assert shares[name] == pytest.approx(0.1 / len(layers) + 0.9 * value**alpha / total)


def test_shares_without_anything_to_go_by_are_equal():
    assert budget_shares(["a", "b"], {"a": 0.0, "b": 0.0}, 1.0) == {"a": 0.5, "b": 0.5}
    assert budget_shares(["a", "b"], {"a": 7.0, "b": 1.0}, 0.0) == {"a": 0.5, "b": 0.5}
    assert budget_shares([], {}, 1.0) == {}


def test_each_layer_is_clipped_by_itself():
    tensors = {"a.weight": torch.tensor([3.0, 0.0]), "a.bias": torch.tensor([4.0]), "b.weight": torch.tensor([0.1])}
    found = sent(replace(QUIET, clip=2.0), tensors)
    bound = 2 / math.sqrt(2)
    assert torch.allclose(found["a.weight"], torch.tensor([3.0, 0.0]) * bound / 5, atol=1e-6)
    assert torch.allclose(found["a.bias"], torch.tensor([4.0]) * bound / 5, atol=1e-6)
    assert torch.allclose(found["b.weight"], torch.tensor([0.1]), atol=1e-6)


@pytest.mark.parametrize("importance", [{}, {"a": 3.0, "b": 1.0}])
def test_noise_has_its_moments_and_the_layers_budgets_add_up(importance):
    defence, entries = Pogz(clip=0.5, noise=0.7), 100_000
    zeros = {"a.weight": torch.zeros(entries), "b.weight": torch.zeros(entries)}
    found = sent(defence, zeros, broadcast(**importance))
    shares = budget_shares(["a", "b"], importance, 1.0)
    sensitivity, spent = 2 * 0.5 / math.sqrt(2), 0.0
    for layer in ("a", "b"):
        noise = found[f"{layer}.weight"]
        expected = sensitivity * 0.7 / math.sqrt(shares[layer])
        assert abs(noise.mean()) < 5 * expected / math.sqrt(entries)
        assert float(noise.std()) == pytest.approx(expected, rel=0.02)
        assert abs((noise / expected).pow(4).mean() - 3) < 5 * math.sqrt(96 / entries)
        spent += sensitivity**2 / (2 * float(noise.std()) ** 2)
    assert spent == pytest.approx(1 / (2 * 0.7**2), rel=0.02)
    if importance:
        assert found["a.weight"].std() < 0.8 * found["b.weight"].std()


def test_the_server_measures_how_much_layers_changed_since_its_last_broadcast():
    model, state = make_model(), {}
    assert Pogz().public({}, server(model, state)) == {}
    with torch.no_grad():
        model[0].weight += 2.0
        model[0].bias += 1.0
    first = Pogz().public({}, server(model, state))
    assert float(first["importance.0"]) == pytest.approx(math.sqrt(12 * 4 + 4), rel=1e-6)
    assert float(first["importance.2"]) == 0
    again = Pogz().public({}, server(model, state))
    assert all(float(value) == 0 for value in again.values())


def test_the_budget_is_that_of_one_gaussian_mechanism_a_round():
    releases = Releases(num_examples=500, batch_size=32, steps=1000, uses=60, rounds=12)
    found = Pogz(noise=4.0, delta=1e-6).budget(releases)
    tight = PLDAccountant().compose(SelfComposedDpEvent(GaussianDpEvent(4.0), 12)).get_epsilon(1e-6)
    assert found.delta == 1e-6
    assert tight <= found.epsilon <= 1.15 * tight
    assert Pogz().budget(releases).epsilon > 10_000  # the default gives no meaningful guarantee, as documented
    assert Chain((Pogz(noise=4.0, delta=1e-6), Prune())).budget(releases) == found


@pytest.mark.parametrize("importance", [{}, {"a": 3.0, "b": 1.0}])
def test_the_attacker_knows_the_noise_of_each_layer(importance):
    defence, steps, entries = Pogz(clip=2.0, noise=0.4), [0.1, 0.4], 50_000
    update = {"a.weight": torch.full((entries,), 1e-3), "b.weight": torch.full((entries,), 1.0)}
    public = broadcast(**importance)
    seen = {name: tensor[None] / -0.5 for name, tensor in sent(defence, update, public).items()}
    moves = defence.adaptive(Arrived(seen, steps, 1, public))
    move = moves["likelihood"]
    assert (move.distance, list(moves)) == ("l2", ["likelihood", "direction"])
    clipped = move.sent({name: tensor[None] / -0.5 for name, tensor in update.items()}, seen)
    for name, tensor in seen.items():
        assert float((tensor - clipped[name]).std()) == pytest.approx(move.noise[name], rel=0.03)
    assert float(clipped["b.weight"].norm()) == pytest.approx(2 / math.sqrt(2) / 0.5, rel=1e-4)
    assert torch.equal(clipped["a.weight"], update["a.weight"][None] / -0.5)


def test_an_update_that_cannot_be_protected_is_not_sent():
    moved = Update({"w": torch.ones(2)}, 1, {"norm.running_mean": torch.ones(2)})
    with pytest.raises(DefenceError, match="running_mean"):
        Pogz().on_update(moved, client())
    still = replace(moved, buffers={"norm.running_mean": torch.zeros(2)})
    assert Pogz().on_update(still, client()).buffers is still.buffers


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_counts_as_zero(bad):
    update = {"a.w": torch.tensor([bad, 1.0]), "b.w": torch.ones(3)}
    zero = {name: torch.zeros_like(tensor) for name, tensor in update.items()}
    found, wanted = (sent(Pogz(), tensors) for tensors in (update, zero))
    assert all(torch.equal(found[name], wanted[name]) and bool(found[name].all()) for name in zero)


@pytest.mark.parametrize("wrong", ["alpha=-1", "clip=0", "noise=0", "delta=1", "delta=0"])
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        build_defence(f"pogz:{wrong}")


def test_layers_are_modules():
    names = [name for name, _ in make_model().named_parameters()]
    assert layers_of(names) == {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}


def test_pictures_come_back_under_little_noise_and_not_under_a_guarantee():
    attack = build_attack("gs:iterations=150,sign=none,schedule=cosine,lr=0.1,tv=1e-6,compile=off")
    found = {}
    for noise in (1e-5, 1.0):
        defence = Pogz(clip=10.0, noise=noise)
        truth, _, seen = scene(targets=1, grants=("num-examples", "labels", "defence"), defence=defence)
        found[noise] = psnr(truth[:, 0], run(attack, seen).images[:, 0]).mean()
    assert found[1e-5] > found[1.0] + 6


def test_a_simulation_trains_and_workers_give_the_same_bits():
    assert trains_alike_on_workers("pogz:noise=0.001")
