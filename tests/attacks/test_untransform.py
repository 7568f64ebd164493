import pytest
import torch

from gradveil.attacks import build_attack
from gradveil.attacks.encodings import Encodings
from gradveil.attacks.untransform import Untransform
from gradveil.defences import build_defence
from gradveil.errors import ConfigError
from gradveil.types import Batch
from tests.attacks.scene import psnr, run, scene

GRANTS = ("num-examples", "encodings", "defence")


@pytest.mark.parametrize(("policy", "gain"), [("0", 20), ("7-0", 3), ("21-13-3", 3), ("21-13-3+7-4-15", 2)])
def test_it_undoes_what_can_be_undone(policy, gain):
    defence = build_defence(f"ats:policy={policy}")
    public = Batch(*[torch.cat(part) for part in zip(*public_parts(), strict=True)])
    how = {"targets": 8, "side": 16, "defence": defence, "public_data": public}
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
    how = {"targets": 2, "side": 16, "defence": build_defence("ats:policy=0"), "public_data": public}
    found = {}
    for grants in (("labels", "num-examples", "public-data"), ("labels", "num-examples", "public-data", "defence")):
        truth, _, seen = scene(grants=grants, **how)
        result = run(build_attack("gs:iterations=300"), seen)
        assert not any("not decoded" in why for why in result.why)
        found["defence" in grants] = float(psnr(truth.flatten(0, 1), result.images.flatten(0, 1)).mean())
    assert found[True] > found[False] + 3


def test_what_it_was_prepared_on_is_what_its_inner_attack_was(monkeypatch):
    monkeypatch.setattr(Encodings, "prepared_on", lambda self, shape, num_classes: frozenset({7}))
    assert Untransform().prepared_on((1, 8, 8), 10) == {7}


def test_another_defence_leaves_the_guesses_as_they_are():
    truth, _, seen = scene(grants=GRANTS)
    assert torch.equal(run(Untransform(), seen).images, truth)


def test_bad_settings():
    with pytest.raises(ConfigError, match="prior"):
        build_attack("untransform:prior=-1")
