"""The standard suite: exact where a closed form fits, else what was best on public images, with flags."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from gradveil.attacks import build_attack, pilot, standard
from gradveil.attacks.pilot import RANDOM_DEFENCE, Way, ways
from gradveil.attacks.standard import LEARNED_BEAT_SEARCH, NOT_CONVERGED, SPEAR_IMAGES, VANISHING_GRADIENT, Standard
from gradveil.audits import settings as audit_settings
from gradveil.audits.settings import make_audit_settings
from gradveil.defences import Defence, build_defence
from gradveil.errors import ConfigError
from gradveil.models import create_model
from gradveil.scratch import scratch_in
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
    assert "cpa:iterations=4" in [way.spec for way in ways(seen, SMALL.work, pilot.SEARCHES[0])]
    for other in (watched("public-data", model="mlp:hidden=3,activation=tanh", images=3), watched("public-data")):
        assert not any(way.spec.startswith("cpa") for way in ways(other[0], SMALL.work, pilot.SEARCHES[0]))


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


@pytest.mark.parametrize("best", pilot.SEARCHES[:3])
def test_short_searches_choose_the_settings_of_gradient_matching(monkeypatch, best):
    seen, _ = watched("public-data")
    bright = float(seen.public_data.images.mean())
    played = canned(monkeypatch, lambda way: bright if way.spec.endswith(best) else 1.0)
    Standard(iterations=40, samples=40).run(seen, rng())
    assert [way.spec for way, _ in played[:3]] == [f"gs:iterations=10,{one}" for one in pilot.SEARCHES[:3]]
    assert [way.spec for way, _ in played[3:] if way.spec.startswith("gs")] == [f"gs:iterations=40,{best}"] * 2


def test_the_pilot_never_sees_a_target_or_an_image_that_attacks_learn_from(monkeypatch):
    seen, truth = watched("public-data")
    played = canned(monkeypatch, lambda way: 0.5)
    SMALL.run(seen, rng())
    public = seen.public_data.images
    for way, stage in played[:-1]:
        assert stage.num_targets == pilot.IMAGES, way
        assert len(stage.public_data) == len(public) - pilot.IMAGES
    assert torch.equal(played[0][1].public_data.images, public[pilot.IMAGES :])
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
    monkeypatch.setattr(pilot, "MOST_WORK", 5)
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


def test_cells_that_agree_share_one_pilot(monkeypatch, tmp_path):
    seen, _ = watched("public-data")
    other, _ = watched("public-data", spec="prune")  # not known to the attacker, so it is the same to the pilot
    known, _ = watched("public-data", "defence", spec="prune")
    played = canned(monkeypatch, lambda way: 0.5)
    alone = SMALL.run(seen, rng())
    count = len(played)
    with scratch_in(tmp_path):
        shared = [SMALL.run(each, rng()) for each in (seen, other)]
        assert len(played) == 2 * count + 1  # the second time only the targets are attacked
        assert shared[0].why == shared[1].why == alone.why
        SMALL.run(known, rng())
        Standard(iterations=8, samples=40).run(seen, rng())
        assert len(list(tmp_path.glob("pilot-*.json"))) == 3
        played.clear()
        for path in tmp_path.glob("pilot-*.json"):
            path.write_text('{"figures": []}')
        assert SMALL.run(seen, rng()).why == alone.why  # a damaged file is made anew
        assert len(played) == count


def test_a_batch_needs_only_one_update_in_the_pilot():
    counts = {
        images: [len(batch) for batch in pilot.spared(watched("public-data", images=images)[0])] for images in (1, 2, 5)
    }
    assert counts == {1: [1] * 4, 2: [2, 2], 5: [5]}


def test_a_defence_without_a_countermove_is_searched_once_and_met_by_learned_inversion():
    class Own(Defence):
        def on_gradient(self, gradient, batch, client):
            return {name: 2 * tensor for name, tensor in gradient.items()}

    assert SMALL.adapts_to(Own())
    assert not SMALL.adapts_to(Defence())
    seen, _ = watched("public-data", "defence", spec="prune")
    assert sum(way.spec.startswith("gs") for way in ways(seen, SMALL.work, pilot.SEARCHES[0])) == 2
    seen._facts[Knowledge.DEFENCE] = Own()
    specs = [way.spec for way in ways(seen, SMALL.work, pilot.SEARCHES[0])]
    assert len(specs) == len(set(specs))
    assert any(spec.startswith("lti") for spec in specs)


def test_batches_beyond_a_search_meet_the_closed_forms(monkeypatch):
    seen, _ = watched("public-data", model="mlp:hidden=400", images=130)
    played = canned(monkeypatch, lambda way: 0.5)
    assert "exact" in Standard().run(seen, rng()).why[0]
    assert [way.spec for way, _ in played] == ["cpa"]
    played = canned(monkeypatch, lambda way: 0.5, converged=False)
    found = Standard().run(seen, rng())
    assert [way.spec for way, _ in played] == ["cpa"]  # too many images for spear
    assert "a closed form; gradient matching can search at most 128 images per update, got 130" in found.why[0]
    smooth, _ = watched(model="mlp:hidden=400,activation=tanh", images=130)
    played.clear()
    SMALL.run(smooth, rng())
    assert [way.spec for way, _ in played] == ["cpa:iterations=4"]


def test_spear_tries_smaller_batches_that_cpa_did_not_rebuild(monkeypatch):
    for images, expected in ((8, ["cpa", "spear"]), (SPEAR_IMAGES + 1, ["cpa"])):
        seen, _ = watched(model="mlp:hidden=100", images=images)
        played = canned(monkeypatch, lambda way: 0.5, converged=False)
        Standard()._closed_form(seen, rng())
        assert [way.spec for way, _ in played] == expected


def test_batches_beyond_a_search_and_closed_forms_have_a_picture_per_class():
    seen, truth = watched(images=130)
    found = SMALL(seen, rng())
    assert (
        "chosen: representations; gradient matching can search at most 128 images per update, got 130" in found.why[0]
    )
    assert "closed forms do not fit" in found.why[0]
    assert found.images.shape == truth.shape
    assert found.images.flatten(2).isfinite().all(2).sum(1).tolist() == [3, 3]  # classes


def test_what_nothing_fits_is_named_before_any_work():
    linear, convolution = torch.nn.Linear(4, 3), torch.nn.Conv2d(1, 3, 3)
    assert SMALL.out_of_reach(linear, (1, 8, 8), 1000, 1) == ""
    assert "at most 128 images" in SMALL.out_of_reach(linear, (1, 8, 8), 1000, 2)
    assert "a single local step and a Linear layer" in SMALL.out_of_reach(convolution, (1, 8, 8), 1000, 1)
    assert SMALL.out_of_reach(convolution, (1, 8, 8), 128, 1) == ""


@pytest.mark.parametrize("public", [2, 6, 12])
def test_it_plays_whatever_the_number_of_public_images(public):
    seen, truth = watched("public-data", public=public)
    found = SMALL(seen, rng())
    assert found.images.shape == truth.shape
    assert found.images.isfinite().all()
    assert "lti" not in found.why[0]
