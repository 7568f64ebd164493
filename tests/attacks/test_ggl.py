from dataclasses import replace

import pytest
import torch

from gradveil.attacks.ggl import Ggl, estimated
from gradveil.attacks.grnn import Grnn
from gradveil.attacks.matching import Matching
from gradveil.defences import build_defence
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.registry import build, split_specs
from gradveil.threat import PublicKnowledge
from gradveil.types import Batch
from tests.attacks.scene import adapted, psnr, run, scene

OWN = """
import torch
from torch import nn
class Smooth(nn.Module):
    latent = 9
    def forward(self, latents):
        coarse = (latents / 3).sigmoid().view(-1, 1, 3, 3)
        return nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear")
def factory():
    return Smooth()
class Classes(nn.Module):
    latent, conditional = 9, True
    def forward(self, latents, labels):
        coarse = (latents / 3).sigmoid().view(-1, 1, 3, 3)
        images = nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear")
        return images * (labels == {label}).view(-1, 1, 1, 1)
"""
GRANTS = ("num-examples", "public-data")
SQUARED = {"distance": "l2", "tv": 0.0, "kl": 0.0}
"""Squared differences: a cosine does not see that an update was clipped."""


@pytest.fixture
def generator(tmp_path):
    """A generator of just such pictures as the scene has."""
    path = tmp_path / "smooth.py"
    path.write_text(OWN.format(label=1))
    return f"{path}:factory"


def public(count=60):
    rng = torch.Generator().manual_seed(7)
    images = torch.nn.functional.interpolate(torch.rand(count, 1, 3, 3, generator=rng), size=(8, 8), mode="bilinear")
    return Batch(images, torch.arange(count) % 4, torch.zeros(count, dtype=torch.bool))


def close(truth, result):
    return psnr(truth.flatten(0, 1), result.images.flatten(0, 1))


@pytest.mark.parametrize(
    "settings", [{"iterations": 60, "population": 20, "lr": 0.5}, {"optimiser": "adam", "iterations": 150, "lr": 0.3}]
)
def test_reconstructs_images_that_the_generator_can_make(generator, settings):
    truth, labels, seen = scene(targets=3, grants=GRANTS)
    result = run(Ggl(generator=generator, kl=0.0, **settings), seen)
    start = run(Ggl(generator=generator, iterations=1, population=4), seen)
    assert torch.equal(result.labels, labels)
    assert close(truth, result).min() > 25
    assert (close(truth, result) > close(truth, start) + 8).all()


def test_principal_components_of_public_images_need_no_file():
    truth, _, seen = scene(targets=2, grants=GRANTS, public=PublicKnowledge(public()))
    result = run(Ggl(optimiser="adam", iterations=150, latent=9, kl=0.0), seen)
    assert close(truth, result).min() > 25


def test_a_conditional_generator_gets_the_recovered_label(tmp_path):
    """Of a generator that makes nothing for the other classes the guess is black where the label is another."""
    _, labels, seen = scene(targets=3, grants=GRANTS)
    path = tmp_path / "classes.py"
    path.write_text(OWN.format(label=int(labels[0, 0])))
    result = run(Ggl(generator=f"{path}:Classes", iterations=2, population=4), seen)
    bright = result.images.flatten(1).amax(1) > 0
    assert torch.equal(bright, labels[:, 0] == labels[0, 0])


def test_evaluating_candidates_in_chunks_changes_nothing(generator):
    _, _, seen = scene(targets=2, grants=GRANTS)
    results = [run(Ggl(generator=generator, iterations=3, population=6, chunk=chunk), seen) for chunk in (2, 5)]
    assert torch.allclose(results[0].images, results[1].images, atol=1e-4)


def test_a_target_that_is_found_leaves(generator):
    _, _, seen = scene(targets=2, grants=GRANTS)
    settings = {"generator": generator, "iterations": 40, "population": 12, "lr": 0.5, "kl": 0.0}
    long, short = (run(Ggl(stop_below=share, **settings), seen) for share in (0.0, 0.3))
    assert (short.loss < 0.3).all()
    assert (long.loss < short.loss).all()


def test_the_divergence_keeps_latents_likely(generator):
    _, _, seen = scene(targets=2, grants=GRANTS)
    attack = Ggl(generator=generator, optimiser="adam", iterations=100, kl=1e3)
    guess = run(attack, seen).images
    free = run(Ggl(generator=generator, optimiser="adam", iterations=100, kl=0.0), seen).images
    assert guess.std() < free.std()


def rows(*values):
    return torch.tensor(values)


