import json

import pytest
from PIL import Image

from gradveil.reproduce.provenance import source_digests
from gradveil.reproduce.results import Record, keep, read_records, rows_over_seeds


def document(seed=0, scale="smoke", rows=({"a": 1.0},), sources=None, figures=()):
    return {
        "paper": "soteria", "table": "fig3", "title": "parts", "scale": scale, "seed": seed, "rows": list(rows),
        "sources": sources or {"x.py": "1"}, "figures": list(figures),
    }  # fmt: skip


def test_runs_of_one_experiment_share_a_file_and_a_repeated_run_replaces_the_old_one(tmp_path):
    for one in (document(1), document(0, "small"), document(0), document(1, rows=[{"a": 2.0}])):
        path = keep(one, tmp_path, tmp_path / "results")
    assert path == tmp_path / "results" / "soteria" / "fig3.json"
    (record,) = read_records(path.parent).values()
    assert [(run["scale"], run["seed"], run["rows"]) for run in record.runs] == [
        ("smoke", 0, [{"a": 1.0}]), ("smoke", 1, [{"a": 2.0}]), ("small", 0, [{"a": 1.0}]),
    ]  # fmt: skip
    assert [run["scale"] for run in record.largest] == ["small"]
    assert json.loads(path.read_text())["title"] == "parts"


def test_sources_are_kept_once_and_go_with_their_last_run(tmp_path):
    for one in (document(0), document(1), document(1, sources={"x.py": "2"})):
        path = keep(one, tmp_path, tmp_path)
    assert len(read_records(path.parent)["fig3"].sources) == 2
    path = keep(document(0, sources={"x.py": "2"}), tmp_path, tmp_path)
    assert list(read_records(path.parent)["fig3"].sources.values()) == [{"x.py": "2"}]


def test_pictures_are_those_of_the_first_seed_of_the_largest_scale(tmp_path):
    made = tmp_path / "made"
    made.mkdir()

    def kept(brightness, one):
        Image.new("L", (1600, 400), brightness).save(made / "p.png")
        keep(one, made, tmp_path)
        with Image.open(tmp_path / "soteria" / "fig3-p.png") as picture:
            assert picture.size == (800, 200)
            return picture.convert("L").getpixel((0, 0))

    assert kept(10, document(0, figures=["p"])) == 10
    assert kept(20, document(1, figures=["p"])) == 10
    assert kept(30, document(2, "small", figures=["p"])) == 30


@pytest.mark.parametrize(
    ("change", "wanted"), [({}, []), ({"attacks/gs.py": "0"}, ["attacks/gs.py"]), ({"gone.py": "0"}, ["gone.py"])]
)
def test_changed_sources_are_named(change, wanted):
    then = {**source_digests("gradveil.reproduce.soteria"), **change}
    assert Record("t", [{"scale": "smoke", "seed": 0, "sources": "d"}], {"d": then}).changed("soteria") == wanted


def test_rows_of_several_seeds_become_means_with_their_spread():
    runs = [{"rows": [{"name": "x", "psnr": value, "seen": f"{value:g} of 8", "none": None}]} for value in (1.0, 4.0)]
    assert rows_over_seeds(runs) == [{"name": "x", "psnr": "2.5 (1 to 4)", "seen": "1 of 8; 4 of 8", "none": None}]
    assert rows_over_seeds(runs[:1]) == runs[0]["rows"]


def test_rows_that_do_not_correspond_are_not_merged():
    runs = [{"rows": [{"a": 1.0}]}, {"rows": [{"a": 1.0}, {"a": 2.0}]}]
    assert rows_over_seeds(runs) == [{"a": 1.0, "seeds": "first only"}]
