"""Metrics that are chosen, also one of the user's own file: in rows, files, summary, page, console and JSON."""

import csv
import json

import pytest

from gradveil.audits import audit, make_audit_settings
from gradveil.errors import ConfigError, UnknownNameError
from tests.audits.conftest import QUICK

OWN = '''
from dataclasses import dataclass
from typing import ClassVar
from gradveil.metrics import Metric

@dataclass(frozen=True)
class MaxError(Metric):
    """Largest error of any pixel.

    More about it.
    """

    scale: float = 1.0
    higher_is_leakier: ClassVar[bool] = False

    def measure(self, truth, guess):
        return self.scale * (truth - guess).abs().flatten(1).amax(1)

class Broken(MaxError):
    """Fail always."""

    def measure(self, truth, guess):
        raise RuntimeError("no such thing")

class Seed(MaxError):
    """Take the name of a field of rows."""

class Psnr(MaxError):
    """Take the name of another metric."""
'''


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path / "mine.py"


def lines_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_metric_of_ones_own_reaches_rows_files_summary_and_page(small, tmp_path, own):
    settings = small(metrics=f"psnr,ssim,{own}:MaxError", rounds=60, tap="60", dataset="mnist-5k")
    result = audit(settings, tmp_path / "run", workers=0)
    values = [row["max_error"] for row in result.rows if row["kind"] == "privacy"]
    assert all(0 < value <= 1 for value in values)
    for row in result.rows[1:]:
        assert (row["mse"], row["lpips"]) == (None, None)
        assert row["psnr"] > 0
        assert (row["unmeasured"], row["why"]) == ([], "")  # nothing to say about metrics that nobody asked for
    (line,) = result.summary
    assert line["max_error"] == pytest.approx(sum(values) / 2)
    assert [float(row["max_error"]) for row in lines_of(result.out / "rows.csv") if row["kind"] == "privacy"] == values
    blind, attacked = lines_of(result.out / "summary.csv")
    assert float(attacked["max_error"]) == line["max_error"]
    assert float(blind["max_error"]) == line["blind_max_error"]
    for name in ("rows.csv", "summary.csv"):
        heads = set(lines_of(result.out / name)[0])
        assert heads >= {"psnr", "ssim", "max_error", "blind_psnr"}
        assert not heads & {"mse", "lpips", "blind_mse", "blind_lpips"}
    page = result.report.read_text()
    assert "not asked for" not in page
    assert "were not measured" not in page
    assert "LPIPS</button>" not in page
    assert '"key":"lpips"' not in page
    assert 'title="Largest error of any pixel"' in page
    assert 'name="metric" value="max_error"' in page
    assert '"key":"max_error"' in page
    assert "max error" in result._repr_html_()
    column = result.schema.column("privacy", "max_error")
    assert (column.leakier, column.head, column.help) == (False, "max error", "Largest error of any pixel")


def test_the_page_is_written_again_without_the_file_of_the_metric(gradveil, small, tmp_path, own):
    result = audit(small(metrics=f"psnr,{own}:MaxError", rounds=0), tmp_path / "run", workers=0)
    before = result.report.read_bytes()
    own.unlink()
    assert gradveil("report", result.out).code == 0
    assert result.report.read_bytes() == before


def test_on_the_command_line_with_a_file_of_settings_and_resumed(gradveil, pictures, tmp_path, own):
    (tmp_path / "audit.toml").write_text(
        f'attacks = ["{QUICK}"]\nrounds = 0\ntargets = 2\n[[metrics]]\nname = "{own}:MaxError"\nscale = 2\n'
    )
    command = ["audit", "--dataset", pictures, "--config", tmp_path / "audit.toml", "--workers", 0]
    ended = gradveil(*command, "--out", tmp_path / "run", "--json")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["summary"][0]["max_error"] > 0
    assert document["summary"][0]["psnr"] is None
    next((tmp_path / "run" / "cells").glob("*.json")).unlink()
    again = gradveil("audit", "--resume", "--out", tmp_path / "run", "--workers", 0, "--json", "--trust-code")
    assert again.code == 0, again.err
    assert json.loads(again.out)["summary"][0]["max_error"] == document["summary"][0]["max_error"]
    other = gradveil("audit", "--resume", "--out", tmp_path / "run", "--metrics", "psnr", "--trust-code")
    assert (other.code, "A resumed audit must keep its settings, got metrics" in other.last) == (2, True)
    table = gradveil(*command, "--metrics", f"psnr,{own}:MaxError", "--out", tmp_path / "other")
    assert table.code == 0, table.err
    assert "max" in table.out
    assert "PSNR" in table.out


def test_a_metric_that_fails_leaves_the_other_figures(small, tmp_path, own):
    result = audit(small(metrics=f"{own}:Broken,psnr", rounds=0), tmp_path / "run", workers=0)
    assert result.failed == {}
    for row in result.rows:
        assert (row["broken"], row["psnr"] > 0) == (None, True)
        assert "Metric 'broken' failed: RuntimeError: no such thing" in row["why"]
        assert any("no such thing" in why for why in row["unmeasured"])


def test_without_psnr_and_ssim_nothing_is_called_recognisable_or_not(small, tmp_path, own):
    result = audit(small(metrics=f"{own}:MaxError", rounds=1, defences="prune"), tmp_path / "run", workers=0)
    assert [line["recognisable"] for line in result.summary] == [None, None]
    assert "no PSNR or SSIM measured" in result.report.read_text()


def test_defaults_and_names():
    assert make_audit_settings({}).metrics == ("mse", "psnr", "ssim", "lpips")
    assert make_audit_settings({"metrics": "lpips,lpips-alex,rmse"}).metrics == ("lpips", "rmse")
    keys = make_audit_settings({"metrics": "rmse,lpips-vgg"}).schema.keys("privacy")
    assert keys[keys.index("mse") :][:6] == [
        "mse", "psnr", "ssim", "lpips", "rmse", "lpips_vgg",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "error", "text"),
    [
        ("", ConfigError, "metrics must name at least one"),
        ("psnrr", UnknownNameError, "Did you mean 'psnr'"),
        ("{own}:Seed", ConfigError, "must be new, got 'seed', which rows have. Rename the metric's class"),
        ("{own}:Psnr", ConfigError, "'psnr' must hold gradveil's own metric"),
        ("{own}:MaxError,{own}:MaxError:scale=2", ConfigError, "two for 'max_error'. Drop one of --metrics"),
    ],
)
def test_bad_metrics_are_refused_before_any_work(own, metrics, error, text):
    with pytest.raises(error, match=text):
        make_audit_settings({"metrics": metrics.replace("{own}", str(own))})
