"""Pictures of a defence that draws images of its own stand beside these, not beside those of the others."""

import json
import re

import numpy as np
import pytest

from gradveil.audits import audit, make_audit_settings
from gradveil.report.audit_folder import read_audit
from gradveil.report.sheets import read_gallery


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    settings = make_audit_settings(
        {
            "defences": "dp-sgd", "attacks": "gs:iterations=3", "rounds": 2, "tap": "2", "clients": 8,
            "partition": "iid:images=20", "targets": 8,
        }
    )  # fmt: skip
    return audit(settings, tmp_path_factory.mktemp("run") / "run", workers=0)


def test_each_line_is_scored_against_the_images_that_were_used(drawn):
    gallery = read_gallery(read_audit(drawn.out))
    plain = next(line for line in gallery.lines if line.defence == "none")
    own = next(line for line in gallery.lines if line.defence == "dp-sgd")
    assert plain.truth is None
    assert plain.labels is None
    assert own.truth is not None
    assert not np.array_equal(own.truth, gallery.truth)
    rows = [row for row in drawn.rows if row["kind"] == "privacy" and row["defence"] == "dp-sgd"]
    assert {row["images"] for row in rows} > {0}
    for row in rows:
        (column,) = [n for n, picture in enumerate(gallery.columns) if picture.target == row["target"]]
        assert own.there[column] == (row["images"] > 0)
        assert (own.psnr[-1][column] is None) == (row["images"] == 0)
        if row["images"] == 1:
            assert own.psnr[-1][column] == pytest.approx(row["psnr"], abs=0.01)
    assert not any("other images" in note for note in gallery.notes)


def test_the_page_has_a_sheet_of_these_images(drawn):
    page = drawn.report.read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))
    sheets = len(re.findall(r'id="sheet-\d+"', page))
    assert [line["truth_sheet"] for line in data["lines"]] == [0, len(data["lines"]) + 1]
    assert sheets == 2 + len(data["lines"])
    assert data["lines"][0]["labels"] is None
    assert len(data["lines"][1]["labels"]) == len(data["columns"])
