import json

import pytest
import torch
from matplotlib.figure import Figure

from gradveil.audits.run import AuditResult
from gradveil.errors import RunFolderError, TrainingError, UnknownNameError
from gradveil.reproduce import papers, reproduce
from gradveil.reproduce.base import Experiment, Lab, Paper, Result, picture_lines, rounded, run_experiment, to_markdown


def paper_of(runs):
    def count(lab):
        runs.append(lab.scale)
        figure = Figure()
        figure.subplots().plot([1, 2])
        return Result([{"what": "mse", "ours": 0.123456, "paper": None}], ["smaller"], {"curve": figure})

    return Paper("test", "none", {"1": Experiment("a table", count)})


def test_an_experiment_writes_its_table_figures_and_document_and_is_not_run_twice(tmp_path):
    runs = []
    paper, lab = paper_of(runs), Lab(tmp_path / "1", "smoke")
    first = run_experiment(paper, "1", lab)
    left = {path.name for path in lab.out.iterdir()} - {".lock"}
    assert left == {"results.md", "results.json", "curve.png", "curve.svg"}
    assert json.loads((lab.out / "results.json").read_bytes()) == first
    assert run_experiment(paper, "1", lab) == first
    assert runs == ["smoke"]
    with pytest.raises(RunFolderError, match=r"scale = 'small' \(was 'smoke'\)"):
        run_experiment(paper, "1", Lab(lab.out, "small"))


@pytest.mark.parametrize("other", [{"data": {"x": "1"}}, {"sources": {"x": "1"}}])
def test_an_experiment_whose_sources_or_data_changed_is_run_again(tmp_path, other):
    runs = []
    run_experiment(paper_of(runs), "1", Lab(tmp_path / "1", "smoke"))
    document = run_experiment(paper_of(runs), "1", Lab(tmp_path / "1", "smoke", **other))
    assert len(runs) == 2
    assert all(document[name] == value for name, value in other.items())


def test_an_interrupted_experiment_resumes_with_the_missing_parts(tmp_path):
    done = []

    def work(name):
        done.append(name)
        if name == "b" and done.count("b") == 1:
            raise KeyboardInterrupt
        return {"name": name, "pair": (1, None)}

    def run(lab):
        rows = [lab.once(name, lambda name=name: work(name)) for name in ("a", "b")]
        guess = lab.tensors_once("guess", lambda: done.append("guess") or {"x": torch.arange(3.0)})["x"]
        return Result([*rows, {"name": str(guess.tolist())}])

    paper, lab = Paper("test", "none", {"1": Experiment("parts", run)}), Lab(tmp_path, "smoke")
    with pytest.raises(KeyboardInterrupt):
        run_experiment(paper, "1", lab)
    rows = run_experiment(paper, "1", lab)["rows"]
    assert done == ["a", "b", "b", "guess"]
    assert rows == [{"name": "a", "pair": [1, None]}, {"name": "b", "pair": [1, None]}, {"name": "[0.0, 1.0, 2.0]"}]
    (tmp_path / "results.json").unlink()
    assert run_experiment(paper, "1", lab)["rows"] == rows
    assert len(done) == 4


def test_experiments_of_one_paper_share_parts_but_papers_do_not(tmp_path, monkeypatch):
    done = []

    def run(lab):
        return Result([{"part": lab.once("part", lambda: done.append(lab.out.name))}])

    tables = {name: Experiment("table", run) for name in ("1", "2")}
    two = {name: Paper(name, "none", tables if name == "a" else {"3": tables["1"]}) for name in ("a", "b")}
    monkeypatch.setattr("gradveil.reproduce.papers", lambda: two)
    for paper in two:
        reproduce(paper, out=tmp_path, scale="smoke")
    assert done == ["1", "3"]


