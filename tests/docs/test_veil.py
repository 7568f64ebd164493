"""docs/veil.md is what the measured data say, and its sentences hold in them."""

import io
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "results" / "veil-attacked.json").read_text())


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "veil_attacked.py"))


def test_page_and_data_agree(script):
    assert (ROOT / "docs" / "veil.md").read_text() == script["page"](RESULTS)


def test_the_picture_shows_the_data(script):
    drawn, there = (
        np.asarray(Image.open(source))
        for source in (io.BytesIO(script["picture"](RESULTS)), ROOT / "docs" / "images" / "veil-attacked.png")
    )
    assert np.array_equal(drawn, there)


def test_the_promise_holds_and_the_attacker_works(script):
    for view, mu, _, rows in script["rows_of"](RESULTS):
        gained = script["gain"](rows)[1]
        hits, images = (sum(row[key] for row in rows) for key in ("picked", "images"))
        if mu == script["QUIET"]:
            assert gained > 5
            assert hits > 0.9 * images
        elif view != "broken":
            assert mu > 3 or gained < 1
            assert all(row["picked_simulated"] <= row["bound"] for row in rows)
        if mu == 1 and view != "broken":
            assert all(row["picked_simulated"] < 0.02 for row in rows)


def test_a_sum_that_is_not_secure_breaks_the_stated_bound_and_keeps_its_own(script):
    broken = [row for row in RESULTS["attacked"] if row["view"] == "broken"]
    stated = {row["mu"]: row["bound"] for row in RESULTS["attacked"] if row["view"] == "sum"}
    assert broken
    assert all(row["picked_simulated"] < row["bound"] for row in broken)
    assert all(row["picked_simulated"] > stated[1] for row in broken if row["mu"] == 1)


def test_attacked_images_are_numbered_over_all_clients(script):
    assert script["joined_places"]([3, 2, 4], [[2, 0], [1], [3]]) == [2, 0, 4, 8]
    places = script["unknown_places"]([5, 1, 9], seed=0, count=6)
    assert [len(set(own)) for own in places] == [2, 1, 2]
    assert all(max(own) < size for own, size in zip(places, [5, 1, 9], strict=True))
