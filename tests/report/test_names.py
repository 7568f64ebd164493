"""People see their own components without folders, and each reason of a failure once; rows keep full specs."""

import csv
import json

from gradveil.report.audit import headline, write_report
from gradveil.report.names import failures
from gradveil.report.notebook import audit_html
from tests.report.folders import privacy_row, utility_row

OWN = "/home/somebody/far/away/top_k.py:TopK:keep=0.05"


def folder_of(path, rows):
    path.mkdir()
    (path / "settings.toml").write_text(f'kind = "audit"\nmodel = "lenet"\ndefences = ["none", "{OWN}"]\n')
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_page_and_notebook_name_ones_own_file_without_its_folder(tmp_path):
    rows = [privacy_row("none", "gs", psnr=30.0, ssim=0.9), privacy_row(OWN, "gs", psnr=10.0, ssim=0.6)]
    rows += [utility_row("none", 0.9), utility_row(OWN, 0.8)]
    folder = folder_of(tmp_path / "run", rows)
    before = (folder / "rows.jsonl").read_bytes()
    page = write_report(folder)
    for text in (page.read_text().split('id="about"')[0], audit_html(folder, page), headline(rows)):
        assert "far/away" not in text
        assert "top_k.py:" in text
    assert OWN in page.read_text().split('id="about"')[1]  # the settings and the command are whole
    assert (folder / "rows.jsonl").read_bytes() == before
    with (folder / "summary.csv").open() as file:
        assert [line["defence"] for line in csv.DictReader(file)][-1] == OWN


def test_equal_reasons_are_told_once():
    rows = [
        privacy_row("none", f"gs:iterations={count}", failed=True, why="no memory", seed=seed)
        for count in range(5)
        for seed in range(2)
    ]
    names = "none, gs:iterations=0; none, gs:iterations=1; none, gs:iterations=2"
    assert failures(rows) == [f"{names} and 2 more: no memory (10 rows)"]
    assert failures([utility_row("none", None, failed=True, why="x")]) == ["none, training: x"]