def test_progress_of_a_part_is_scaled_to_the_whole(tmp_path):
    heard = []
    lab = Lab(tmp_path, "smoke", progress=lambda share, doing: heard.append((share, doing)))
    lab.telling("attack", 1, 4)(0.5)
    lab.telling("training")(0.5)
    assert heard == [(0.375, "attack"), (0.5, "training")]


@pytest.mark.parametrize("other", [{"scale": "small"}, {"seed": 1}, {"data": {"x": "1"}}, {"sources": {"x": "1"}}])
def test_parts_of_another_scale_seed_data_or_sources_are_not_reused(tmp_path, other):
    assert Lab(tmp_path, "smoke").once("part", lambda: 1) == 1
    assert Lab(tmp_path, "smoke").once("part", lambda: 2) == 1
    assert Lab(tmp_path, **{"scale": "smoke", **other}).once("part", lambda: 3) == 3


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]"])
def test_a_corrupt_part_is_computed_again(tmp_path, content):
    lab = Lab(tmp_path, "smoke")
    lab.once("part", lambda: 1)
    lab.tensors_once("part", lambda: {"x": torch.zeros(1)})
    for path in (tmp_path / "parts").iterdir():
        path.write_bytes(content)
    assert lab.once("part", lambda: 2) == 2
    assert lab.tensors_once("part", lambda: {"x": torch.ones(1)})["x"] == 1


def test_an_unwritable_folder_is_refused_before_any_work(tmp_path):
    runs = []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunFolderError, match="must be a folder"):
        run_experiment(paper_of(runs), "1", Lab(tmp_path / "file", "smoke"))
    assert not runs


def test_an_audit_with_failed_cells_gives_no_result(tmp_path, monkeypatch):
    failed = AuditResult(tmp_path, [], {"privacy-00001": "gs on soteria: out of memory"}, 1.0, "", tmp_path)
    monkeypatch.setattr("gradveil.reproduce.soteria.audit", lambda *args, **options: failed)
    with pytest.raises(TrainingError, match=r"1 of its cells failed.* out of memory"):
        reproduce("soteria", "fig3", out=tmp_path, scale="smoke")
    assert not (tmp_path / "fig3" / "results.json").exists()


def test_the_table_in_markdown():
    document = {"paper": "p", "table": "1", "title": "t", "scale": "smoke", "seed": 0, "notes": ["n"]}
    text = to_markdown(document | {"rows": [{"a": 0.123456, "b_c": None}, {"a": 3, "d": "x"}]})
    assert text.splitlines()[4:8] == ["| a | b c | d |", "|---|---|---|", "| 0.1235 |  |  |", "| 3 |  | x |"]
    assert text.endswith("- n\n")


def test_unknown_papers_tables_and_scales_are_named(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean 'soteria'"):
        reproduce("sotera", out=tmp_path)
    with pytest.raises(UnknownNameError, match=r"table of soteria.*fig3"):
        reproduce("soteria", "fig33", out=tmp_path)
    with pytest.raises(UnknownNameError, match="scale"):
        reproduce("soteria", scale="large", out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_paper_is_found_by_its_file():
    assert "soteria" in papers()
    for name, paper in papers().items():
        assert paper.name == name
        assert paper.experiments


def test_figures_are_rounded_and_none_if_not_finite():
    assert (rounded(0.123456), rounded(123456.0, 2)) == (0.1235, 1.2e5)
    assert (rounded(float("inf")), rounded(None)) == (None, None)


def test_images_are_drawn_in_rows_and_nan_is_grey():
    some = torch.rand(3, 1, 4, 4)
    figure = picture_lines({"truth": some, "lost": torch.full_like(some, torch.nan)}, most=2)
    assert len(figure.axes) == 4
    assert [figure.axes[place].get_ylabel() for place in (0, 2)] == ["truth", "lost"]
    drawn = [axes.images[0].get_array() for axes in figure.axes]
    assert (drawn[1] == some[1, 0].numpy()).all()
    assert (drawn[3] == 0.5).all()
