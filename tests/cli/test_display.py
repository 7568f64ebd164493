import io

import pytest
from rich.table import Table

from gradveil.cli import display


def test_names_are_not_interpreted_as_markup(capsys):
    table = Table("defence")
    table.add_row("my[/b].py:[red]Mine")
    display.show(table)
    assert "my[/b].py:[red]Mine" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.12345, "0.1235"), (3.0, "3")])
def test_figures(value, text):
    assert display.figure(value) == text


def test_a_file_gets_occasional_lines_instead_of_a_progress_bar(capsys, monkeypatch):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr(display.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with display.bar("cells") as move:
        for done in range(6):
            move(done, 6, "attack [x]", "figure")
    lines = [line for line in display.sys.stderr.getvalue().splitlines() if line.startswith(tuple("012345"))]
    assert 1 <= len(lines) < 6
    assert all(line.endswith("/6 cells attack [x] figure") for line in lines)


def test_a_share_is_shown_in_percent(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with display.bar("") as move:
        move(0.25, 1, "attacking")
    assert "25%" in display.sys.stderr.getvalue()
