"""How long the server waits for the answers to a question."""

from hypothesis import given
from hypothesis import strategies as st

from gradveil.engines.introductions import Failure
from gradveil.engines.questions import Patience, Question


@given(st.floats(0, 1e4))
def test_the_server_looks_often_at_first_and_never_more_rarely_than_it_should(passed):
    pause = Patience(first_poll=0.05, poll=2.0).pause(passed)
    assert 0.05 <= pause <= 2.0
    assert pause <= max(0.05, 0.1 * passed)  # an answer waits at most for a tenth of its time


def test_clients_are_given_up_when_it_is_pointless_to_wait():
    question = Question("train", {0: {}, 1: {}, 2: {}}, lost={1: "gone."})
    question.give_up(Patience(back=60), 1.0, needed=[1], fewest=2)
    assert question.awaited() == [0, 1, 2], "a needed client may come back"
    question.give_up(Patience(back=60), 1.0, needed=[], fewest=3)
    assert question.awaited() == [0, 1, 2], "too few would be left"
    question.give_up(Patience(back=60), 1.0, needed=[], fewest=2)
    assert question.answers == {1: Failure("gone.")}
    question.give_up(Patience(answer=5, back=60), 5.0, needed=[0], fewest=3)
    assert question.answers == {
        0: Failure("nothing came within 5 seconds."), 1: Failure("gone."), 2: Failure("nothing came within 5 seconds."),
    }  # fmt: skip
