"""A site's ledger: rounds increase, weights are known, and the file is whole, private and locked."""

import threading

import pytest

from gradveil.engines.site_ledger import Ledger, RunRecord, open_ledger
from gradveil.errors import RefusedError, RunFolderError
from gradveil.federated.client import Score


def test_rounds_increase_and_an_unanswered_request_may_come_again():
    record = RunRecord().begin(3, "request")
    assert record.begin(3, "request") == record
    for number, request in ((3, "another"), (2, "request"), (0, "request")):
        with pytest.raises(RefusedError, match="Rounds must increase"):
            record.begin(number, request)
    assert record.answer("weights").begin(4, "another").answer("more").received == ("weights", "more")


def test_one_result_per_answered_round_is_scored():
    begun = RunRecord().begin(1, "request")
    for number, weights in ((0, "weights"), (1, "weights"), (1, "result")):
        with pytest.raises(RefusedError):
            begun.admit(number, weights)  # nothing was sent yet
    assert begun.answer("weights").admit(0, "weights") == begun.answer("weights")
    answered = begun.answer("weights").admit(1, "result")
    assert answered.admit(1, "result") == answered
    assert answered.begin(2, "more").result == "result"  # a round that is not answered admits nothing new
    for number, weights in ((1, "other"), (2, "other"), (0, "other")):
        with pytest.raises(RefusedError):
            answered.admit(number, weights)


def test_a_ledger_survives_as_a_private_file(tmp_path):
    path = tmp_path / "keys" / "ledger-0.json"
    record = RunRecord(2, "q", 2, ("a", "b"), "c", {"k": Score(1, 0.5, 2, (1, 0), (1, 1))})
    wanted = Ledger(epsilon=0.1).with_run("run", record)
    with open_ledger(path) as book:
        book.write(wanted)
    with open_ledger(path) as book:
        assert book.ledger == wanted
    assert wanted.updates == 1
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o666)
    with pytest.raises(RunFolderError, match="others may have changed it"), open_ledger(path):
        pass


def test_messages_at_the_same_time_wait_for_each_other(tmp_path):
    path = tmp_path / "ledger-0.json"

    def count(number):
        with open_ledger(path) as book:
            book.write(book.ledger.with_run(str(number), RunRecord(1)))

    threads = [threading.Thread(target=count, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with open_ledger(path) as book:
        assert (book.ledger.updates, len(book.ledger.runs)) == (8, 8)


def test_a_budget_ends():
    ledger = Ledger().spend(0.5, 1.0).spend(0.5, 1.0)
    assert ledger.epsilon == 1.0
    with pytest.raises(RefusedError, match="may cost 1 in all"):
        ledger.spend(0.5, 1.0)
