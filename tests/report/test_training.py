"""The page of a run: self-contained, escaped, with a command that repeats the run."""

import base64
import re
import shlex
from dataclasses import fields
from html import unescape
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.config import TrainSettings, make_train_settings
from gradveil.report.training import command, headline, promise, warnings_of, write_page

ROWS = [
    {"round": 1, "accuracy": 0.5, "accuracy_sensitive": None, "loss": 1.23456, "lr": 0.05, "seconds": 0.1},
    {"round": 2, "accuracy": 0.75, "accuracy_sensitive": None, "loss": 0.5, "lr": 0.05, "seconds": 0.1},
]
VOID = {"meta", "img"}


def clients(count):
    return [{"client": n, "images": 20, "accuracy_own": n / count, "accuracy_test": 0.5} for n in range(count)]


class Checker(HTMLParser):
    """A parser that checks that every tag is closed, and collects the texts of cells and the addresses."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.cells = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for key, value in attrs if key in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def page(tmp_path, settings=None, rows=ROWS, some=None, note=""):
    (tmp_path / "curves.png").write_bytes(b"\x89PNG picture")
    path = write_page(tmp_path, settings or TrainSettings(), rows, clients(3) if some is None else some, note)
    assert path == tmp_path / "report.html"
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    return text, checker


def test_the_page_needs_no_other_file(tmp_path):
    _, checker = page(tmp_path)
    (source,) = checker.links
    kind, data = source.split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == b"\x89PNG picture"


def test_the_page_shows_the_rows_and_the_worst_clients_first(tmp_path):
    _, checker = page(tmp_path)
    assert checker.cells[:10] == ["1", "50.00%", "1.235", "0.05", "0.1", "2", "75.00%", "0.5", "0.05", "0.1"]
    assert checker.cells[10:14] == ["0", "20", "0.00%", "50.00%"]
    assert checker.cells[18:21] == ["2", "20", "66.67%"]


def test_columns_without_values_are_left_out_and_single_gaps_are_empty(tmp_path):
    text, _ = page(tmp_path)
    assert "sensitive" not in text.lower()
    rows = [ROWS[0] | {"accuracy_sensitive": 0.125}, ROWS[1]]
    text, checker = page(tmp_path, rows=rows)
    assert ">Sensitive accuracy</th>" in text
    assert "12.50%" in checker.cells


def test_warnings_of_the_tripwire_are_counted_in_rows_and_at_the_top(tmp_path):
    assert "tripwire" not in page(tmp_path)[0].lower()
    calm = [row | {"tripwire_warnings": 0} for row in ROWS]
    text, checker = page(tmp_path, rows=calm)
    assert ">Tripwire warnings</th>" in text
    assert checker.cells[4] == "0"
    assert "warned" not in text
    text, checker = page(tmp_path, rows=[calm[0], calm[1] | {"tripwire_warnings": 3}])
    assert checker.cells[10] == "3"
    sentence = "Clients warned of traps in the model that they received: 3 warnings in 1 of 2 rounds."
    assert text.index(sentence) < text.index("<img")
    assert warnings_of([ROWS[0], ROWS[1] | {"tripwire_warnings": 1}]).endswith(": 1 warning in 1 of 1 rounds.")


def test_a_training_that_did_not_learn_says_so_at_the_top(tmp_path):
    assert "has not learned" not in page(tmp_path)[0]
    text, _ = page(tmp_path, rows=[ROWS[0], ROWS[1] | {"at_chance": True}])
    assert text.index("<strong>The training has not learned anything: after 2 rounds") < text.index("<img")
    assert "has not learned" not in page(tmp_path, rows=[ROWS[0] | {"at_chance": True}, ROWS[1]])[0]  # it did later


def test_a_field_that_is_no_column_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="got 'odd'"):
        page(tmp_path, rows=[ROWS[0] | {"odd": 1}])


def test_what_a_defence_reports_is_in_the_table(tmp_path):
    _, checker = page(tmp_path, rows=[row | {"reports": {"A": 0.5, "replaced": 0.25}} for row in ROWS])
    assert "A 0.5, replaced 0.25" in checker.cells


def test_only_fifty_clients_are_listed(tmp_path):
    text, checker = page(tmp_path, some=clients(120))
    assert "(50 of them)" in text
    assert len(checker.cells) == 2 * 5 + 50 * 4
    assert "(50 of them)" not in page(tmp_path, some=clients(50))[0]


def test_texts_of_the_user_are_escaped(tmp_path):
    nasty = "<script>alert('x')</script>&\"/"
    text, _ = page(tmp_path, TrainSettings(dataset=nasty, model=nasty, defence=nasty), note=nasty)
    assert "<script" not in text
    assert unescape(text).count("<script>alert('x')</script>") >= 4


def test_the_headline_is_the_result():
    settings = TrainSettings(model="mlp", dataset="mnist-5k", clients=7)
    sentence = headline(settings, ROWS)
    assert sentence == (
        "mlp on mnist-5k, defence none: after 2 rounds with 7 clients, 75.00% of the test images are recognised."
    )
    assert "before any training" in headline(settings, [{"round": 0, "accuracy": 0.1}])


def test_the_page_says_what_the_defence_states_or_nothing(tmp_path):
    stated = {"epsilon": 10.0, "delta": 1e-5, "mu": 2.0, "identified_bound": 0.138}
    assert promise([{"epsilon": 1.0}, stated, {"epsilon": None}]) == (
        "The defence states for all rounds together: ε = 10, δ = 1e-05, μ = 2; picked out of 1,000: 13.8% at most."
    )
    assert promise([{"epsilon": 0.5, "delta": 1e-5}]).endswith("ε = 0.5, δ = 1e-05.")
    assert promise(ROWS) == ""
    assert "The defence states" not in page(tmp_path)[0]
    text, _ = page(tmp_path, rows=[*ROWS[:-1], {**ROWS[-1], **stated}])
    assert "ε = 10, δ = 1e-05, μ = 2" in text


def test_the_command_of_the_defaults_has_no_options():
    assert command(TrainSettings()) == "gradveil train --out DIR"


NASTY = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(
    lambda t: not t.startswith("-")
)


@given(
    settings=st.builds(
        TrainSettings,
        dataset=NASTY,
        defence=NASTY,
        clients=st.integers(5, 99),
        rounds=st.integers(3, 99),
        lr=st.floats(1e-9, 1e9),
        nesterov=st.booleans(),
        lr_steps=st.lists(st.integers(1, 99), max_size=3).map(tuple),
        save_rounds=st.lists(st.integers(1, 3), max_size=3).map(tuple),
        seed=st.integers(0, 2**63 - 1),
    )
)
def test_the_command_repeats_the_settings(settings):
    pieces = shlex.split(command(settings))
    assert pieces[:2] == ["gradveil", "train"]
    assert pieces[-2:] == ["--out", "DIR"]
    given_options, rest = {}, pieces[2:-2]
    flags = {field.name for field in fields(TrainSettings) if isinstance(field.default, bool)}
    while rest:
        option = rest.pop(0)
        assert re.fullmatch(r"--[a-z-]+", option)
        name = option[2:].replace("-", "_")
        given_options[name] = True if name in flags else rest.pop(0)
    assert make_train_settings(given_options) == settings


def test_a_missing_figure_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_page(tmp_path, TrainSettings(), ROWS, clients(2), "")
