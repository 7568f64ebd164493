import pytest
from matplotlib.figure import Figure

from gradveil.report.files import save_figure, to_csv


def drawn():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], [1, 0], "o-")
    axes.set_title("a title")
    return figure


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_figure_gives_the_same_bytes(tmp_path, kind):
    paths = [save_figure(drawn(), tmp_path / f"{name}.{kind}") for name in "ab"]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes().startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_a_table_quotes_what_it_must_and_leaves_missing_values_empty():
    rows = [{"a": "x,y", "b": ["p", "q"]}, {"a": None}, {"b": {"A": 0.5, "rate": 1}}]
    assert to_csv(rows, ["a", "b"]) == b'a,b\n"x,y",p+q\n,\n,A=0.5+rate=1\n'


def test_a_key_that_is_no_column_is_an_error():
    with pytest.raises(ValueError, match="'odd'"):
        to_csv([{"a": 1, "odd": 1}], ["a"])
