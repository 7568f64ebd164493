import math
from dataclasses import replace

import pytest
import torch
from dp_accounting import ComposedDpEvent, LaplaceDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from torch import nn

from gradveil.attacks import build_attack
from gradveil.defences import Arrived, Budget, Client, Releases, Server, build_defence
from gradveil.defences.ca_fl import CaFl, draw_sensing, recover
from gradveil.errors import ConfigError, DefenceError
from gradveil.secret_stream import SecretStream
from gradveil.storage import to_safetensors
from gradveil.types import Batch, Update
from tests.attacks.scene import psnr, run, scene
from tests.defences.worker_laws import trains_alike_on_workers

NO_BATCH = Batch(torch.zeros(0, 1, 1, 1), torch.zeros(0).long(), torch.zeros(0) > 0)
QUIET = CaFl(epsilon=1e9, clip=1e3)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def client(public=None):
    return Client(0, 1, nn.Identity(), {}, NO_BATCH, public or {}, {}, SecretStream(0))


def server(public=None, model=None, state=None, seed=0):
    return Server(1, model or nn.Identity(), public or {}, {} if state is None else state, rng(seed))


def broadcast(seed, bound):
    return {"seed": torch.tensor(seed), "bound": torch.tensor(bound, dtype=torch.float64)}


def matrix(sensing):
    """Return the matrix (m, n), computed column by column."""
    return sensing.measure(torch.eye(len(sensing.order), dtype=torch.float64)).T


def sparse(entries, nonzero, seed=0):
    vector = torch.zeros(entries, dtype=torch.float64)
    places = torch.randperm(entries, generator=rng(seed))[:nonzero]
    vector[places] = torch.randn(nonzero, generator=rng(seed + 1), dtype=torch.float64).sign() * 2
    return vector


@pytest.mark.parametrize(("entries", "numbers"), [(1, 1), (7, 3), (256, 26), (600, 60), (513, 513)])
def test_the_matrix_has_orthonormal_rows_and_its_transpose_is_right(entries, numbers):
    sensing = draw_sensing(entries, numbers, seed=5)
    dense = matrix(sensing)
    assert torch.allclose(dense @ dense.T, torch.eye(numbers, dtype=torch.float64), atol=1e-12)
    transposed = sensing.spread(torch.eye(numbers, dtype=torch.float64))
    assert torch.allclose(transposed, dense, atol=1e-12)


