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


def test_a_table_keeps_to_its_columns_and_quotes_what_it_must():
    rows = [{"a": "x,y", "b": ["p", "q"], "odd": 1}, {"a": None}]
    assert to_csv(rows, ["a", "b"]) == b'a,b\n"x,y",p+q\n,\n'
