"""A site's history: one line per answer, only added to; changes, losses and old copies of the ledger are found."""

import json
import threading
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from gradveil.cli import app
from gradveil.engines.site_history import GivenAnswer, append, digest_of_line, line_of, read_history, require_fit
from gradveil.engines.site_ledger import RunRecord, history_of, open_ledger
from gradveil.errors import RunFolderError


def answer_rounds(path, numbers):
    """Let a site answer some rounds of a run, as `flower_site` does."""
    for number in numbers:
        with open_ledger(path) as book:
            begun = book.ledger.run("run").begin(number, f"request {number}")
            book.write(book.ledger.with_run("run", begun))
            book.note(GivenAnswer("run", number, "train", f"model {number}"))
            book.write(book.ledger.with_run("run", begun.answer(f"model {number}")))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys" / "ledger-0.json"
    answer_rounds(path, [1, 2, 3])
    return path


def test_each_answer_is_a_line_that_points_to_the_one_before(path):
    lines = history_of(path).read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]
    assert [json.loads(line)["before"] for line in lines] == ["", *map(digest_of_line, lines[:2])]
    assert history_of(path).stat().st_mode & 0o777 == 0o600
    with open_ledger(path) as book:
        assert (book.ledger.answers, book.ledger.last) == (3, digest_of_line(lines[2]))


@pytest.mark.parametrize("damage", ["changed", "first removed", "last removed", "inserted", "deleted", "no text"])
def test_a_damaged_history_stops_the_site(path, damage):
    history = history_of(path)
    lines = history.read_text().splitlines()
    damaged = {
        "changed": [lines[0].replace("model 1", "model 9"), *lines[1:]],
        "first removed": lines[1:],
        "last removed": lines[:2],
        "inserted": [lines[0], line_of(GivenAnswer("run", 1, "train", "model")), *lines[1:]],
        "no text": ["nothing"],
    }
    if damage == "deleted":
        history.unlink()
    else:
        history.write_text("".join(line + "\n" for line in damaged[damage]))
    with pytest.raises(RunFolderError), open_ledger(path):
        pass


def test_others_may_not_write_to_it(path):
    history_of(path).chmod(0o622)
    with pytest.raises(RunFolderError, match="must have mode 0600"), open_ledger(path):
        pass


@pytest.mark.parametrize("rounds", [[3], [2, 3]])
def test_an_old_copy_of_the_ledger_is_noticed(tmp_path, rounds):
    path = tmp_path / "ledger-0.json"
    answer_rounds(path, [1])
    old = path.read_bytes()
    answer_rounds(path, rounds)
    path.write_bytes(old)
    with pytest.raises(RunFolderError, match="Restore both files"), open_ledger(path):
        pass


def test_a_site_that_was_killed_between_both_files_goes_on(path):
    for _ in range(3):  # again and again
        with open_ledger(path) as book:
            again = book.ledger.run("run").begin(4, "request 4")
            book.write(book.ledger.with_run("run", again))
            book.note(GivenAnswer("run", 4, "train", "model 4"))
    answer_rounds(path, [5])
    assert [answer.round for answer in read_history(history_of(path))] == [1, 2, 3, 4, 4, 4, 5]


def test_a_line_that_was_cut_off_is_written_again(path):
    with history_of(path).open("a") as file:
        file.write('{"run": "ru')
    answer_rounds(path, [4])
    assert [answer.round for answer in read_history(history_of(path))] == [1, 2, 3, 4]


def test_messages_at_the_same_time_make_one_chain(tmp_path):
    path = tmp_path / "ledger-0.json"

    def answer(number):
        with open_ledger(path) as book:
            begun = RunRecord().begin(1, "request")
            book.write(book.ledger.with_run(str(number), begun))
            book.note(GivenAnswer(str(number), 1, "train", "model"))
            book.write(book.ledger.with_run(str(number), begun.answer("model")))

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.run for answer in read_history(history_of(path))} == set(map(str, range(8)))
    with open_ledger(path) as book:
        assert (book.ledger.answers, book.ledger.updates) == (8, 8)


def test_a_missing_line_is_told_from_one_too_many(tmp_path):
    path = tmp_path / "history-0.jsonl"
    first = line_of(GivenAnswer("run", 1, "train", "model"))
    second = line_of(replace(GivenAnswer("run", 2, "train", "model"), before=digest_of_line(first)))
    append(path, first)
    append(path, second)
    for answers, last, fine in (
        (2, digest_of_line(second), True),
        (1, digest_of_line(first), True),
        (1, digest_of_line(second), False),
        (0, "", False),
        (3, digest_of_line(second), False),
    ):
        if fine:
            require_fit(path, answers, last)
        else:
            with pytest.raises(RunFolderError):
                require_fit(path, answers, last)


def test_the_command_shows_it_and_finds_damage(path):
    shown = CliRunner().invoke(app, ["ledger", str(history_of(path))])
    assert shown.exit_code == 0
    assert "round 3" in shown.stdout
    assert "3 answers in 1 runs." in shown.stdout
    as_json = CliRunner().invoke(app, ["ledger", str(history_of(path)), "--json"])
    assert [answer["model"] for answer in json.loads(as_json.stdout)["answers"]] == ["model 1", "model 2", "model 3"]
    history_of(path).write_text(history_of(path).read_text().replace("model 1", "model 9"))
    assert isinstance(CliRunner().invoke(app, ["ledger", str(history_of(path))]).exception, RunFolderError)
