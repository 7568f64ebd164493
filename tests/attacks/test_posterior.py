"""Posterior: the best guess under known noise."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gradveil.attacks import build_attack
from gradveil.attacks.parts.analytic import first_linear
from gradveil.attacks.pilot import Effort, explainable, ways
from gradveil.attacks.posterior import Posterior
from gradveil.defences.veil import Veil
from gradveil.errors import ConfigError
from gradveil.models import create_model
from gradveil.threat import PublicKnowledge, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch

ROUNDS = 3


def smooth(count, seed):
    rng = torch.Generator().manual_seed(seed)
    images = F.interpolate(torch.rand(count, 1, 3, 3, generator=rng), size=(12, 12), mode="bilinear")
    return Batch(images, torch.arange(count) % 4, torch.zeros(count) > 0)


def look(mu, rounds=ROUNDS, grants=("labels", "defence"), size=1):
    truth = smooth(8 * size, 1)
    network = create_model("patches:filters=20", (1, 12, 12), 4, 0)
    found = [
        observe(
            network,
            [truth[slice(start, start + size)] for start in range(0, 8 * size, size)],
            threat=ThreatModel.of("num-examples", "public-data", *grants),
            num_classes=4,
            defence=Veil(mu=mu, rounds=ROUNDS),
            public=PublicKnowledge(smooth(400, 2)),
            federation=Federation(seed=number),
        )
        for number in range(rounds)
    ]
    return truth, replace(found[0], later=tuple(found[1:]))


def error(truth, result):
    return float((truth.images - result.images[:, 0]).square().mean())


def blind(truth):
    return float((truth.images - smooth(400, 2).images.mean(0)).square().mean())


def test_without_noise_it_finds_much_of_the_image_and_under_strong_noise_nothing():
    truth, seen = look(1e6)
    quiet = Posterior()(seen, torch.Generator().manual_seed(0))
    assert error(truth, quiet) < 0.4 * blind(truth)
    truth, seen = look(0.01)
    noisy = Posterior()(seen, torch.Generator().manual_seed(0))
    assert error(truth, noisy) == pytest.approx(blind(truth), rel=0.1)
    assert not noisy.converged.any()


def test_all_rounds_together_say_more_than_one():
    truth, seen = look(100)
    all_of_them, first = (
        error(truth, Posterior()(each, torch.Generator().manual_seed(0))) for each in (seen, replace(seen, later=()))
    )
    assert all_of_them < first


def test_without_labels_it_takes_those_that_the_update_shows():
    truth, seen = look(1e6, grants=("defence",))
    found = Posterior()(seen, torch.Generator().manual_seed(0))
    assert found.labels[:, 0].tolist() == truth.labels.tolist()
    assert "held out" in found.why[0]


def test_who_does_not_know_the_noise_is_misled_by_it():
    truth, seen = look(3.0)
    knowing, plain = (
        error(truth, Posterior()(each, torch.Generator().manual_seed(0)))
        for each in (seen, look(3.0, grants=("labels",))[1])
    )
    assert knowing < plain
    assert knowing < 1.15 * blind(truth)


def test_a_batch_gets_no_guess():
    _, seen = look(3.0, rounds=1, size=2)
    found = Posterior()(seen, torch.Generator())
    assert found.images.isnan().all()
    assert "a single image" in found.why[0]
    few = Posterior()(look(3.0, rounds=1)[1].with_public(smooth(19, 2)), torch.Generator())
    assert few.images.isnan().all()
    assert "at least 20 public images" in few.why[0]
    assert Posterior().too_large(2, 1)
    assert "local step" in Posterior().too_large(1, 5)


def test_standard_tries_it_for_single_images_under_known_noise_only():
    _, seen = look(3.0, rounds=1)
    assert explainable(seen) == 400
    assert "posterior:samples=400" in [way.spec for way in ways(seen, Effort(4, 40, 1), "tv=1e-4")]
    assert explainable(look(3.0, rounds=1, grants=("labels",))[1]) == 0
    assert explainable(look(3.0, rounds=1, size=2)[1]) == 0


def test_the_closed_form_names_it_where_features_are_frozen():
    network = create_model("patches:filters=3", (1, 12, 12), 4, 0)
    with pytest.raises(ConfigError, match="a head on frozen features"):
        first_linear(network, (1, 12, 12))


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="samples must be"):
        build_attack("posterior:samples=3")
