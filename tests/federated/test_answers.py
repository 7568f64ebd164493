"""The server's checks of updates and scores."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradveil.defences import Defence, Server, build_defence
from gradveil.errors import MessageError
from gradveil.federated.answers import ExpectedUpdate, check_score, check_sent, recover
from gradveil.federated.client import Score
from gradveil.types import Update

MODEL = Update({"w": torch.zeros(2, 3), "b": torch.zeros(3)}, 0, {"mean": torch.zeros(3)})
GOOD = Update({"w": torch.ones(2, 3), "b": torch.ones(3)}, 5, {"mean": torch.ones(3)})
SERVER = Server(1, nn.Identity(), {}, {}, torch.Generator())


@dataclass(frozen=True)
class Reads(Defence):
    """A defence whose server side reads a tensor that it hopes for, and does not say what clients send."""

    def on_server(self, update, server):
        return replace(update, tensors={name: update.tensors[f"packed.{name}"] for name in MODEL.tensors})


def test_an_honest_update_passes():
    expected = ExpectedUpdate.of(MODEL, Defence())
    check_sent(GOOD, expected, 5)
    assert recover(Defence(), GOOD, SERVER, expected) == GOOD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 6}, "from 0 to 5, got 6"),
        ({"num_examples": 10**400}, "from 0 to 5, got a int"),
        ({"buffers": {}}, "1 missing \\('mean'\\) and 0 unknown"),
        ({"tensors": {**GOOD.tensors, "x": torch.ones(1)}}, "0 missing and 1 unknown"),
        ({"buffers": {"mean": torch.full((3,), math.nan)}}, "'mean' must be finite"),
        ({"buffers": {"mean": torch.ones(3, 1)}}, "must have shape"),
    ],
)
def test_a_broken_rule_is_named(changes, message):
    with pytest.raises(MessageError, match=message):
        check_sent(replace(GOOD, **changes), ExpectedUpdate.of(MODEL, Defence()), 5)


def test_a_defence_that_can_not_read_an_update_names_the_update():
    expected = ExpectedUpdate.of(MODEL, Reads())
    assert expected.sent is None
    check_sent(GOOD, expected, 5)
    with pytest.raises(MessageError, match="must be able to read the update, got KeyError"):
        recover(Reads(), GOOD, SERVER, expected)
    with pytest.raises(MessageError, match="entries, got"):
        check_sent(replace(GOOD, tensors={"x": torch.empty(0, 10**9)}), expected, 5)


def test_what_a_defence_makes_of_an_update_is_checked_too():
    packed = replace(GOOD, tensors={f"packed.{name}": torch.ones(7) for name in MODEL.tensors})
    with pytest.raises(MessageError, match=r"must have shape \(2, 3\)"):
        recover(Reads(), packed, SERVER, ExpectedUpdate.of(MODEL, Reads()))


def test_a_norm_may_be_bounded():
    recover(Defence(), GOOD, SERVER, ExpectedUpdate(MODEL, MODEL, most_norm=3.0))
    with pytest.raises(MessageError, match=r"at most 2\.9, got 3"):
        recover(Defence(), GOOD, SERVER, ExpectedUpdate(MODEL, MODEL, most_norm=2.9))


def test_a_chain_says_what_it_sends():
    sent = build_defence("prune+ca-fl").sends(Update({"w": torch.zeros(20)}, 0))
    assert {name: tuple(tensor.shape) for name, tensor in sent.tensors.items()} == {"sensed": (2,), "like.w": (0, 20)}


WILD = st.one_of(st.integers(), st.floats(), st.none(), st.booleans(), st.text(max_size=2))


@given(correct=WILD, loss=WILD, count=WILD, classes=st.lists(st.integers(-2, 5), max_size=3))
def test_an_accepted_score_is_possible(correct, loss, count, classes):
    score = Score(correct, loss, count, tuple(classes), tuple(classes))
    try:
        check_score(score, 10, 3)
    except MessageError:
        return
    assert 0 <= score.correct <= score.count <= 10
    assert 0 <= score.loss_sum < math.inf
    assert not classes or sum(classes) == score.count == score.correct
