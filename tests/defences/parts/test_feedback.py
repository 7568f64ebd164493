import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.defences import Client, build_defence
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update

NO_BATCH = Batch(torch.zeros(0, 1, 1, 1), torch.zeros(0).long(), torch.zeros(0) > 0)


def client(state):
    return Client(0, 1, nn.Identity(), {}, NO_BATCH, {}, state, SecretStream(0, "client"))


def test_worked_by_hand():
    defence, state = build_defence("prune:fraction=0.5,feedback=true"), {}
    given_ = Update({"w": torch.tensor([3.0, 2.0, 1.0])}, 1)  # one of three goes
    first, second = (defence.on_update(given_, client(state)).tensors["w"].tolist() for _ in range(2))
    assert first == [3.0, 2.0, 0.0]
    assert second == [3.0, 0.0, 2.0] or second == [3.0, 2.0, 0.0]  # a tie of 2 and 1 + 1
    third = defence.on_update(given_, client(state)).tensors["w"]
    assert float(sum(first) + sum(second) + third.sum() + state[next(iter(state))].sum()) == 18.0


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(["prune:fraction=0.8", "quantise:bits=1", "quantise:bits=3", "quantise:bits=2,stochastic=true"]),
    st.sampled_from(["update", "gradient"]),
    st.integers(0, 1000),
)
def test_all_that_was_sent_adds_up_to_all_that_was_given_minus_the_last_rest(spec, where, seed):
    defence, state = build_defence(f"{spec},where={where},feedback=true"), {}
    rng = torch.Generator().manual_seed(seed)
    rounds = [{"a": torch.randn(4, 3, generator=rng), "b": torch.randn((), generator=rng)} for _ in range(5)]
    sent = []
    for tensors in rounds:
        if where == "update":
            sent.append(defence.on_update(Update(tensors, 1), client(state)).tensors)
        else:
            sent.append(defence.on_gradient(tensors, NO_BATCH, client(state)))
    for name in ("a", "b"):
        rest = next(tensor for key, tensor in state.items() if key.endswith(name))
        total = sum(part[name] for part in sent) + rest
        assert torch.allclose(total, sum(part[name] for part in rounds), atol=1e-5)


@pytest.mark.parametrize("spec", ["prune", "quantise"])
def test_without_feedback_nothing_is_kept(spec):
    state = {}
    build_defence(spec).on_update(Update({"w": torch.tensor([3.0, 2.0, 1.0])}, 1), client(state))
    assert not state
