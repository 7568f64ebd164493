"""Pages for people outside the field, in Chromium: nothing is cut off, and an accessibility checker finds no fault."""

import base64
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from gradveil.report.audit import write_report
from gradveil.report.browser import print_pdf

from .folders import Made
from .test_browser import browser, settle, visit  # noqa: F401 - fixtures

OWN = "/home/somebody/secret/top_k.py:TopK:keep=0.05"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = Made(attacks=("gs:iterations=1000",), targets=6, settings={"dataset": "/home/somebody/secret/scans.npz"})
    made.let_through |= {(OWN, False): 0.7, (OWN, True): 0.9}
    made.accuracy |= {OWN: 0.93}
    folder = made.write(tmp_path_factory.mktemp("outsiders") / "run")
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"class_names": ["normal", "pneumonia"]}))
    write_report(folder)
    return folder


@pytest.mark.parametrize("width", [1280, 390])
def test_no_column_is_cut_off(visit, folder, width):  # noqa: F811 - the fixture
    page = visit(folder / "report.html", viewport={"width": width, "height": 900})
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for box in page.locator(".scroll").all():
        wide, there = box.evaluate("box => [box.scrollWidth, box.clientWidth]")
        assert wide <= there, box.get_attribute("aria-label")
    assert page.locator("#summary tbody tr").nth(1).get_by_text("of 6").first.is_visible()


def test_all_columns_can_be_asked_for(visit, folder):  # noqa: F811 - the fixture
    page = visit(folder / "report.html", viewport={"width": 1280, "height": 900})
    assert not page.locator("#summary thead th", has_text="MSE").is_visible()
    page.locator("#table .every-column").check()
    assert page.locator("#summary thead th", has_text="MSE").is_visible()


def test_classes_have_names_and_no_path_of_the_machine_is_in_what_people_read(visit, folder):  # noqa: F811
    page = visit(folder / "report.html")
    settle(page)
    truth = page.locator(".block").first.locator(".strip").first.locator(".tile span").all_inner_texts()
    assert truth[:3] == ["normal", "pneumonia", "2"], "a label without a name stays a number"
    hero = page.locator("main > section").first.inner_text() + page.title()
    assert "scans.npz" in hero
    assert "(normal, pneumonia)" in hero
    assert "/home" not in hero
    for figure in (folder / "figures").glob("*.svg"):
        assert "/home" not in figure.read_text()
    assert "/home" not in (folder / "summary.tex").read_text()


def test_there_is_a_verdict_in_words_and_what_it_means(visit, folder):  # noqa: F811 - the fixture
    page = visit(folder / "report.html")
    assert page.locator(".hero .verdict .badge").inner_text() == "✖ Leaks"
    assert page.get_by_role("heading", name="What this means for my patients").is_visible()
    assert page.locator(".verdicts li").count() == 3
    page.emulate_media(media="print")
    ink, paper = page.locator(".hero .badge").first.evaluate(
        "each => [getComputedStyle(each).color, getComputedStyle(each).backgroundColor]"
    )
    assert ink != paper
    assert page.locator("body").evaluate("body => getComputedStyle(body).printColorAdjust") == "exact"


def test_a_word_explains_itself_when_it_has_the_focus(visit, folder):  # noqa: F811 - the fixture
    page = visit(folder / "report.html")
    word = page.locator(".hero abbr").first
    word.focus()
    assert word.evaluate("word => getComputedStyle(word, '::after').content").strip('"') == word.get_attribute("title")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(browser, folder, width, scheme):  # noqa: F811 - the fixture
    found = find_spec("axe_playwright_python")
    if found is None:
        pytest.skip("axe is not installed")
    script = next(Path(found.origin).parent.rglob("axe.min.js")).read_text()
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto((folder / "report.html").as_uri())
    page.wait_for_selector("html[data-ready]")
    settle(page)
    page.evaluate(script)
    faults = page.evaluate("axe.run().then(result => result.violations)")
    context.close()
    assert [(fault["id"], [node["html"][:200] for node in fault["nodes"]][:3]) for fault in faults] == []


def test_it_prints_as_a_pdf(folder):
    printed = print_pdf(folder / "report.html")
    assert printed.name == "report.pdf"
    assert printed.read_bytes().startswith(b"%PDF")
    assert base64.b64encode(printed.read_bytes())


def test_the_command_prints_it_and_says_where(gradveil, folder):
    ended = gradveil("report", folder, "--pdf", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["pdf"] == str(folder / "report.pdf")


def test_without_a_browser_it_says_what_to_do(gradveil, folder, monkeypatch):
    monkeypatch.setattr("gradveil.report.browser.find_browser", lambda: None)
    ended = gradveil("report", folder, "--pdf")
    assert ended.code == 2
    assert "open" in ended.last
