import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.defences import Arrived, Client, build_defence
from gradveil.defences.prune import Prune
from gradveil.errors import ConfigError
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update

NO_BATCH = Batch(torch.zeros(0, 1, 1, 1), torch.zeros(0).long(), torch.zeros(0) > 0)
GIVEN = {"a": torch.tensor([3.0, -1.0, 2.0, 0.5, -4.0]), "b": torch.tensor([[10.0, 20.0], [0.1, 30.0]])}
BY_TENSOR = {"a": torch.tensor([3.0, 0.0, 2.0, 0.0, -4.0]), "b": torch.tensor([[0.0, 20.0], [0.0, 30.0]])}
BY_ALL = {"a": torch.tensor([3.0, 0.0, 0.0, 0.0, -4.0]), "b": torch.tensor([[10.0, 20.0], [0.0, 30.0]])}


def prune(tensors, **how):
    return Prune(**how).perturb(tensors, SecretStream(0))


def client():
    return Client(0, 1, nn.Identity(), {}, NO_BATCH, {}, {}, SecretStream(0))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("scope", "expected"), [("tensor", BY_TENSOR), ("global", BY_ALL)])
@pytest.mark.parametrize("where", ["update", "gradient"])
def test_worked_by_hand_at_both_places(scope, expected, where):
    defence = build_defence(f"prune:fraction=0.5,scope={scope},where={where}")
    buffers = {"running_mean": torch.tensor([0.01, 5.0])}
    sent = defence.on_update(Update(GIVEN, 3, buffers), client())
    assert same(sent.tensors, expected if where == "update" else GIVEN)
    assert same(sent.buffers, buffers)
    assert same(defence.on_gradient(GIVEN, NO_BATCH, client()), GIVEN if where == "update" else expected)


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40, unique=True), st.sampled_from([0, 20, 50, 70, 90, 99]))
def test_the_percentile_is_that_of_the_authors_code(values, percent):
    array = np.array(values, dtype=np.float64) * np.where(np.arange(len(values)) % 2, 1, -1)
    theirs = np.where(np.abs(array) < np.percentile(np.abs(array), percent), 0, array)
    ours = prune({"w": torch.tensor(array)}, fraction=percent / 100)["w"]
    assert np.array_equal(ours.numpy(), theirs)


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), max_size=30), st.lists(st.integers(-3, 3), max_size=9), st.floats(0, 1))
def test_exactly_so_many_of_the_smallest_go_and_the_largest_stays(first, second, fraction):
    tensors = {"a": torch.tensor(first).float(), "b": torch.tensor(second).half()}
    for scope, groups in (("tensor", [["a"], ["b"]]), ("global", [["a", "b"]])):
        result = prune(tensors, fraction=fraction, scope=scope)
        for group in groups:
            before = torch.cat([tensors[name].float() for name in group])
            after = torch.cat([result[name].float() for name in group])
            kept = after != 0
            assert torch.equal(after[kept], before[kept])
            if len(before):
                gone = int(np.ceil(round(fraction * (len(before) - 1), 6)))
                assert int((~kept).sum()) == max(gone, int((before == 0).sum()))
                assert after.abs().max() == before.abs().max()
                assert all(small <= large for small in before[~kept].abs() for large in before[kept].abs())


def test_of_equal_entries_the_first_go():
    assert prune({"w": torch.tensor([1.0, -1.0, 1.0, 2.0, 1.0])}, fraction=0.5)["w"].tolist() == [0, 0, 1, 2, 1]


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_one_entry_survives_everything(scope):
    result = prune(GIVEN, fraction=1.0, scope=scope)
    counts = [int(tensor.count_nonzero()) for tensor in result.values()]
    assert counts == ([1, 1] if scope == "tensor" else [0, 1])


def test_nothing_to_prune():
    assert prune({}) == prune({}, scope="global") == {}
    assert prune({"w": torch.tensor(2.0)})["w"] == 2
    assert prune({"w": torch.zeros(3)}, scope="global")["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("move", ["surviving", "again"])
def test_the_attacker_turns_the_true_gradient_into_what_it_saw(scope, move):
    torch.manual_seed(0)
    true = {"a": torch.randn(4, 5, 6), "b": torch.randn(4), "c": torch.randn(4, 3), "d": torch.zeros(4, 0)}
    rates = [0.0, 0.3, 0.7, 1.0]  # a different rate for each target
    each = [prune({name: tensor[t] for name, tensor in true.items()}, fraction=rates[t], scope=scope) for t in range(4)]
    seen = {name: torch.stack([part[name] for part in each]) for name in true}
    moves = Prune(scope=scope).adaptive(Arrived(seen, [0.1]))
    assert moves[move].distance == ""
    assert moves[move].noise == {}
    guess = {name: tensor.clone().requires_grad_() for name, tensor in true.items()}
    sent = moves[move].sent(guess, seen)
    assert same({name: tensor.detach() for name, tensor in sent.items()}, seen)
    slope = torch.autograd.grad(sum(tensor.sum() for tensor in sent.values()), guess["a"])[0]
    assert torch.equal(slope, (seen["a"] != 0).float())


def test_pruning_again_follows_the_guess():
    seen = {"w": torch.tensor([[0.0, 5.0, 6.0], [0.0, 0.0, 0.0]])}
    sent = (
        Prune()
        .adaptive(Arrived(seen, [1.0]))["again"]
        .sent({"w": torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0]])}, seen)
    )
    assert sent["w"].tolist() == [[3, 0, 2], [0, 0, 0]]


@pytest.mark.parametrize("wrong", ["fraction=-0.1", "fraction=1.1", "fraction=nan", "scope=layer", "where=server"])
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        build_defence(f"prune:{wrong}")
