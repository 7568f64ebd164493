"""Canaries in audits and trainings: their columns, the alarm, and what is refused before work."""

import json

import pytest

from gradveil.audits import audit
from gradveil.metrics.epsilon_hat import EXCEEDS, MEASURED
from tests.audits.conftest import QUICK

WRONG = '''
from dataclasses import dataclass, replace
from gradveil.defences.dp_sgd import DpSgd

@dataclass(frozen=True)
class Wrong(DpSgd):
    """State the budget of ten times the noise that it adds."""

    noise: float = 0.1

    def budget(self, releases):
        return DpSgd(noise=10 * self.noise, sampling=self.sampling).budget(releases)
'''


@pytest.fixture
def wrong(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    return f"{path}:Wrong"


def prices(rows):
    return {row["defence"]: row for row in rows if row["kind"] == "utility"}


def test_an_audit_has_what_canaries_measure_beside_what_is_stated(small, tmp_path):
    few = {"defences": "dp-sgd", "protocol": "fedavg", "attacks": "labels", "batch_size": 0, "momentum": 0.0}
    plain = prices(audit(small(**few), tmp_path / "plain", workers=0).rows)
    result = audit(small(**few, canaries=8), tmp_path / "canaries", workers=0)
    beside = prices(result.rows)
    for defence, row in beside.items():
        assert row["canaries"] == 8
        assert row["epsilon_hat_low"] <= row["epsilon_hat"] <= row["epsilon_hat_high"]
        assert (row["accuracy"], row["loss"]) == (plain[defence]["accuracy"], plain[defence]["loss"])
        assert all(plain[defence][key] is None for key in MEASURED)
    assert beside["dp-sgd"]["epsilon_hat_low"] < beside["dp-sgd"]["epsilon"] < beside["none"]["epsilon_hat"]
    assert beside["dp-sgd"]["canaries_exceed"] is False
    assert beside["none"]["canaries_exceed"] is None
    assert not any(EXCEEDS in line["flags"] for line in result.summary)
    assert {line["defence"]: line["epsilon_hat"] for line in result.utility} == {
        name: row["epsilon_hat"] for name, row in beside.items()
    }
    assert "ε by canaries [99 %]</button>" in result.report.read_text()
    assert "ε by canaries [99 %]</button>" not in (tmp_path / "plain" / "report.html").read_text()


def test_a_broken_promise_is_flagged_everywhere(gradveil, pictures, tmp_path, wrong):
    few = ["--dataset", pictures, "--clients", 3, "--rounds", 2, "--targets", 1, "--attacks", QUICK, "--batch-size", 0]
    few += ["--protocol", "fedavg", "--defences", wrong, "--canaries", 8, "--workers", 0, "--out", tmp_path / "run"]
    ended = gradveil("audit", *few)
    assert ended.code == 0, ended.err
    assert f"{EXCEEDS}: at least" in next(line for line in ended.err.splitlines() if "Warning: wrong.py:Wrong" in line)
    assert f"! {EXCEEDS}: wrong.py:Wrong, gs plain" in ended.out
    assert "ε by canaries [99 %]: none 1e+09 [1e+09, 1e+09], nothing stated; wrong.py:Wrong" in ended.out
    assert EXCEEDS in (tmp_path / "run" / "report.html").read_text()
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert prices(rows)[wrong]["canaries_exceed"] is True
    assert prices(rows)[wrong]["why"].startswith(EXCEEDS)


def test_a_training_tells_what_canaries_measure(gradveil, pictures, tmp_path, wrong):
    few = ["--dataset", pictures, "--model", "lenet-dlg", "--clients", 3, "--rounds", 2, "--batch-size", 0]
    few += ["--defence", wrong, "--canaries", 8, "--workers", 0, "--out", tmp_path / "run"]
    ended = gradveil("train", *few)
    assert ended.code == 0, ended.err
    assert EXCEEDS in ended.err
    assert "epsilon hat" in ended.out
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert "canaries" not in rows[0]
    assert rows[1]["epsilon_hat_low"] > rows[1]["epsilon"]
    assert EXCEEDS in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--defences", "soteria"], "can't be measured under defence 'soteria'"),
        (["--defences", "dp-sgd", "--canaries", 30], "canaries must be at most 20 here, got 30"),
        (["--canaries", -4], "canaries must be in [0, 10000], got -4"),
        (["--canaries", 8, "--rounds", 0], "canaries are played beside the rounds of a training, got 8"),
    ],
)
def test_an_audit_names_what_cannot_be_measured_before_work(gradveil, pictures, tmp_path, options, message):
    ended = gradveil("audit", "--dataset", pictures, "--clients", 3, "--rounds", 2, "--targets", 1, "--attacks", QUICK,
                     "--canaries", 8, *options, "--out", tmp_path / "run")  # fmt: skip
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "run").exists()
