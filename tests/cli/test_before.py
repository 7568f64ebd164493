import io
import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from gradveil.audits.estimate import LONG, Estimate
from gradveil.cli import app
from gradveil.cli.before import goes_on

ASKED = "asked"


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that says who sits at the terminal, and a list of the questions asked."""
    asked = []

    def sit(there, answer=True):
        for name in ("stdin", "stderr"):
            stream = io.StringIO()
            stream.isatty = lambda: there
            monkeypatch.setattr(sys, name, stream)
        monkeypatch.setattr(typer, "confirm", lambda text, **_: asked.append(text) or answer)
        return asked

    return sit


def begins(seconds, **options):
    settings = {"yes": False, "only": False, "as_json": False} | options
    return goes_on(Estimate((), seconds, 2, ()), **settings)


@pytest.mark.parametrize("answer", [True, False])
def test_someone_at_a_terminal_is_asked_before_a_long_audit(terminal, answer):
    asked = terminal(True, answer)
    assert begins(2 * LONG) is answer
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("there", "seconds", "options"), [(False, 2 * LONG, {}), (True, 2 * LONG, {"yes": True}), (True, LONG / 2, {})]
)
def test_without_a_terminal_with_yes_or_for_a_short_audit_nobody_is_asked(terminal, there, seconds, options):
    asked = terminal(there, answer=False)
    assert begins(seconds, **options)
    assert asked == []


QUICK = "--rounds 1 --clients 2 --targets 1 --attacks gs:iterations=2,labels --model logistic --workers 0"


@pytest.fixture
def command(tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (440, 1, 8, 8), dtype=np.uint8), np.arange(440) % 2
    np.savez(tmp_path / "few.npz", x_train=images[:400], y_train=labels[:400], x_test=images[400:], y_test=labels[400:])
    return ["audit", "--dataset", str(tmp_path / "few.npz"), *QUICK.split(), "--out", str(tmp_path / "run")]


def test_estimate_alone_runs_nothing(command, tmp_path):
    result = CliRunner().invoke(app, [*command, "--estimate", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert {piece["what"] for piece in document["pieces"]} == {
        "training under none", "gs:iterations=2 on none", "labels on none",
    }  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_the_estimate_stands_on_stderr_before_the_work_and_not_in_the_json(command):
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["recovered"].keys() == {"Labels", "Membership", "Pictures"}
    assert "Estimate: about" in result.stderr


def test_a_resumed_audit_estimates_what_is_left(command):
    assert CliRunner().invoke(app, command).exit_code == 0
    result = CliRunner().invoke(app, [*command, "--resume", "--estimate", "--json"])
    assert json.loads(result.stdout)["pieces"] == []


def test_an_attack_that_cannot_search_such_updates_is_named_before_the_work(command):
    large = [*command, "--protocol", "lab", "--images", "200", "--estimate"]
    result = CliRunner().invoke(app, large)
    assert result.exit_code == 0, result.output
    assert "Not run: gs:iterations=2: can search at most 128 images per update, got 200." in result.stderr
    assert "gs" not in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--epochs 2 --momentum 0.5 --batch-size 4",
            "No effect with --protocol lab: --epochs, --batch-size, --momentum.",
        ),
        ("--protocol fedavg --images 2 --partition iid:images=4", "No effect with --protocol fedavg: --images."),
        ("--images 2 --momentum 0.9", ""),
        ("--protocol fedavg --epochs 2 --rounds 0 --attacks labels --images 2", ""),
    ],
)
def test_options_without_effect_are_named(command, options, said):
    result = CliRunner().invoke(app, [*command, *options.split(), "--estimate"])
    assert result.exit_code == 0, result.output
    assert (said in result.stderr) if said else ("No effect" not in result.stderr)
