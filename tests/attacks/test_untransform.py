from dataclasses import replace

import pytest
import torch

from gradveil.attacks import build_attack
from gradveil.attacks.encodings import Encodings
from gradveil.attacks.parts.imitation import Imitation
from gradveil.attacks.untransform import Untransform
from gradveil.defences import build_defence
from gradveil.errors import ConfigError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.threat import PublicKnowledge
from gradveil.types import Batch
from tests.attacks.scene import psnr, run, scene

GRANTS = ("num-examples", "encodings", "defence")


@pytest.mark.parametrize(("policy", "gain"), [("0", 20), ("7-0", 3), ("21-13-3", 3), ("21-13-3+7-4-15", 2)])
def test_it_undoes_invertible_operations(policy, gain):
    defence = build_defence(f"ats:policy={policy}")
    public = Batch(*[torch.cat(part) for part in zip(*public_parts(), strict=True)])
    how = {"targets": 8, "side": 16, "defence": defence, "public": PublicKnowledge(public)}
    truth, _, seen = scene(grants=(*GRANTS, "public-data"), **how)
    _, _, blind = scene(grants=("num-examples", "encodings"), **how)
    shown, found = run(Encodings(), blind).images, run(Untransform(), seen).images
    before, after = (psnr(truth.flatten(0, 1), images.flatten(0, 1)) for images in (shown, found))
    assert after.mean() > before.mean() + gain


def public_parts():
    for seed in range(30):
        rng = torch.Generator().manual_seed(100 + seed)
        coarse = torch.rand(1, 1, 3, 3, generator=rng)
        images = torch.nn.functional.interpolate(coarse, size=(16, 16), mode="bilinear")
        yield images, torch.zeros(1, dtype=torch.long), torch.zeros(1) > 0


def test_a_known_policy_is_undone_after_any_attack():
    truth, _, seen = scene(grants=GRANTS, defence=build_defence("ats:policy=0"))
    assert torch.allclose(run(Encodings(), seen).images, truth, atol=1e-6)


def test_it_follows_a_gradient_attack_that_was_given_no_encodings():
    public = Batch(*[torch.cat(part) for part in zip(*public_parts(), strict=True)])
    how = {"targets": 2, "side": 16, "defence": build_defence("ats:policy=0"), "public": PublicKnowledge(public)}
    found = {}
    for grants in (("labels", "num-examples", "public-data"), ("labels", "num-examples", "public-data", "defence")):
        truth, _, seen = scene(grants=grants, **how)
        result = run(build_attack("gs:iterations=300"), seen)
        assert not any("not decoded" in why for why in result.why)
        found["defence" in grants] = float(psnr(truth.flatten(0, 1), result.images.flatten(0, 1)).mean())
    assert found[True] > found[False] + 3


def test_it_is_prepared_on_the_same_data_as_its_inner_attack(monkeypatch):
    monkeypatch.setattr(Encodings, "prepared_on", lambda self, shape, num_classes: frozenset({7}))
    assert Untransform().prepared_on((1, 8, 8), 10) == {7}


def test_one_look_gives_exactly_what_it_shows_and_fills_the_rest_from_that():
    how = {"targets": 6, "side": 16, "defence": build_defence("ats:policy=3")}  # 7 columns go
    truth, _, seen = scene(grants=GRANTS, **how)
    _, _, blind = scene(grants=GRANTS[:2], **how)
    found = run(Encodings(), seen).images
    went_left = (run(Encodings(), blind).images[..., -7:] == 0).flatten(1).all(1)
    assert 0 < went_left.sum() < 6
    for guess, image, left in zip(found[:, 0, 0], truth[:, 0, 0], went_left, strict=True):
        there, lost = (slice(7, None), slice(7)) if left else (slice(-7), slice(-7, None))
        assert torch.allclose(guess[:, there], image[:, there], atol=1e-6)
        assert torch.allclose(guess[:, lost], image[:, there].median(), atol=1e-6)