def test_it_is_the_hartley_transform_of_the_shuffled_entries():
    sensing = draw_sensing(11, 11, seed=2)
    vector = torch.randn(11, generator=rng(), dtype=torch.float64)
    expected = []
    for row in sensing.rows.tolist():
        total = 0.0
        for place in range(11):
            angle = 2 * math.pi * row * place / 11
            entry = float(vector[sensing.order[place]] * sensing.signs[place])
            total += entry * (math.cos(angle) + math.sin(angle)) / math.sqrt(11)
        expected.append(total)
    assert torch.allclose(sensing.measure(vector), torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_the_seed_decides():
    assert torch.equal(draw_sensing(600, 60, 1).rows, draw_sensing(600, 60, 1).rows)
    assert not torch.equal(matrix(draw_sensing(600, 60, 1)), matrix(draw_sensing(600, 60, 2)))


def test_the_solver_finds_the_minimum_of_a_naive_one():
    sensing = draw_sensing(200, 60, seed=3)
    dense, numbers = matrix(sensing), sensing.measure(sparse(200, 8))
    penalty = 2.5 * float(numbers.norm()) / math.sqrt(200)
    slow = torch.zeros(200, dtype=torch.float64)
    for _ in range(300):  # coordinate descent on the lasso
        for place in range(200):
            column = dense[:, place]
            rest = numbers - dense @ slow + column * slow[place]
            pull = float(column @ rest)
            slow[place] = math.copysign(max(abs(pull) - penalty, 0.0), pull) / float(column @ column)
    expected = slow + dense.T @ (numbers - dense @ slow)
    assert torch.allclose(recover(sensing, numbers, steps=2000), expected, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_sparse_update_comes_back(seed):
    sensing, truth = draw_sensing(2000, 600, 10 + seed), sparse(2000, 30, seed)
    found = recover(sensing, sensing.measure(truth), threshold=0.01, steps=400)
    assert float((found - truth).norm() / truth.norm()) < 0.05


def test_the_default_solver_is_nearer_than_least_squares_and_keeps_every_number():
    sensing, truth = draw_sensing(2000, 200, 1), sparse(2000, 20)
    numbers = sensing.measure(truth)
    found = recover(sensing, numbers)
    assert torch.allclose(sensing.measure(found), numbers, atol=1e-12)
    assert (found - truth).norm() < 0.9 * (sensing.spread(numbers) - truth).norm()


def test_a_message_is_ten_times_smaller_and_the_server_gets_the_update_back():
    tensors = {"b": torch.randn(300, 100, generator=rng()), "a": torch.randn(5, generator=rng()).half()}
    update = Update(tensors, 7, {"running_mean": torch.zeros(2)})
    public = broadcast(9, 1e3)
    sent = QUIET.on_update(update, client(public))
    assert len(to_safetensors(sent.tensors)) < 0.11 * len(to_safetensors(tensors))
    assert sent.tensors["sensed"].shape == (3001,)
    assert not set(tensors) & set(sent.tensors)
    received = QUIET.on_server(sent, server(public))
    assert {k: (v.shape, v.dtype) for k, v in received.tensors.items()} == {
        k: (v.shape, v.dtype) for k, v in tensors.items()
    }
    assert received.num_examples == 7
    assert received.buffers is update.buffers
    flat, back = (torch.cat([each["a"].float(), each["b"].flatten()]) for each in (tensors, received.tensors))
    sensing = draw_sensing(30_005, 3001, 9)
    assert torch.allclose(sensing.measure(flat), sensing.measure(back), atol=5e-3)  # a is in half precision
    shuffled = replace(sent, tensors=dict(reversed(sent.tensors.items())))  # safetensors may change the order
    again = QUIET.on_server(shuffled, server(public)).tensors
    assert all(torch.equal(again[name], received.tensors[name]) for name in tensors)


def test_with_all_numbers_nothing_is_lost_but_what_clipping_takes():
    tensors = {"w": torch.tensor([[3.0, 4.0]]), "v": torch.zeros(400)}
    for bound, factor in ((10.0, 1.0), (1.0, 0.2)):
        defence, public = CaFl(ratio=1.0, epsilon=1e9), broadcast(1, bound)
        found = defence.on_server(defence.on_update(Update(tensors, 1), client(public)), server(public)).tensors
        assert torch.allclose(found["w"], factor * tensors["w"], atol=1e-4)


@pytest.mark.parametrize(("per", "share"), [("number", 2.0), ("update", 2.0 / 20_000)])
def test_noise_has_its_moments_and_no_number_leaves_its_range(per, share):
    entries, bound = 200_000, 0.5
    limit = 3 * bound / math.sqrt(entries)
    scale = 2 * limit / share
    defence, public = CaFl(epsilon=2.0, per=per), broadcast(1, bound)
    zeros = Update({"w": torch.zeros(entries)}, 1)
    noise = defence.on_update(zeros, client(public)).tensors["sensed"] / scale
    assert noise.abs().mean() == pytest.approx(1, abs=5 / math.sqrt(20_000))
    assert noise.square().mean() == pytest.approx(2, abs=5 * math.sqrt(20 / 20_000))
    peak = Update({"w": torch.cat([torch.full((1,), 1e6), torch.zeros(entries - 1)])}, 1)
    moved = defence.on_update(peak, client(public)).tensors["sensed"] - noise * scale
    assert moved.abs().max() <= limit + 1e-6 * scale * 20
    assert moved.abs().max() > 0.97 * limit  # rounded toward zero to the grid of the noise


def test_the_server_draws_a_seed_each_round_and_the_bound_follows_the_model():
    model, state, defence = nn.Linear(3, 2), {}, CaFl(clip=4.0, margin=2.0)
    first = defence.public({}, server(model=model, state=state))
    assert first["seed"].dtype == torch.int64
    assert float(first["bound"]) == 4.0
    with torch.no_grad():
        model.weight += 0.5
    second = defence.public({}, server(model=model, state=state, seed=1))
    assert float(second["bound"]) == pytest.approx(2 * 0.5 * math.sqrt(6), rel=1e-6)
    assert int(second["seed"]) != int(first["seed"])
    assert float(defence.public({}, server(model=model, state=state))["bound"]) == pytest.approx(0.04)
    with torch.no_grad():
        model.weight += 50
    assert float(defence.public({}, server(model=model, state=state))["bound"]) == 4.0


def test_the_budget_adds_up():
    releases = Releases(500, 32, 1000, 60, rounds=3, entries=1001)
    assert CaFl(per="update").budget(releases) == Budget(15.0, 0.0)
    assert CaFl().budget(releases) == Budget(5.0 * 101 * 3, 0.0)
    assert CaFl().budget(releases._replace(entries=0)) is None


def test_the_budget_is_an_upper_bound_by_googles_accountant():
    numbers, defence = 4, CaFl(epsilon=2.0, per="update", ratio=1.0)
    entries, public = 4, broadcast(1, 1.0)
    limit = 3 / math.sqrt(entries)
    event = SelfComposedDpEvent(
        ComposedDpEvent([LaplaceDpEvent(defence._scale(entries, public) / (2 * limit))] * numbers), 2
    )
    tight = PLDAccountant().compose(event).get_epsilon(1e-9)
    claimed = defence.budget(Releases(5, 5, 2, 2, rounds=2, entries=entries)).epsilon
    assert tight <= claimed * 1.001
    assert tight > 0.9 * claimed


def test_the_attacker_compares_in_the_compressed_domain():
    defence, steps = CaFl(clip=1.0), [0.1, 0.4]
    update = {"b": torch.randn(200, 100, generator=rng()), "a": torch.randn(50, generator=rng(1))}
    public = broadcast(4, 0.8)
    received = defence.on_server(defence.on_update(Update(update, 1), client(public)), server(public)).tensors
    seen = {name: received[name][None] / -0.5 for name in update}
    ((name, move),) = defence.adaptive(Arrived(seen, steps, 1, public)).items()
    assert (name, move.distance) == ("compressed", "l2")
    guess = {name: tensor[None] / -0.5 for name, tensor in update.items()}
    looked, sent = move.look(seen), move.sent(guess, seen)
    again = move.look(looked)
    assert all(torch.allclose(again[name], looked[name], atol=1e-5) for name in seen)  # a projection
    off = torch.cat([(looked[name] - sent[name]).flatten() for name in seen])
    assert float(off.std()) == pytest.approx(move.noise["a"], rel=0.05)
    likelihood = sum(float(move.weights[n] * (looked[n] - sent[n]).square().sum() / move.noise[n] ** 2) for n in seen)
    assert likelihood == pytest.approx(2005, rel=0.1)  # one for each number sent
    whole = torch.cat([tensor.flatten() for tensor in sent.values()])
    norm = math.sqrt(0.1) * 0.8 / 0.5
    assert float(whole.norm()) == pytest.approx(norm, rel=0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_counts_as_zero(bad):
    broken, zero = torch.ones(50).index_fill(0, torch.tensor(3), bad), torch.zeros(50)
    found, wanted = (
        CaFl().on_update(Update({"w": tensor}, 1), client()).tensors["sensed"] for tensor in (broken, zero)
    )
    assert torch.equal(found, wanted)
    assert bool(found.all())


def test_an_update_that_cannot_be_protected_is_not_sent_and_a_message_must_fit():
    with pytest.raises(DefenceError, match="running_mean"):
        CaFl().on_update(Update({"w": torch.ones(2)}, 1, {"norm.running_mean": torch.ones(2)}), client())
    sent = CaFl().on_update(Update({"w": torch.ones(50)}, 1), client())
    with pytest.raises(DefenceError, match="10 numbers"):
        CaFl(ratio=0.2).on_server(sent, server())
    with pytest.raises(DefenceError, match="got none"):
        CaFl().on_server(Update({"w": torch.ones(50)}, 1), server())


@pytest.mark.parametrize("wrong", ["ratio=0", "ratio=1.1", "epsilon=0", "per=round", "clip=0", "margin=0"])
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        build_defence(f"ca-fl:{wrong}")


def test_pictures_come_back_under_little_noise_and_not_under_a_guarantee():
    attack = build_attack("gs:iterations=150,sign=none,schedule=cosine,lr=0.1,tv=1e-6,compile=off")
    found = {}
    for epsilon in (1e4, 5.0):
        defence = CaFl(epsilon=epsilon, per="update" if epsilon < 10 else "number", clip=10.0)
        truth, _, seen = scene(targets=1, grants=("num-examples", "labels", "defence"), defence=defence)
        found[epsilon] = psnr(truth[:, 0], run(attack, seen).images[:, 0]).mean()
    assert found[1e4] > found[5.0] + 6


def test_a_simulation_trains_and_workers_give_the_same_bits():
    assert trains_alike_on_workers("ca-fl")