def test_estimates_by_hand():
    guess = {"w": rows([[3.0, 0.0], [0.0, 4.0]], [[0.3, 0.0], [0.0, 0.4]]), "b": rows([0.1, -2.0], [5.0, 6.0])}
    seen = {"w": rows([[1.0, 0.0], [0.0, 0.0]], [[0.0, 2.0], [0.0, 2.0]]), "b": rows([0.0, 0.0], [9.0, 9.0])}
    clipped = estimated("clip").sent(guess, seen)
    norms = [sum(float(t[row].square().sum()) for t in clipped.values()) ** 0.5 for row in (0, 1)]
    assert norms == pytest.approx([1.0, (0.25 + 61) ** 0.5])  # of the second target more arrived than the guess has
    kept = estimated("compression").sent(guess, seen)  # five of six entries are zero, then two of six
    assert torch.equal(kept["w"], rows([[0.0, 0.0], [0.0, 4.0]], [[0.3, 0.0], [0.0, 0.4]]))
    assert torch.equal(kept["b"], rows([0.0, -2.0], [5.0, 6.0]))
    columns = estimated("columns").sent(guess, seen)
    assert torch.equal(columns["w"], rows([[3.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.4]]))
    assert torch.equal(columns["b"], guess["b"])
    assert estimated("none").sent is None


@pytest.mark.parametrize(
    ("defence", "estimate"), [("clip:norm=0.05", "clip"), ("prune:fraction=0.9", "compression"), ("soteria", "columns")]
)
def test_an_estimate_explains_the_update_better_than_none(generator, defence, estimate):
    truth, _, seen = scene(targets=2, grants=(*GRANTS, "labels"), defence=build_defence(defence))
    settings = {"generator": generator, "optimiser": "adam", "iterations": 60, "lr": 0.5, **SQUARED}
    plain, estimating = (run(Ggl(estimate=what, **settings), seen) for what in ("none", estimate))
    assert (estimating.loss < plain.loss).all()
    assert close(truth, estimating).mean() > close(truth, plain).mean()


def test_a_known_defence_is_answered_by_its_own_countermove(generator):
    settings = {"generator": generator, "optimiser": "adam", "iterations": 100, "lr": 0.3, **SQUARED}
    truth, _, seen = scene(grants=(*GRANTS, "labels"), defence=build_defence("clip:norm=0.05"))
    _, _, knowing = scene(grants=(*GRANTS, "labels", "defence"), defence=build_defence("clip:norm=0.05"))
    plain, adaptive = (run(Ggl(**settings), each) for each in (seen, knowing))
    assert close(truth, adaptive).mean() > close(truth, plain).mean() + 3


def test_under_known_noise_the_generator_is_the_only_prior(generator):
    _, _, seen = scene(grants=(*GRANTS, "defence"), defence=build_defence("gaussian:std=0.1"))
    search = adapted(Ggl(generator=generator, tv=0.25).search(seen), seen)
    assert search.priors.tv == 0.25
    assert search.objective.weights
    assert adapted(Grnn().search(seen), seen).priors.tv > 0.25


def test_public_data_must_be_granted(generator):
    _, _, seen = scene(grants=("num-examples",))
    with pytest.raises(ThreatModelError, match="public-data"):
        run(Ggl(generator=generator), seen)


def test_a_factory_among_the_settings_of_a_list_of_attacks():
    specs = split_specs("gs,ggl:iterations=5,generator=my/gen.py:factory,kl=0.1,dlg")
    assert specs == ["gs", "ggl:iterations=5,generator=my/gen.py:factory,kl=0.1", "dlg"]
    attack = build(Matching, specs[1])
    assert attack == Ggl(iterations=5, generator="my/gen.py:factory", kl=0.1)
    assert build(Matching, attack.spec) == attack


@pytest.mark.parametrize(
    "bad",
    [
        {"start": "grey"}, {"optimiser": "sgd"}, {"distance": "l3"}, {"estimate": "noise"}, {"latent": 0},
        {"population": 3}, {"lr": 0.0}, {"kl": -1.0}, {"tv": -1.0},
    ],
)  # fmt: skip
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Ggl(**bad)


def test_the_default_objective_is_the_published_one():
    """Cosine, total variation 1e-4 and divergence 1e-4, as in the code of DCS2's experiments."""
    _, _, seen = scene(targets=1, grants=GRANTS, public=PublicKnowledge(public()))
    search = Ggl(latent=9).search(seen)
    assert (search.objective.kind, search.priors.tv, Ggl().kl) == ("cosine", 1e-4, 1e-4)
    gradients = seen.mean_gradients
    guess = {
        name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
        for name, tensor in gradients.items()
    }
    ours, theirs = (torch.cat([tensor.flatten() for tensor in each.values()]) for each in (guess, gradients))
    wanted = 1 - ours @ theirs / ours.norm() / theirs.norm()
    assert search.objective(guess, gradients).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_the_size_of_an_update_does_not_matter(generator):
    """A clipped update gives the same guess; with squared differences it does not."""
    _, _, seen = scene(targets=1, grants=GRANTS)
    scaled = replace(seen, updates={name: tensor / 8 for name, tensor in seen.updates.items()})
    settings = {"generator": generator, "optimiser": "adam", "iterations": 20, "lr": 0.3}
    for how, same in (({}, True), (SQUARED, False)):
        one, other = (run(Ggl(**settings, **how), each).images for each in (seen, scaled))
        assert torch.allclose(one, other, atol=1e-3) is same
