"""The documentation site builds strictly, all of its links lead somewhere, and it loads nothing from outside."""

import doctest
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import gradveil
from gradveil.catalogue import FOLDERS, catalogue
from tests.report.test_browser import BROWSER, FLAGS

pytest.importorskip("mkdocs")
pytest.importorskip("material")

from website import api, commands, components, drawings, maths, repository

ROOT = Path(__file__).parents[2]
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src"}


class Links(HTMLParser):
    """Collects what a page links to, what it loads, and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors, self.unnamed = set(), set(), set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        """Note one element."""
        given = dict(attributes)
        self.anchors.update(filter(None, (given.get("id"), given.get("name"))))
        if tag == "a" and given.get("href"):
            self.links.add(given["href"])
        if tag == "link" and given.get("rel") not in ("prev", "next", "canonical"):
            self.loads.add(given.get("href", ""))
        if tag in LOADS and given.get(LOADS[tag]):
            self.loads.add(given[LOADS[tag]])
        if tag == "img" and not given.get("alt"):
            self.unnamed.append(given.get("src"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site once."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Links(path.read_text()) for path in sorted(site.rglob("*.html"))}


def dead(page, links, pages):
    """Return the links of a page that lead to no file or to no anchor."""
    wrong = []
    for link in links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc or link.startswith("data:"):
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path not in ("", ".") else page
        target = target / "index.html" if target.is_dir() else target
        anchor = unquote(parts.fragment)
        if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
            wrong.append(link)
    return wrong


def test_no_link_and_no_anchor_is_dead(pages):
    found = {str(path): dead(path, page.links | page.loads, pages) for path, page in pages.items()}
    assert {name: links for name, links in found.items() if links and not name.endswith("404.html")} == {}


def test_a_dead_link_is_found(site, pages):
    page = site / "index.html"
    assert dead(page, ["start.html", "none.html", "start.html#install", "start.html#none"], pages) == [
        "none.html", "start.html#none",
    ]  # fmt: skip


def test_nothing_is_loaded_from_outside(site, pages):
    outside = {load for page in pages.values() for load in page.loads if urlsplit(load).netloc}
    assert outside == set()
    for style in site.rglob("*.css"):
        assert re.findall(r"url\(['\"]?https?:", style.read_text()) == []


def test_every_component_has_a_page_and_every_picture_a_text(site, pages):
    for kind in FOLDERS:
        for name in catalogue(kind).entries:
            assert (site / "components" / kind / f"{name}.html").exists()
    assert {str(path): page.unnamed for path, page in pages.items() if page.unnamed} == {}


def test_formulas_are_drawn_without_a_script(site):
    text = (site / "components" / "defences" / "soteria.html").read_text()
    assert "<mfrac>" in text
    for path in site.rglob("*.html"):
        page = path.read_text()
        assert 'class="arithmatex"' not in page, path
        assert ".. math::" not in re.sub(r"<pre.*?</pre>|<code.*?</code>", "", page, flags=re.DOTALL), path


def test_the_reference_has_every_public_name(pages, site):
    assert sorted(name for names in api.GROUPS.values() for name in names) == sorted(gradveil.__all__)
    shown = (site / "reference" / "python.html").read_text()
    assert [name for name in gradveil.__all__ if f"gradveil.{name}" not in shown] == []


def test_a_page_of_options_has_every_command(site):
    for name in ("audit", "train", "recommend", "data verify"):
        assert f"\n## gradveil {name}\n" in commands.page()


def test_a_verdict_is_that_of_the_league_table():
    entry = catalogue("defences").entries["soteria"]
    line = {"defence": "soteria:probes=1", "blind": 13.0}
    broken = {"attack": "gs", "psnr": 30.0, "identified": 1.0}
    holds = {"attack": "lti", "psnr": 12.0, "identified": 0.0}
    lines = [line | {"after plain": holds, "after adaptive": last} for last in (broken, holds)]
    assert "Images are recovered" in components.verdict(entry, lines[:1])
    assert "No attack here" in components.verdict(entry, lines[1:])
    assert components.verdict(entry, []) == ""


@pytest.mark.parametrize("module", [maths, repository, drawings], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    tried = doctest.testmod(module)
    assert tried.attempted
    assert not tried.failed


@pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")
def test_a_browser_finds_no_fault_and_the_search_works_from_a_folder(site):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as opened:
        browser = opened.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport={"width": 390, "height": 800})
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        for name in ("index", "what-a-server-sees", "components/defences/veil", "concepts/mu", "reference/commands"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        page.set_viewport_size({"width": 1280, "height": 800})
        page.goto((site / "index.html").as_uri())
        box, found = page.locator("input.md-search__input"), page.get_by_text("matching documents")
        for _ in range(60):  # the search starts when its box gets the focus after the scripts are there
            box.blur()
            box.fill("canaries")
            page.wait_for_timeout(250)
            if found.count():
                break
            box.fill("")
        assert found.count()
        browser.close()
    assert said == []
    assert {url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))} == set()
