import threading

import pytest

from gradveil.engines.answered import answer_once
from gradveil.errors import GradveilError


def test_a_round_is_answered_once_and_never_after_a_later_one(tmp_path):
    path = tmp_path / "private" / "answered"
    for number in (1, 3):
        answer_once(path, number)
    for number in (3, 2, 1):
        with pytest.raises(GradveilError, match=f"got {number} after '3'"):
            answer_once(path, number)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_note_answers_nothing(tmp_path):
    path = tmp_path / "answered"
    path.write_text("-1")
    with pytest.raises(GradveilError, match="after '-1'"):
        answer_once(path, 5)


def test_of_messages_that_come_at_the_same_time_one_is_answered(tmp_path, monkeypatch):
    path, together, outcomes = tmp_path / "answered", threading.Barrier(4), []

    def slowly(path, content, *, mode):
        threading.Event().wait(0.05)  # without the lock, all others have read the old note by now
        path.write_bytes(content)

    monkeypatch.setattr("gradveil.engines.answered.write_atomic", slowly)

    def ask():
        together.wait()
        try:
            answer_once(path, 1)
            outcomes.append("answered")
        except GradveilError:
            outcomes.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["answered", "refused", "refused", "refused"]
