"""Tables of the manual that stand between marks are made from results/*.json."""

import re
import runpy

import pytest

from tests.docs.test_links import ROOT

PAGES = runpy.run_path(str(ROOT / "benchmarks" / "pages.py"))


@pytest.mark.parametrize("page", PAGES["PAGES"], ids=lambda page: page.name)
def test_tables_are_those_of_the_measurements(page):
    text = page.read_text()
    assert PAGES["written"](text) == text, "Run: make results"


def test_every_table_has_a_place():
    found = [
        name for page in PAGES["PAGES"] for name in re.findall(r"<!-- results/([a-z-]+)\.json -->", page.read_text())
    ]
    assert sorted(found) == sorted(PAGES["TABLES"])


def test_a_typed_figure_is_replaced():
    """By hand: the block has one wrong cell."""
    text = (ROOT / "docs" / "results" / "notes-dcs2.md").read_text()
    wrong = re.sub(r"(<!-- results/completion\.json -->.*?\| plain \| )[\d.]+", r"\g<1>99.9", text, flags=re.DOTALL)
    assert wrong != text
    assert PAGES["written"](wrong) == text