def test_several_looks_give_what_one_has_lost_in_any_order_of_the_batch():
    how = {"size": 3, "side": 16, "defence": build_defence("ats:policy=21"), "grants": GRANTS}
    truth, labels, seen = scene(protocol=Protocol(rounds=6), **how)
    shown = Encodings().run(seen, torch.Generator())
    found = Untransform().decode(shown, seen, torch.Generator())
    alone = Untransform().decode(shown, replace(seen, rounds=1), torch.Generator())
    assert found.images.shape == shown.images.shape
    assert not torch.equal(shown.labels[0], shown.labels[1])  # the order differs
    for look, single, classes, private, true in zip(
        found.images, alone.images, found.labels, truth.repeat_interleave(6, 0), labels.repeat_interleave(6, 0),
        strict=True,
    ):  # fmt: skip
        off = (look[:, None] - private).abs().flatten(2).amax(2)  # guesses by images
        owner = off.argmin(1)
        assert owner.sort().values.tolist() == [0, 1, 2]
        assert off.amin(1).max() < 1e-5
        assert (single - private[owner]).abs().max() > 0.05
        assert torch.equal(classes, true[owner])
    assert run(Untransform(), seen).images.shape == truth.shape


def test_a_look_without_information_does_not_harm_others():
    truth, _, seen = scene(side=16, protocol=Protocol(rounds=6), defence=build_defence("ats:policy=21"), grants=GRANTS)
    shown = Encodings().run(seen, torch.Generator())
    images = shown.images.clone()
    images[0, 0, 0, 3, 3] = torch.nan
    found = Untransform().decode(replace(shown, images=images), seen, torch.Generator()).images
    assert found[0].isnan().all()
    assert torch.allclose(found[1:6], truth[0].expand_as(found[1:6]), atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "batch_size"),
    [
        ("ats:policy=21,mirror=true", 0),
        ("ats:policy=21,crop=2", 0),
        ("mixup:k=2+ats:policy=21", 0),
        ("ats:policy=21", 2),
    ],
)
def test_looks_at_other_pictures_stay_by_themselves(spec, batch_size):
    how = LocalSettings(algorithm="fedsgd", batch_size=batch_size, batch_norm="freeze")
    _, _, seen = scene(size=4, side=16, protocol=Protocol(how, rounds=4), defence=build_defence(spec), grants=GRANTS)
    shown = Encodings().run(seen, torch.Generator())
    found, alone = (
        Untransform().decode(shown, each, torch.Generator()).images for each in (seen, replace(seen, rounds=1))
    )
    assert torch.equal(found, alone)


def test_another_defence_does_not_change_the_guesses():
    truth, _, seen = scene(grants=GRANTS)
    assert torch.equal(run(Untransform(), seen).images, truth)


def test_bad_settings():
    with pytest.raises(ConfigError, match="prior"):
        build_attack("untransform:prior=-1")
    with pytest.raises(ConfigError, match="rehearsals"):
        build_attack("untransform:rehearsals=-1")


def test_a_rehearsal_undoes_a_blur_and_changes_nothing_if_guesses_are_exact():
    """The errors of an inversion that halves the contrast are learned from public images, and undone."""
    public = Batch(*[torch.cat(part) for part in zip(*public_parts(), strict=True)])
    how = {"targets": 4, "side": 16, "defence": build_defence("ats:policy=0"), "public": PublicKnowledge(public)}
    truth, _, seen = scene(grants=(*GRANTS, "public-data"), **how)
    shown = Encodings().run(seen, torch.Generator())
    faint = replace(shown, images=0.3 + 0.4 * shown.images)
    imitate = Imitation.of(public.images, 0.3 + 0.4 * public.images)
    plain, rehearsed = (
        psnr(truth.flatten(0, 1), Untransform().decode(faint, seen, torch.Generator(), errors).images.flatten(0, 1))
        for errors in (None, imitate)
    )
    assert (rehearsed > plain + 10).all()
    assert torch.equal(
        run(Untransform(rehearsals=4), seen).images, run(Untransform(), seen).images
    )  # granted encodings have no errors to learn
    exact = Imitation.of(public.images, public.images)
    found = Untransform().decode(shown, seen, torch.Generator(), exact).images
    assert torch.allclose(found, truth, atol=0.02)


def test_an_attack_on_gradients_is_rehearsed_on_played_clients():
    public = Batch(*[torch.cat(part) for part in zip(*public_parts(), strict=True)])
    how = {"targets": 2, "side": 16, "defence": build_defence("ats:policy=0"), "public": PublicKnowledge(public)}
    truth, _, seen = scene(grants=("labels", "num-examples", "public-data", "defence"), **how)
    inner = "inner=gs:iterations=30;adapt=none"
    found = [run(build_attack(f"untransform:{inner},rehearsals={count}"), seen) for count in (0, 4)]
    plain, rehearsed = (psnr(truth.flatten(0, 1), each.images.flatten(0, 1)).mean() for each in found)
    assert rehearsed > plain + 1
    assert not any("not rehearsed" in why for why in found[1].why)
