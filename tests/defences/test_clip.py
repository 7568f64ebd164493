import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.defences import Arrived, Client, build_defence
from gradveil.defences.clip import Clip
from gradveil.errors import ConfigError
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update

NO_BATCH = Batch(torch.zeros(0, 1, 1, 1), torch.zeros(0).long(), torch.zeros(0) > 0)
GIVEN = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor(12.0)}  # norm 13


def client():
    return Client(0, 1, nn.Identity(), {}, NO_BATCH, {}, {}, SecretStream(0))


@pytest.mark.parametrize("where", ["update", "gradient"])
def test_worked_by_hand_at_both_places(where):
    defence = build_defence(f"clip:norm=6.5,where={where}")
    update = defence.on_update(Update(GIVEN, 1, {"running_mean": torch.ones(2) * 50}), client())
    gradient = defence.on_gradient(GIVEN, NO_BATCH, client())
    clipped, plain = (update.tensors, gradient) if where == "update" else (gradient, update.tensors)
    assert plain is GIVEN
    assert clipped["a"].tolist() == [1.5, 2.0]
    assert clipped["b"].item() == 6.0
    assert update.buffers["running_mean"].tolist() == [50, 50]


@settings(deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=16), max_size=9), st.floats(-1e4, 1e4, width=16), st.floats(1e-3, 1e5))
def test_the_norm_is_bounded_the_direction_kept_and_the_short_left_alone(values, scalar, norm):
    tensors = {"a": torch.tensor(values, dtype=torch.float64), "b": torch.tensor(scalar, dtype=torch.float32)}
    result = Clip(norm=norm).perturb(tensors, SecretStream(0))
    before, after = Update(tensors, 1).norm(), Update(result, 1).norm()
    assert after <= norm * (1 + 1e-6)
    factor = min(1.0, norm / before.item()) if before > 0 else 1.0
    for name, tensor in tensors.items():
        assert torch.allclose(result[name], tensor * factor, rtol=1e-5, atol=0)
        assert before > norm or torch.equal(result[name], tensor)


def test_half_and_nothing():
    result = Clip(norm=1e-3).perturb({"w": torch.full((4,), 50.0).half()}, SecretStream(0))["w"]
    assert result.dtype == torch.float16
    assert torch.allclose(result.float(), torch.full((4,), 5e-4), rtol=1e-2)
    assert Clip().perturb({}, SecretStream(0)) == {}


@pytest.mark.parametrize(("where", "move"), [("update", "again"), ("gradient", "again"), ("update", "scale")])
def test_the_attacker_turns_the_true_gradient_into_what_it_saw(where, move):
    torch.manual_seed(0)
    true = {"a": torch.randn(3, 4, 2), "b": torch.randn(3), "c": torch.zeros(3, 0)}
    true = {
        name: tensor * torch.tensor([1.0, 0.01, 5.0]).view(-1, *[1] * (tensor.dim() - 1))
        for name, tensor in true.items()
    }
    steps = [0.2, 0.3]
    defence, rows = Clip(where=where, norm=0.7), []
    for t in range(3):
        gradient = {name: tensor[t] for name, tensor in true.items()}
        if where == "update":
            change = defence.perturb({name: -0.5 * tensor for name, tensor in gradient.items()}, SecretStream(0))
        else:
            change = {name: -0.5 * part for name, part in defence.perturb(gradient, SecretStream(0)).items()}
        rows.append(change)
    seen = {name: torch.stack([row[name] for row in rows]) / -0.5 for name in true}
    found = defence.adaptive(Arrived(seen, steps))[move]
    assert found.distance == ""
    assert found.noise == {}
    sent = found.sent(true, seen)
    assert all(torch.allclose(sent[name], seen[name], rtol=1e-5) for name in true)
    assert not torch.allclose(sent["a"][2], true["a"][2])


@pytest.mark.parametrize("move", ["again", "scale"])
def test_a_zero_guess_has_a_finite_slope(move):
    seen = {"a": torch.ones(2, 3), "b": torch.ones(2)}
    guess = {name: torch.zeros_like(tensor).requires_grad_() for name, tensor in seen.items()}
    sent = Clip().adaptive(Arrived(seen, [1.0]))[move].sent(guess, seen)
    slopes = torch.autograd.grad(
        sum((tensor - seen[name]).square().sum() for name, tensor in sent.items()), list(guess.values())
    )
    assert all(bool(tensor.isfinite().all()) for tensor in [*sent.values(), *slopes])


def test_scaling_gives_the_norm_that_was_seen():
    seen = {"w": torch.tensor([[0.0, 2.0], [0.0, 0.0]])}
    sent = (
        Clip().adaptive(Arrived(seen, [1.0]))["scale"].sent({"w": torch.tensor([[30.0, 40.0], [1.0, 0.0]])}, seen)["w"]
    )
    assert torch.allclose(sent, torch.tensor([[1.2, 1.6], [0.0, 0.0]]), atol=1e-6)


@pytest.mark.parametrize("wrong", ["norm=0", "norm=-1", f"norm={math.inf}", "where=server"])
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        build_defence(f"clip:{wrong}")
