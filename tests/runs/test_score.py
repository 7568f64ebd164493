import dataclasses
import inspect
import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import gradveil
from gradveil.audits.plan import Cell
from gradveil.audits.settings import AuditSettings, make_audit_settings
from gradveil.audits.views import observed, private_batches
from gradveil.cli import app
from gradveil.cli.score import score_command
from gradveil.data import load_dataset
from gradveil.defences import Countermove, build_defence
from gradveil.errors import ConfigError
from gradveil.runs.score import SCORED, score, score_settings, summarise_scores
from gradveil.runs.score_view import View


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
    return make_audit_settings(
        {"dataset": small, "model": "mlp:hidden=6", "targets": 1, "rounds": 0, "lr": 1, **changes}
    )


def scored(small, **changes):
    """Return rows by spec of the defence."""
    return {row["defence"]: row for row in score(settings(small, **changes))}


def view_of(chosen, move=None, defence="none"):
    dataset = load_dataset(chosen.dataset)
    private = private_batches(chosen, dataset)[:1]
    cell = Cell("test", "privacy", defence, 0, adaptive=True, first=0, last=1)
    seen = observed(cell, chosen, dataset, private, build_defence(defence), None, None)
    return View.of(seen, move or Countermove(), private[0], 0), dataset


@pytest.mark.parametrize("images", [1, 3])
def test_derivatives_are_those_of_the_gradient_that_arrives(small, images):
    view, _ = view_of(settings(small, images=images))
    point = view.point
    for name, tensor in view(point[None]).items():
        torch.testing.assert_close(tensor, view.wanted[name], rtol=1e-4, atol=1e-6)
    heard = []

    def whole(numbers):
        return torch.cat([tensor.flatten() for tensor in view(numbers[None]).values()])

    found, step = view.jacobian(heard.append), 1e-6
    assert found.shape == (len(whole(point)), 64 * images)
    for place in (0, 17, 64 * images - 1):
        move = step * torch.eye(64 * images).double()[place]
        slope = (whole(point + move) - whole(point - move)) / (2 * step)
        torch.testing.assert_close(found[:, place], slope, rtol=1e-4, atol=1e-7)
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
    priors = {"white": prior}
    rounded = view.leaks(priors, lambda share: None)["white"]
    exact = view_of(chosen)[0].leaks(priors, lambda share: None)["white"]
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


def test_only_single_gradients_are_scored(small):
    with pytest.raises(ConfigError, match="single gradients"):
        score(settings(small, protocol="fedavg", knows="labels,num-examples,local-steps", attacks="gs"))


def test_a_batch_of_a_linear_layer_has_the_derivatives_of_its_images_side_by_side(small):
    """The gradient of a batch is the mean of its images' gradients."""
    several, _ = view_of(settings(small, model="logistic", images=2))
    whole = several.jacobian(lambda share: None)
    for place in range(2):
        replay = dataclasses.replace(several.replay, batch_size=1)
        labels, images = several.labels[place : place + 1], several.images[place : place + 1]
        one = dataclasses.replace(several, replay=replay, labels=labels, images=images).jacobian(lambda share: None)
        torch.testing.assert_close(whole[:, 64 * place : 64 * (place + 1)], one / 2)


def test_more_images_in_an_update_hide_each_other_only_as_far_as_there_are_too_few_numbers(small):
    noisy = "gaussian:std=0.001"
    one, four = (scored(small, model="mlp:hidden=32", defences=noisy, images=images) for images in (1, 4))
    assert (one["none"]["images"], four["none"]["images"], four["none"]["directions"]) == (1, 4, 256)
    assert one[noisy]["psnr_cap"] > four[noisy]["psnr_cap"] + 3 > four[noisy]["psnr_unseen"] + 3
    assert four["none"]["psnr_cap"] > 60
    narrow = scored(small, model="mlp:hidden=2", images=4)["none"]  # 160 numbers of 256 pixels
    assert narrow["seen"] <= 160


def test_a_secure_mean_is_scored_as_one_batch_and_its_noise_averages_out(small):
    """Four clients with noise 0.02 each leave noise 0.01 in their mean."""
    loud, quiet = "gaussian:std=0.02", "gaussian:std=0.01"
    mean = scored(small, defences=loud, aggregation="secure", clients=4, rounds=1)
    batch = scored(small, defences=quiet, images=4)
    assert {row["clients"] for row in mean.values()} == {4}
    assert {row["images"] for row in mean.values()} == {4}
    assert len(mean) == 2
    assert mean[loud]["psnr_cap"] == pytest.approx(batch[quiet]["psnr_cap"], abs=1.0)
    assert mean["none"]["psnr_cap"] == pytest.approx(batch["none"]["psnr_cap"], abs=6)  # rounding is all that hides


