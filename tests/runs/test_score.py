import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from gradveil.audits.plan import Cell
from gradveil.audits.settings import make_audit_settings
from gradveil.audits.views import observed, private_batches
from gradveil.cli import app
from gradveil.data import load_dataset
from gradveil.defences import Countermove, build_defence
from gradveil.errors import ConfigError
from gradveil.runs.score import View, _jacobian, score, summarise_scores


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Write random 8x8 images to a file."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 10
    images = rng.integers(0, 256, (40, 8, 8), dtype=np.uint8)
    path = tmp_path_factory.mktemp("score") / "small.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=255 - images, y_test=labels)
    return str(path)


def settings(small, **changes):
    return make_audit_settings({"dataset": small, "model": "mlp:hidden=6", "targets": 1, "rounds": 0, **changes})


def scored(small, **changes):
    """Return rows by spec of the defence."""
    return {row["defence"]: row for row in score(settings(small, **changes))}


def view_of(chosen, move=None, defence="none"):
    dataset = load_dataset(chosen.dataset)
    private = private_batches(chosen, dataset)[:1]
    cell = Cell("test", "privacy", defence, 0, adaptive=True, first=0, last=1)
    seen = observed(cell, chosen, dataset, private, build_defence(defence), None, None)
    return View.of(seen, move or Countermove(), private[0], 0), dataset


def test_derivatives_are_those_of_the_gradient_that_arrives(small):
    view, _ = view_of(settings(small))
    point = view.image.flatten()
    for name, tensor in view(point).items():
        torch.testing.assert_close(tensor, view.wanted[name], rtol=1e-4, atol=1e-6)
    heard = []

    def whole(numbers):
        return torch.cat([tensor.flatten() for tensor in view(numbers).values()])

    found = _jacobian(whole(point.requires_grad_()), point, heard.append)
    step = 1e-6
    for place in (0, 17, 63):
        there, here = (whole(point.detach() + side * step * torch.eye(64).double()[place]) for side in (1, -1))
        torch.testing.assert_close(found[:, place], (there - here) / (2 * step), rtol=1e-4, atol=1e-7)
    assert heard[0] == 0


def test_the_gradient_of_a_linear_layer_with_bias_gives_the_image_and_its_noise_is_all_that_hides_it(small):
    rows = scored(small, model="logistic", defences="gaussian:std=0.001,gaussian:std=1")
    plain, little, much = (row["psnr_cap"] for row in rows.values())
    assert plain > 90 > little > much > rows["none"]["psnr_unseen"]
    assert rows["none"]["seen"] == rows["none"]["directions"] == 64
    assert rows["gaussian:std=1"]["seen"] < 64


def test_masks_do_not_hide_what_other_tensors_reveal_but_noise_does(small):
    specs = "soteria:prune=0.5,gaussian:std=1,dp-sgd:clip=1,noise=100"
    rows = scored(small, model="lenet-dlg", defences=specs, knows="labels,num-examples")
    blind = rows["none"]["psnr_unseen"]
    assert rows["soteria:prune=0.5"]["psnr_cap"] > blind + 20
    assert rows["dp-sgd:clip=1,noise=100"]["psnr_cap"] == pytest.approx(blind, abs=0.1)
    assert rows["dp-sgd:clip=1,noise=100"]["seen"] == 0
    assert rows["none"]["psnr_cap"] > rows["gaussian:std=1"]["psnr_cap"] > blind


def test_pruned_entries_reveal_nothing(small):
    rows = scored(small, model="logistic", defences="prune:fraction=0.99")
    few = rows["prune:fraction=0.99"]
    assert few["seen"] <= math.ceil(0.01 * 640) + math.ceil(0.01 * 10)  # each tensor keeps its largest
    assert few["countermove"]


def test_secret_scales_cost_the_attacker_something_but_little(small):
    rows = scored(small, model="lenet-dlg", defences="fedkl:length=8")
    assert rows["none"]["psnr_unseen"] + 20 < rows["fedkl:length=8"]["psnr_cap"]
    assert rows["fedkl:length=8"]["seen"] == 64


def test_unexplained_differences_count_as_noise(small):
    chosen = settings(small, model="logistic")
    view, dataset = view_of(chosen, defence="quantise:bits=8,stochastic=true")
    prior = torch.full((64,), dataset.std[0] ** 2).double()
    rounded = view.leak(prior, lambda share: None)
    exact = view_of(chosen)[0].leak(prior, lambda share: None)
    assert rounded.mse > 100 * exact.mse


@pytest.mark.parametrize("defence", ["mixup:k=2", "dcs2:steps=2"])
def test_a_defence_without_a_score_says_why(small, defence):
    row = scored(small, defences=defence)[defence]
    assert row["psnr_cap"] is None
    assert "audit" in row["why"]


def test_a_defence_that_does_not_fit_is_refused(small):
    with pytest.raises(ConfigError, match="count=10000"):
        score(settings(small, defences="soteria:count=10000"))


def test_scores_are_deterministic_and_summarised(small):
    first, again = (score(settings(small, targets=2, defences="gaussian:std=0.01")) for _ in range(2))
    for row in first + again:
        row.pop("seconds")
    assert first == again
    none, noisy = summarise_scores(first)
    assert (none["n"], noisy["n"]) == (2, 2)
    assert none["psnr_cap"] == pytest.approx(sum(r["psnr_cap"] for r in first if r["defence"] == "none") / 2)


def test_only_gradients_of_single_images_are_scored(small):
    with pytest.raises(ConfigError, match="one image"):
        score(settings(small, images=2))


def test_too_many_derivatives_are_refused(small, monkeypatch):
    monkeypatch.setattr("gradveil.runs.score.MOST_NUMBERS", 1000)
    with pytest.raises(ConfigError, match="smaller model"):
        score(settings(small))


def test_the_command_prints_a_table_or_one_document(small):
    run = CliRunner().invoke
    base = ["score", "--dataset", small, "--model", "logistic", "--targets", "1", "--defences", "gaussian:std=0.1"]
    table = run(app, base)
    assert table.exit_code == 0
    assert "PSNR at best" in table.stdout
    document = json.loads(run(app, [*base, "--json"]).stdout)
    assert [row["defence"] for row in document["rows"]] == ["none", "gaussian:std=0.1"]
    assert document["summary"][0]["psnr_cap"] == document["rows"][0]["psnr_cap"]
