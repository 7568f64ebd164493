"""The plane: points, front, labels, drawing."""

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.metrics import schema_of
from gradveil.report.audit import summarise, utility
from gradveil.report.figures import plane
from gradveil.report.labels import LETTER, TALL, spread
from gradveil.report.plane import Point, front, plane_svg, points, ticks

from .folders import privacy_row, utility_row

PSNR, SSIM, LPIPS = (schema_of().column("privacy", key) for key in ("psnr", "ssim", "lpips"))
ROWS = [
    privacy_row("none", psnr=30.0, ssim=0.9, lpips=0.1),
    privacy_row("none", "dlg", psnr=25.0, ssim=0.95, lpips=0.2),
    privacy_row("a", psnr=10.0, ssim=0.1, lpips=0.9),
    privacy_row("a", adaptive=True, psnr=20.0, ssim=0.3, lpips=0.5),
    privacy_row("b", psnr=22.0, ssim=0.2, lpips=0.4),
    privacy_row("not trained", psnr=1.0),
    utility_row("none", 0.97),
    utility_row("a", 0.95),
    utility_row("b", 0.9),
    utility_row("not attacked", 0.99),
]


@pytest.mark.parametrize(
    ("metric", "none", "a"), [(PSNR, 30.0, (10.0, 20.0)), (SSIM, 0.95, (0.1, 0.3)), (LPIPS, 0.1, (0.9, 0.5))]
)
def test_points_are_the_strongest_attacks(metric, none, a):
    found = {point.defence: point for point in points(summarise(ROWS), utility(ROWS), metric)}
    assert set(found) == {"none", "a", "b"}
    assert (found["none"].plain, found["none"].adaptive) == (none, None)
    assert (found["a"].plain, found["a"].adaptive) == a
    assert found["a"].worst(metric) == a[1]
    assert found["a"].attack == "gs (knows the defence)"


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12),
    st.sampled_from([PSNR, LPIPS]),
)
def test_the_front_holds_the_points_that_no_other_beats(places, metric):
    some = [Point(str(n), accuracy, leak, None, "") for n, (accuracy, leak) in enumerate(places)]
    sign = -1 if metric is LPIPS else 1

    def beaten(p):
        return any(
            q.accuracy >= p.accuracy
            and sign * q.plain <= sign * p.plain
            and (q.accuracy, q.plain) != (p.accuracy, p.plain)
            for q in some
        )

    best = front(some, metric)
    assert {(p.accuracy, p.plain) for p in best} == {(p.accuracy, p.plain) for p in some if not beaten(p)}
    assert [p.accuracy for p in best] == sorted({p.accuracy for p in best})


@given(st.floats(-1e3, 1e3), st.floats(0, 1e3))
def test_ticks_span_the_range_and_are_few(low, size):
    found = ticks(low, low + size)
    assert found[0] <= low + 1e-6
    assert found[-1] >= low + size - 1e-6
    assert 2 <= len(found) <= 12
    assert found == sorted(set(found))


def test_names_do_not_hide_each_other_where_there_is_room():
    places = [(300, 200), (305, 202), (310, 204)]
    names = ["gaussian:std=0.1", "laplace:scale=0.1", "prune:fraction=0.9"]
    found = spread(names, places, [[place] for place in places], (0, 0, 800, 400))
    boxes = [(x, y - TALL + 3, x + LETTER * len(name), y + 3) for name, (x, y) in zip(names, found, strict=True)]
    for n, one in enumerate(boxes):
        assert one[0] >= 0
        assert one[2] <= 800
        for other in boxes[:n]:
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


@pytest.mark.parametrize("metric", [PSNR, SSIM, LPIPS])
@pytest.mark.parametrize("width", [400, 860])
def test_the_drawing_is_complete_and_escaped(metric, width):
    nasty = "my/<b>&\"'file.py:D"
    rows = [*ROWS, privacy_row(nasty, lpips=0.2), utility_row(nasty, 0.5)]
    drawing = ElementTree.fromstring(plane_svg(points(summarise(rows), utility(rows), metric), metric, width))  # noqa: S314
    assert len(drawing.findall(".//circle[@class='plain']")) == 4
    assert len(drawing.findall(".//circle[@class='adaptive']")) == 1
    titles = [title.text for title in drawing.findall(".//g/title")]
    assert any(title.startswith(nasty) for title in titles)
    xs = [float(circle.get("cx")) for circle in drawing.iter("circle")]
    assert min(xs) >= 0
    assert max(xs) <= width


def test_more_leak_is_higher_whatever_the_measure():
    for metric in (PSNR, LPIPS):
        drawing = ElementTree.fromstring(plane_svg(points(summarise(ROWS), utility(ROWS), metric), metric))  # noqa: S314
        (group,) = [g for g in drawing.iter("g") if g.findtext("title").startswith("a\n")]
        heights = {circle.get("class"): float(circle.get("cy")) for circle in group.iter("circle")}
        assert heights["adaptive"] < heights["plain"]


def test_one_point_can_be_drawn():
    rows = [ROWS[0], ROWS[6]]
    assert "<circle" in plane_svg(points(summarise(rows), utility(rows), PSNR), PSNR)
    assert plane(summarise(rows), utility(rows)).axes[0].lines


def test_the_figure_has_the_points():
    axes = plane(summarise(ROWS), utility(ROWS)).axes[0]
    marks = {tuple(map(float, line.get_xydata()[0])) for line in axes.lines if line.get_marker() == "o"}
    assert marks == {(97.0, 30.0), (95.0, 10.0), (95.0, 20.0), (90.0, 22.0)}
    assert {text.get_text() for text in axes.texts} == {"none", "a", "b"}
