import pytest
import torch
import torch.nn.functional as F

from gradveil.attacks.gs import Gs
from gradveil.attacks.parts import learned_priors as module
from gradveil.attacks.parts.learned_priors import LEVELS, learned_priors
from gradveil.defences import build_defence
from gradveil.errors import ThreatModelError
from gradveil.generators.denoiser import train_denoiser
from gradveil.threat import PublicKnowledge
from gradveil.types import Batch
from tests.attacks.scene import adapted, psnr, run, scene

KNOWS = ("num-examples", "labels", "defence", "public-data")


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Train denoisers by few steps."""
    monkeypatch.setattr(module, "train_denoiser", lambda images: train_denoiser(images, steps=150))


def public(count=64):
    coarse = torch.rand(count, 1, 3, 3, generator=torch.Generator().manual_seed(9))
    return F.interpolate(coarse, (8, 8), mode="bilinear")


def noisy(grants=KNOWS, targets=4):
    batch = Batch(public(), torch.zeros(64, dtype=torch.long), torch.zeros(64) > 0)
    defence = build_defence("gaussian:std=0.05")
    return scene(targets=targets, defence=defence, grants=grants, public=PublicKnowledge(batch))


def test_each_level_of_the_denoiser_charges_what_it_would_still_change():
    images = public(64)
    normal, *levels = learned_priors("denoiser", images)
    assert len(levels) == len(LEVELS)
    assert len(learned_priors("normal", images)) == 1
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    for prior in (normal, *levels):
        assert (prior.penalty(images) < prior.penalty(images + 0.3 * noise)).all()
    rates = [prior.rate for prior in levels]
    assert rates == sorted(rates, reverse=True)
    level, clean = LEVELS[-1], train_denoiser(images, steps=150)
    change = (images[:2] - clean(images[:2], torch.full((2,), level))).square().flatten(1).mean(1)
    torch.testing.assert_close(levels[-1].penalty(images[:2]), change / (2 * level**2))


def test_under_known_noise_the_search_goes_through_the_priors_and_otherwise_learns_none():
    _, _, seen = noisy()
    found = adapted(Gs(prior="denoiser").search(seen), seen)
    assert len(found.phases) == 1 + len(LEVELS)
    assert all(phase.priors.learned is not None and not phase.priors.tv for phase in found.phases)
    assert all(phase.objective == found.objective for phase in found.phases)
    _, _, plain = noisy(("num-examples", "labels", "public-data"))
    assert adapted(Gs(prior="denoiser").search(plain), plain).priors.learned is None


@pytest.mark.parametrize("prior", ["normal", "denoiser"])
def test_a_learned_prior_gives_better_pictures_than_smoothness(prior):
    truth, _, seen = noisy()
    smooth, learned = (run(Gs(iterations=300, sign="none", prior=kind), seen) for kind in ("smooth", prior))
    better = psnr(truth.flatten(0, 1), learned.images.flatten(0, 1)).mean()
    assert better > psnr(truth.flatten(0, 1), smooth.images.flatten(0, 1)).mean() + 2


def test_public_images_must_be_granted():
    _, _, seen = noisy(("num-examples", "labels", "defence"))
    with pytest.raises(ThreatModelError, match="public-data"):
        run(Gs(prior="normal"), seen)
