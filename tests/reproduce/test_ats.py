"""The experiments on ATS at scale smoke, on real data."""

import math

import pytest

from gradveil.reproduce import papers
from gradveil.reproduce.base import Lab, run_experiment

PAPER = papers()["ats"]


def test_both_experiments_are_there():
    assert list(PAPER.experiments) == ["search", "early"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["search", "early"])
def test_an_experiment_runs(tmp_path, real_data, name):
    heard = []
    lab = Lab(tmp_path / name, "smoke", data_root=real_data, progress=lambda share, doing: heard.append(share))
    rows = run_experiment(PAPER, name, lab)["rows"]
    assert heard[-1] == 1
    figures = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert all(math.isfinite(value) for value in figures)
    if name == "search":
        assert [row["policy"] for row in rows if row["published"]] == ["21-13-3", "7-4-15"]
        assert len(rows) == 5
    else:
        assert [row["steps"] for row in rows] == [0, 2]
