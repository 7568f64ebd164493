"""Tables of docs/results.md that are made from results/*.json."""

import re
import runpy

from tests.docs.test_links import ROOT

PAGES = runpy.run_path(str(ROOT / "benchmarks" / "pages.py"))


def test_tables_are_those_of_the_measurements():
    text = (ROOT / "docs" / "results.md").read_text()
    assert PAGES["written"](text) == text
    assert set(re.findall(r"<!-- results/([a-z-]+)\.json -->", text)) == set(PAGES["TABLES"])


def test_a_typed_figure_is_replaced():
    """By hand: the block has one wrong cell."""
    text = (ROOT / "docs" / "results.md").read_text()
    wrong = re.sub(r"(<!-- results/completion\.json -->.*?\| plain \| )[\d.]+", r"\g<1>99.9", text, flags=re.DOTALL)
    assert wrong != text
    assert PAGES["written"](wrong) == text