def test_means_that_a_score_does_not_model_say_why(small):
    secret = scored(small, model="lenet-dlg", defences="fedkl:length=8", aggregation="secure", clients=2, rounds=1)
    assert "different secrets" in secret["fedkl:length=8"]["why"]
    layers = {"model": "resnet20", "aggregation": "secure", "clients": 2, "rounds": 1}
    assert "--batch-norm freeze" in scored(small, **layers)["none"]["why"]


def test_the_rate_and_batch_norm_are_those_of_an_audit(small):
    """At a tenth of the rate the same noise on the update is ten times as large in the gradient."""
    fast = scored(small, model="logistic", defences="gaussian:std=0.1", lr=1)
    slow = scored(small, model="logistic", defences="gaussian:std=0.01", lr=0.1)
    assert fast["gaussian:std=0.1"]["psnr_cap"] == pytest.approx(slow["gaussian:std=0.01"]["psnr_cap"], abs=0.2)
    assert score_settings({}).lr == AuditSettings().lr
    assert score_settings({}).batch_norm == AuditSettings().batch_norm


@pytest.mark.parametrize(("batch_norm", "seen"), [("freeze", 128), ("average", 128), ("local", 127)])
def test_batch_norm_is_played_as_the_clients_use_it(small, tmp_path, batch_norm, seen):
    """A batch's own statistics hide how bright it is as a whole, unless they are sent."""
    (tmp_path / "net.py").write_text(NORMED)
    row = scored(small, model=f"{tmp_path / 'net.py'}:normed", images=2, batch_norm=batch_norm)["none"]
    assert row["seen"] == seen
    assert (row["psnr_cap"] > 60) == (seen == 128)


NORMED = """
from torch import nn

def normed(shape, num_classes):
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Flatten(), nn.Linear(288, num_classes))
"""


def test_own_data_vary_as_their_public_images_do(tmp_path):
    """Pictures of grey stripes: pixels deviate by 0.1, not by 0.5, and one pixel tells its whole row."""
    rows = np.random.default_rng(0).normal(0.4, 0.1, (120, 8, 1)) + np.zeros((120, 8, 8))
    images = (255 * rows).clip(0, 255).round().astype(np.uint8)
    labels = np.arange(120) % 2
    own = tmp_path / "own.npz"
    np.savez(own, x_train=images[:60], y_train=labels[:60], x_test=images[60:], y_test=labels[60:])
    row = scored(str(own), model="logistic", defences="gaussian:std=0.1")["gaussian:std=0.1"]
    assert row["psnr_unseen_white"] == pytest.approx(-10 * math.log10((images[60:] / 255).var()), abs=0.01)
    assert row["psnr_unseen_white"] == pytest.approx(20, abs=1)
    assert row["psnr_cap"] == row["psnr_cap_covariance"] > row["psnr_cap_white"] + 3
    assert row["psnr_cap_white"] > row["psnr_unseen_white"]
    assert row["psnr_cap_covariance"] > row["psnr_unseen_covariance"]


def test_without_own_public_images_those_of_aux_count(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "same.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    dim = (0.5 * rng.random((40, 8, 8))).astype(np.float32)
    np.savez(tmp_path / "dim.npz", x_train=dim, y_train=labels, x_test=dim, y_test=labels)
    with pytest.raises(ConfigError, match="Add other test images, or --aux"):
        scored(str(tmp_path / "same.npz"), model="logistic")
    row = scored(str(tmp_path / "same.npz"), model="logistic", aux=str(tmp_path / "dim.npz"))["none"]
    assert row["psnr_unseen_white"] == pytest.approx(-10 * math.log10(0.25 / 12), abs=0.2)


def test_the_command_and_python_take_the_same_settings():
    command = inspect.signature(score_command).parameters
    python = inspect.signature(gradveil.score).parameters
    assert set(command) - {"data_root", "as_json"} == set(SCORED) == set(python) - {"settings", "data_root", "progress"}
    for name in SCORED:
        told = python[name].default
        assert command[name].default == (",".join(told) if isinstance(told, tuple) else told), name


def test_too_many_derivatives_are_refused(small, monkeypatch):
    monkeypatch.setattr("gradveil.runs.score_view.MOST_NUMBERS", 1000)
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
    summed = run(app, [*base, "--aggregation", "secure", "--clients", "3", "--images", "2"])
    assert "6 images in the mean of 3 clients" in summed.stdout
