"""The figure of a run: its points are those of the rows."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image

from gradveil.report.curves import curves, draw_curves


def rows(count=3, **more):
    return [{"round": n, "accuracy": n / 10, "loss": 2.0 / n, "seconds": 0.1, **more} for n in range(1, count + 1)]


def lines(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


def test_accuracy_is_shown_in_percent_and_loss_unchanged():
    left, right = curves(rows(accuracy_sensitive=0.25)).axes
    assert lines(left)["test"] == [[1, 10], [2, 20], pytest.approx([3, 30])]
    assert lines(left)["sensitive (training images)"] == [[1, 25], [2, 25], [3, 25]]
    assert [line.get_xydata().tolist() for line in right.lines] == [[[1, 2.0], [2, 1.0], pytest.approx([3, 2 / 3])]]
    assert left.get_ylim() == (0, 100)
    assert right.get_ylim()[0] == 0
    assert left.get_xlabel() == right.get_xlabel() == "round"
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["test", "sensitive (training images)"]


def test_rounds_without_evaluation_are_left_out():
    some = rows(4)
    some[1] |= {"accuracy": None, "loss": None}
    left, right = curves(some).axes
    assert [point[0] for point in lines(left)["test"]] == [1, 3, 4]
    assert [point[0] for point in right.lines[0].get_xydata()] == [1, 3, 4]
    assert curves(rows(accuracy_sensitive=None)).axes[0].lines[0].get_label() == "test"
    assert len(curves(rows(accuracy_sensitive=None)).axes[0].lines) == 1


@pytest.mark.parametrize(
    "some", [[], [{"round": 0, "accuracy": 0.1, "loss": 3.0}], [{"round": 1, "accuracy": None}], rows(200)]
)
def test_any_number_of_rows_can_be_drawn(some, tmp_path):
    figure = curves(some)
    assert sum(len(axes.lines) for axes in figure.axes) == (2 if some and some[0]["accuracy"] is not None else 0)
    assert draw_curves(some, tmp_path) == tmp_path / "curves.png"


def test_both_pictures_are_written_and_show_something(tmp_path):
    draw_curves(rows(), tmp_path)
    with Image.open(tmp_path / "curves.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[:2] == (540, 1350)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
    root = ElementTree.parse(tmp_path / "curves.svg").getroot()  # noqa: S314 - our own file
    assert root.tag.endswith("svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "curves.svg"]
