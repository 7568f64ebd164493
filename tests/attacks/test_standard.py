"""The standard suite: exact where a closed form fits, else what was best on public images, with flags."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from gradveil.attacks import build_attack, standard
from gradveil.attacks.standard import (
    LEARNED_BEAT_SEARCH,
    NOT_CONVERGED,
    RANDOM_DEFENCE,
    VANISHING_GRADIENT,
    Standard,
    Way,
)
from gradveil.audits import settings as audit_settings
from gradveil.audits.settings import make_audit_settings
from gradveil.defences import build_defence
from gradveil.errors import ConfigError
from gradveil.models import create_model
from gradveil.threat import Knowledge, PublicKnowledge, Reconstruction, ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.test_lti import blobs

SMALL = Standard(iterations=4, samples=40)


def watched(*knows, spec="none", model="lenet-dlg", public=40, images=1):
    network = create_model(model, (1, 8, 8), 3, 0).eval()
    whole = blobs(2 * images, 5)
    private = [whole[slice(start, start + images)] for start in (0, images)]
    threat = ThreatModel.of("num-examples", "labels", *knows)
    shown = PublicKnowledge(blobs(public, 1))
    seen = observe(network, private, threat=threat, num_classes=3, defence=build_defence(spec), public=shown)
    return seen, torch.stack([batch.images for batch in private])


def rng():
    return torch.Generator().manual_seed(0)


def canned(monkeypatch, grey, converged=True):
    """Let each way guess plain grey, by its name; return the list of ways with the number of targets they attacked."""
    played = []

    def play(self, seen, _rng, keep=0):
        played.append((self, seen))
        shade = grey(self)
        count = seen.num_targets
        images = torch.full((count, seen.num_examples, *seen.shape), shade)
        done = torch.full((count,), converged)
        return Reconstruction(images, torch.zeros(count, 1).long(), torch.zeros(count), done, why=("",) * count)

    monkeypatch.setattr(Way, "__call__", play)
    return played


def test_a_first_linear_layer_is_read_off_exactly():
    seen, truth = watched(model="mlp:hidden=20")
    found = Standard()(seen, rng())
    assert torch.allclose(found.images, truth, atol=1e-4)
    assert "exact" in found.why[0]


def test_a_batch_behind_a_linear_layer_is_solved_exactly():
    seen, truth = watched(model="mlp:hidden=60", images=3)
    found = Standard()(seen, rng())
    assert bool(found.converged.all())
    apart = torch.cdist(found.images.flatten(2), truth.flatten(2)).amin(2)
    assert apart.max() < 1e-2


def test_components_are_compared_where_a_linear_layer_is_wider_than_the_batch():
    seen, _ = watched("public-data", model="mlp:hidden=60,activation=tanh", images=3)
    assert "cpa:iterations=4" in [way.spec for way in SMALL.ways(seen, standard.SEARCHES[0])]
    for other in (watched("public-data", model="mlp:hidden=3,activation=tanh", images=3), watched("public-data")):
        assert not any(way.spec.startswith("cpa") for way in SMALL.ways(other[0], standard.SEARCHES[0]))


@pytest.mark.parametrize("favourite", ["lti", "ggl", "gs"])
def test_the_way_that_is_best_on_public_images_is_played(monkeypatch, favourite):
    seen, _ = watched("public-data")
    bright = float(seen.public_data.images.mean())
    played = canned(monkeypatch, lambda way: bright if way.spec.startswith(favourite) else 1.0)
    found = SMALL.run(seen, rng())
    last, targets = played[-1]
    assert last.spec.startswith(favourite)
    assert targets.num_targets == 2
    assert f"chosen by 4 updates of public images: {last.spec}" in found.why[0]
    assert (LEARNED_BEAT_SEARCH in found.flags[0]) == (favourite == "lti")


@pytest.mark.parametrize("best", standard.SEARCHES[:3])
def test_short_searches_choose_the_settings_of_gradient_matching(monkeypatch, best):
    seen, _ = watched("public-data")
    bright = float(seen.public_data.images.mean())
    played = canned(monkeypatch, lambda way: bright if way.spec.endswith(best) else 1.0)
    Standard(iterations=40, samples=40).run(seen, rng())
    assert [way.spec for way, _ in played[:3]] == [f"gs:iterations=10,{one}" for one in standard.SEARCHES[:3]]
    assert [way.spec for way, _ in played[3:] if way.spec.startswith("gs")] == [f"gs:iterations=40,{best}"] * 2


def test_the_pilot_never_sees_a_target_or_an_image_that_attacks_learn_from(monkeypatch):
    seen, truth = watched("public-data")
    played = canned(monkeypatch, lambda way: 0.5)
    SMALL.run(seen, rng())
    public = seen.public_data.images
    for way, stage in played[:-1]:
        assert stage.num_targets == standard.PILOT, way
        assert len(stage.public_data) == len(public) - standard.PILOT
    assert torch.equal(played[0][1].public_data.images, public[standard.PILOT :])
    assert not any(torch.equal(picture, target) for picture in public[:4] for target in truth[:, 0])


def test_knowing_the_defence_it_may_still_play_the_plain_attack(monkeypatch):
    seen, _ = watched("public-data", "defence", spec="prune")
    bright = float(seen.public_data.images.mean())
    played = canned(monkeypatch, lambda way: 1.0 if way.knowing else bright)
    SMALL.run(seen, rng())
    assert not played[-1][0].knowing
    assert any(way.knowing for way, _ in played)


def test_learned_inversion_is_left_out_where_playing_clients_is_too_much_work(monkeypatch):
    seen, _ = watched("public-data", "defence", spec="dcs2:steps=20")
    played = canned(monkeypatch, lambda way: 0.5)
    SMALL.run(seen, rng())
    assert any(way.spec.startswith("lti") for way, _ in played)
    monkeypatch.setattr(standard, "MOST_WORK", 5)
    played.clear()
    found = SMALL.run(seen, rng())
    assert not any(way.spec.startswith("lti") for way, _ in played)
    assert "lti was left out, since a client under the defence takes" in found.why[0]


def test_without_public_images_only_searches_are_played(monkeypatch):
    seen, _ = watched("defence", spec="prune")
    played = canned(monkeypatch, lambda way: 0.5, converged=False)
    found = SMALL.run(seen, rng())
    assert [way.spec.partition(":")[0] for way, _ in played] == ["gs", "gs"]
    assert [way.knowing for way, _ in played] == [True, False]
    assert all(NOT_CONVERGED in flags for flags in found.flags)
    assert "no public images" in found.why[0]


@pytest.mark.parametrize(("spec", "random"), [("gaussian:std=0.1", True), ("prune", False)])
def test_random_defences_are_flagged_by_playing_them_twice(monkeypatch, spec, random):
    seen, _ = watched("public-data", "defence", spec=spec)
    canned(monkeypatch, lambda way: 0.5)
    found = SMALL.run(seen, rng())
    assert (RANDOM_DEFENCE in found.flags[0]) == random


def test_a_vanishing_gradient_is_flagged(monkeypatch):
    seen, _ = watched()
    canned(monkeypatch, lambda way: 0.5)
    faint = replace(seen, updates={name: tensor * 1e-9 for name, tensor in seen.updates.items()})
    assert VANISHING_GRADIENT in SMALL.run(faint, rng()).flags[0]
    assert VANISHING_GRADIENT not in SMALL.run(seen, rng()).flags[0]


def test_it_runs_as_it_is_and_gives_the_same_for_the_same_seed():
    seen, _ = watched("public-data", "defence", spec="gaussian:std=0.01")
    one, two = (SMALL(seen, rng()) for _ in range(2))
    assert torch.equal(one.images, two.images)
    assert one.images.isfinite().all()


def test_efforts_grow():
    efforts = [standard.EFFORTS[name] for name in audit_settings.EFFORTS]
    assert list(standard.EFFORTS) == list(audit_settings.EFFORTS)
    for less, more in pairwise(efforts):
        assert all(a < b for a, b in zip(less, more, strict=True))
    with pytest.raises(ConfigError, match="effort"):
        build_attack("standard:effort=lazy")
    assert "at most" in build_attack("standard").too_large(1000, 1)


def test_an_audit_passes_the_effort_on_and_grants_public_images():
    made = make_audit_settings({"attacks": "standard", "effort": "quick"})
    assert made.attacks == ("standard:effort=quick",)
    assert "public-data" in made.knows
    assert "public-data" not in make_audit_settings({"attacks": "gs"}).knows
    assert make_audit_settings({"attacks": "standard", "knows": "labels,num-examples"}).knows == (
        "labels",
        "num-examples",
    )
    assert make_audit_settings({"attacks": "gs,lti"}).knows == ("labels", "num-examples", "public-data")
    assert Knowledge.PUBLIC_DATA in build_attack("standard").wants


def test_too_few_public_images_are_no_obstacle(monkeypatch):
    seen, _ = watched("public-data", public=40)
    few = seen.with_public(Batch(seen.public_data.images[:1], torch.zeros(1).long(), torch.zeros(1).bool()))
    played = canned(monkeypatch, lambda way: 0.5)
    SMALL.run(few, rng())
    assert {way.spec.partition(":")[0] for way, _ in played} == {"gs"}
