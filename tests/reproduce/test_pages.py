"""Pages of results are made from data, and say a verdict for every claim."""

import json
import re
from pathlib import Path

import pytest

from gradveil.reproduce import pages, papers
from gradveil.reproduce.claims import VERDICTS, claims_of
from gradveil.reproduce.results import read_records

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAPERS = [name for name in papers() if claims_of(name)]


def without_marks(page):
    """Return a page without the lines that say that sources changed, for those change with every commit."""
    return re.sub(rf"{pages.CHANGED}: .*\n\n", "", page)


WRITTEN = {name: without_marks(page) for name, page in pages.pages(RESULTS).items()}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_pages_are_those_of_the_results(name):
    assert without_marks((ROOT / "docs" / "results" / name).read_text()) == WRITTEN[name], "Run: make results"


def test_a_changed_figure_changes_the_page(tmp_path):
    path = RESULTS / "soteria" / "fig7.json"
    content = json.loads(path.read_text())
    content["runs"][-1]["rows"][0]["loss_last_round"] = 99.25
    (tmp_path / "soteria").mkdir()
    (tmp_path / "soteria" / path.name).write_text(json.dumps(content))
    assert "99.25" in pages.pages(tmp_path)["soteria.md"]
    assert "99.25" not in WRITTEN["soteria.md"]


@pytest.mark.parametrize("paper", PAPERS)
def test_no_verdict_is_empty(paper):
    for records in ({}, read_records(RESULTS / paper)):
        found = pages.judged(papers()[paper], records)
        assert len(found) == len(claims_of(paper))
        assert all(one.verdict in VERDICTS and one.why for one in found)
        assert records or {one.verdict for one in found} == {"not run"}


def test_a_result_older_than_its_sources_is_marked(monkeypatch):
    paper, records = papers()["soteria"], read_records(RESULTS / "soteria")
    now = dict(next(iter(records["fig7"].sources.values())))
    monkeypatch.setattr("gradveil.reproduce.results.source_digests", lambda module: now)
    fresh = pages.paper_page(paper, {"fig7": records["fig7"]})
    assert pages.CHANGED not in fresh
    now["attacks/gs.py"] = "other"
    assert f"{pages.CHANGED}: `attacks/gs.py`." in pages.paper_page(paper, {"fig7": records["fig7"]})


def test_the_html_page_has_the_same_verdicts_and_the_pictures(tmp_path):
    (tmp_path / "fig7").mkdir()
    record = read_records(RESULTS / "soteria")["fig7"]
    run = dict(record.largest[0])
    (tmp_path / "fig7" / "results.json").write_text(json.dumps({**run, "sources": record.sources[run["sources"]]}))
    (tmp_path / "fig7" / "convergence.png").write_bytes(b"picture")
    page = pages.write_html(papers()["soteria"], tmp_path).read_text()
    rows = re.findall(r"<tr><td>.*?</tr>", page.partition("<h2>")[0])
    assert len(rows) == len(claims_of("soteria"))
    assert all("<td></td>" not in row for row in rows)
    assert 'src="data:image/png;base64,' in page
    assert "Figure 7" in page
