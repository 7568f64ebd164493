"""A server reads a private image from the losses of weights that it chooses; a site must not be its measuring device.

The attack: all weights of a logistic model are zero but one, so that the loss is log(K - 1 + exp(t x)) for a pixel x,
or that minus t x for the row of the image's own class. One score per pixel gives the whole image.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gradveil.engines.devices import Devices
from gradveil.errors import TripwireError
from gradveil.federated.flat import FlatModel
from gradveil.models import create_model
from tests.security.sites import CLASSES, RUN, SIDE, OneSite, code, private_set, start

PUSH = 4.0
DP = replace(RUN, defence="dp-sgd")


def weights(row, pixel=None):
    """Return weights that push one class by one pixel, or by a constant."""
    model = start()
    if pixel is None:
        model["linear.bias"][row] = PUSH
    else:
        model["linear.weight"][row, pixel] = PUSH
    return model


def rebuild(loss_of):
    """Return the image that a function of weights reveals by its losses; pixels without an answer are grey."""
    pushed = [loss_of(weights(row)) for row in range(CLASSES)]
    known = [math.inf if loss is None else loss for loss in pushed]
    row = (known.index(min(known)) + 1) % CLASSES  # any class but the image's own
    losses = [loss_of(weights(row, pixel)) for pixel in range(SIDE * SIDE)]
    pixels = [0.5 if loss is None else math.log(max(math.exp(loss) - CLASSES + 1, 1e-9)) / PUSH for loss in losses]
    return torch.tensor(pixels).clamp(0, 1), sum(loss is not None for loss in losses + pushed)


def psnr(guess, data, split="train"):
    truth = torch.tensor(getattr(data, split).images[0]).flatten() / 255
    return -10 * math.log10(float((guess - truth).square().mean()) + 1e-12)


def plain_scores(data):
    """Return the losses that a site would give without any rule, as gradveil 0.1 did."""
    images = torch.tensor(data.train.images) / 255
    labels = torch.tensor(data.train.labels)

    def loss_of(model):
        logits = images.flatten(1) @ model["linear.weight"].T + model["linear.bias"]
        return float(F.cross_entropy(logits, labels, reduction="sum"))

    return loss_of


def scores_of(site, images="own", after=0):
    """Return the losses that a site gives, or None for each that it does not."""

    def loss_of(model):
        answer = site.evaluate(model, images, after)
        facts = answer.config_records.get("facts")
        return facts["loss-sum"][0] if facts is not None and facts["count"][0] else None

    return loss_of


def test_the_attack_works_against_plain_scores():
    data = private_set(images=1)
    guess, answers = rebuild(plain_scores(data))
    assert answers == SIDE * SIDE + CLASSES
    assert psnr(guess, data) > 60


@pytest.mark.parametrize("images", ["own", "sensitive", "test"])
@pytest.mark.parametrize("own", [True, False])
def test_a_site_that_took_part_in_no_round_scores_nothing(tmp_path, images, own):
    site = OneSite(tmp_path, DP, private_set(images=1), sensitive="1.0", tripwire="refuse")
    if own:
        guess, answers = rebuild(scores_of(site, images))
        assert answers == 0
        assert psnr(guess, private_set(images=1)) < 15
    else:
        facts = site.evaluate(start(), images, own=False).config_records["facts"]
        assert (facts["count"], facts["loss-sum"], facts["class-count"]) == ([0], [0.0], [])


@pytest.fixture
def private_parts(monkeypatch):
    """Let sites take every model for one with private parts, which they score on test images."""
    monkeypatch.setattr(FlatModel, "has_private", property(lambda model: True))


def test_a_model_without_private_parts_is_not_scored_on_test_images(tmp_path):
    site = OneSite(tmp_path)
    assert code(site.train(1)) == ""
    for own in (True, False):
        assert site.evaluate(start(), "test", 1, own).config_records["facts"]["given"] == ["shared-model"]


@pytest.mark.usefixtures("private_parts")
def test_weights_of_a_refused_round_are_not_scored(tmp_path, monkeypatch):
    site = OneSite(tmp_path)
    assert code(site.train(1)) == ""
    assert site.evaluate(weights(1), "test", 1).config_records["facts"]["given"] == ["exact"]

    def refuse(*values, **more):
        raise TripwireError("a trap")

    monkeypatch.setattr(Devices, "train", refuse)
    assert code(site.train(2, weights(0))) == "tripwire"
    for after in (0, 1, 2):
        assert site.evaluate(weights(0), "test", after).config_records["facts"]["given"] == ["weights"]


@pytest.mark.usefixtures("private_parts")
def test_an_infinite_loss_is_neither_sent_nor_stored_and_uses_up_the_result(tmp_path):
    site = OneSite(tmp_path)
    assert code(site.train(1)) == ""
    huge = {name: torch.full_like(tensor, 3e38) for name, tensor in start().items()}
    facts = site.evaluate(huge, "test", 1).config_records["facts"]
    assert (facts["given"], facts["loss-sum"], facts["count"]) == (["diverged"], [0.0], [0])
    assert not {"NaN", "Infinity"} & set((tmp_path / "ledger-0.json").read_text().replace(",", " ").split())
    assert site.evaluate(weights(0), "test", 1).config_records["facts"]["given"] == ["weights"]


@pytest.mark.usefixtures("private_parts")
def test_a_site_that_took_part_in_a_round_scores_its_two_models_on_test_images_only(tmp_path):
    data = private_set(images=1)
    site = OneSite(tmp_path, data=data)
    assert code(site.train(1)) == ""
    assert rebuild(scores_of(site, "own", after=1))[1] == 0
    guess, answers = rebuild(scores_of(site, "test", after=1))
    assert answers == 1  # the result of the round, whatever the server says that it is
    assert psnr(guess, data, "test") < 15
    assert scores_of(site, "test", after=1)(start()) is not None  # what it received in the round


def test_a_repeated_question_gets_the_same_answer_after_a_restart(tmp_path):
    first = OneSite(tmp_path, training_scores=0.5)
    first.train(1)
    answers = [OneSite(tmp_path, training_scores=0.5).evaluate(start(), "own", 1).config_records["facts"]
               for _ in range(20)]  # fmt: skip
    assert {answer["correct"][0] for answer in answers} == {answers[0]["correct"][0]}
    ledger = json.loads((tmp_path / "ledger-0.json").read_text())
    assert ledger["epsilon"] == 0.5
    assert (tmp_path / "ledger-0.json").stat().st_mode & 0o777 == 0o600


def test_scores_of_training_images_are_noisy_counts_within_the_budget(tmp_path):
    data = private_set(images=1)
    site = OneSite(tmp_path, data=data, training_scores=0.5, training_budget=1.0)
    given = []
    for number in range(1, 6):
        site.train(number, weights(0, number))
        facts = site.evaluate(weights(0, number), "own", number).config_records["facts"]
        given.append((facts["given"][0], facts["loss-sum"][0], facts["classes"][0]))
    assert given == [("noised", 0.0, 0)] * 2 + [("budget", 0.0, 0)] * 3
    assert json.loads((tmp_path / "ledger-0.json").read_text())["epsilon"] == 1.0


def test_scores_of_training_images_are_under_the_tripwire(tmp_path):
    run = replace(RUN, model="mlp:hidden=16")
    site = OneSite(tmp_path, run, private_set(images=40), training_scores=0.5, tripwire="refuse")
    network = create_model(run.model, (1, SIDE, SIDE), CLASSES, 0, None)
    model = {name: parameter.detach() for name, parameter in network.named_parameters()}
    assert code(site.train(1, model)) == ""
    weight, bias = list(model)[:2]
    trap = model | {weight: torch.full((16, 64), 1 / 64), bias: -torch.linspace(0.2, 0.8, 16)}
    assert code(site.evaluate(trap, "own", 1)) == "tripwire"
    assert "own" not in (tmp_path / "ledger-0.json").read_text().split("scores")[1]
