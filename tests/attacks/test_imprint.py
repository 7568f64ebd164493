from statistics import NormalDist

import pytest
import torch

from gradveil.attacks.base import Scene
from gradveil.attacks.imprint import Imprint, quantiles
from gradveil.attacks.parts.analytic import INSERTED, likely_pictures, two_linears
from gradveil.defences import build_defence
from gradveil.errors import ConfigError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.metrics import align
from gradveil.models import Normalisation, create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch
from tests.attacks.scene import psnr, run

SHAPE = (3, 16, 16)
NORMALISATION = Normalisation((0.45, 0.45, 0.45), (0.25, 0.25, 0.25))


def photographs(count, seed):
    """Smooth noise in whole 8-bit values."""
    network = create_model("logistic", SHAPE, 4, 0, NORMALISATION)
    images = likely_pictures(network, Scene(SHAPE, 4), torch.Generator().manual_seed(seed), count)
    return (images * 255).round() / 255


def batch(images):
    return Batch(images, torch.arange(len(images)) % 4, torch.zeros(len(images)) > 0)


def look(attack, images, model="lenet-dlg", normalisation=NORMALISATION, public=None, **how):
    network = create_model(model, SHAPE, 4, 0, normalisation).eval()
    scene = Scene(SHAPE, 4, public)
    return observe(
        network,
        [batch(some) for some in images],
        threat=ThreatModel.of("num-examples", "alters-model"),
        num_classes=4,
        federation=Federation(alter=lambda net: attack.alter(net, scene, torch.Generator().manual_seed(3))),
        **how,
    )


def share(attack, truth, seen, above=60):
    found = run(attack, seen)
    each = psnr(truth, align(truth, found.images[0]))
    return float((each > above).float().mean()), found


@pytest.mark.parametrize(
    "attack",
    [Imprint(), Imprint(query="dct", mode=5), Imprint(query="random"), Imprint(bins=100, distribution="laplace")],
)
def test_most_images_of_a_large_batch_are_read_above_60_decibels(attack):
    truth = photographs(48, 5)
    found, result = share(attack, truth, look(attack, [truth]))
    assert found >= 0.5
    assert f"{round(found * 48)} surely single ones" in result.why[0]
    assert (result.labels == -1).all()


def test_images_are_read_without_normalisation_and_with_public_images():
    attack, truth = Imprint(), photographs(32, 5)
    seen = look(attack, [truth], normalisation=None, public=batch(photographs(300, 6)))
    assert share(attack, truth, seen)[0] > 0.5


def test_dark_pictures_need_public_images():
    attack, truth = Imprint(), photographs(32, 5) * 0.2
    blind, known = (
        share(attack, truth, look(attack, [truth], public=public))[0]
        for public in (None, batch(photographs(300, 6) * 0.2))
    )
    assert known > 0.5 > blind


def test_the_first_layer_of_a_perceptron_can_be_used():
    attack, truth = Imprint(where="first"), photographs(16, 5)
    assert share(attack, truth, look(attack, [truth], "mlp:hidden=128/20"))[0] > 0.6


@pytest.mark.parametrize("model", ["logistic", "mlp:activation=tanh"])
def test_an_unusable_first_layer_is_refused(model):
    with pytest.raises(ConfigError, match=r"where=first needs a network that begins with Linear, ReLU and Linear, got"):
        look(Imprint(where="first"), [photographs(2, 5)], model)


def test_two_images_in_two_bins_and_none_in_the_rest():
    attack, truth = Imprint(bins=4), torch.stack([torch.full(SHAPE, 0.2), torch.full(SHAPE, 0.8)])
    _, found = share(attack, truth, look(attack, [truth]))
    assert sorted(found.images[0].flatten(1).mean(1).tolist()) == pytest.approx([0.2, 0.8], abs=1e-4)


def test_images_alone_in_a_bin_are_the_closed_form_to_float_precision():
    attack, truth = Imprint(), photographs(16, 5)
    seen = look(attack, [truth])
    mean, std = (torch.tensor(part).view(3, 1, 1).double() for part in (NORMALISATION.mean, NORMALISATION.std))
    rows = seen.network.get_submodule(f"{INSERTED}.rows")
    last = (rows(((truth - mean) / std).float().flatten(1)) > 0).sum(1) - 1  # the last row that sees each image
    alone = [n for n, row in enumerate(last) if int((last == row).sum()) == 1 and row < attack.bins - 1]
    assert len(alone) >= 8
    weight, bias = (seen.updates[f"{INSERTED}.rows.{name}"][0].double() for name in ("weight", "bias"))
    at = last[alone]
    exact = (weight[at] - weight[at + 1]) / (bias[at] - bias[at + 1])[:, None]
    exact = exact.view(-1, *SHAPE) * std + mean
    found = align(truth, run(attack, seen).images[0])[alone]
    assert (found - exact).abs().max() < 1e-6
    assert (found - truth[alone]).abs().max() < 1e-5


def test_images_in_one_bin_are_mixed_and_leave_no_guess_for_the_other():
    attack = Imprint(bins=2)
    truth = photographs(40, 5)
    order = truth.flatten(1).mean(1).argsort()
    found = run(attack, look(attack, [truth[order[:2]]]))
    assert found.images[0, 1].isnan().all()
    assert "1 guesses for 2 images, 0 surely single ones; the others may be mixtures of images in one bin" in found.why


def test_several_local_steps_work_approximately_with_a_larger_gain():
    attack, truth = Imprint(gain=1.0), photographs(8, 5)
    how = LocalSettings(epochs=2, batch_size=4)
    assert share(attack, truth, look(attack, [truth], protocol=Protocol(how, 0.1)), above=30)[0] > 0.5


def test_noise_far_above_the_honest_gradient_hides_faint_rows_only():
    truth, noise = photographs(32, 5), build_defence("gaussian:std=0.5,where=gradient")
    faint, usual = (
        share(attack, truth, look(attack, [truth], defence=noise), above=40)[0]
        for attack in (Imprint(gain=1e-3), Imprint())
    )
    assert faint == 0
    assert usual >= 0.5


@pytest.mark.parametrize(("where", "model"), [("inserted", "lenet-dlg"), ("first", "mlp:hidden=64/20")])
def test_smaller_rows_leave_the_altered_network_as_it_was(where, model):
    pictures = photographs(6, 5)
    outputs = []
    for gain in (1e-3, 1e-8):
        network = create_model(model, SHAPE, 4, 0, NORMALISATION).eval()
        altered = Imprint(gain=gain, where=where).alter(network, Scene(SHAPE, 4), torch.Generator().manual_seed(3))
        outputs.append(altered.eval()(pictures))
    assert torch.allclose(*outputs, rtol=1e-3, atol=1e-4)


def test_a_ramp_per_bin_reads_what_the_ladder_reads():
    truth, public = photographs(32, 5), batch(photographs(300, 6))
    shares = []
    for form in ("ladder", "sparse"):
        attack = Imprint(form=form, bins=64)
        found, result = share(attack, truth, look(attack, [truth], public=public))
        shares.append(found)
        assert f"{round(found * 32)} surely single ones" in result.why[0]
    assert shares[0] == shares[1] > 0.4


@pytest.mark.parametrize(("where", "model"), [("inserted", "lenet-dlg"), ("first", "mlp:hidden=64")])
def test_one_shot_reads_the_only_image_of_its_bin_and_nothing_else(where, model):
    attack, public = Imprint(form="one-shot", bins=16, where=where), batch(photographs(300, 6))
    middle = public.images.flatten(1).mean(1).double()
    low, high = quantiles(middle, 16, "empirical")[8:10]
    truth = photographs(80, 5)
    answers = truth.flatten(1).mean(1).double()
    inside, outside = ((answers > low) & (answers < high)).nonzero()[:, 0], (answers < low) | (answers > high)
    assert len(inside) >= 2
    one, two = (torch.cat([truth[inside[:count]], truth[outside]]) for count in (1, 2))
    found = run(attack, look(attack, [one], model, public=public))
    assert psnr(one[:1], found.images[0, :1]) > 60
    assert found.images[0, 1:].isnan().all()
    assert f"1 guesses for {len(one)} images, 1 surely single ones" in found.why[0]
    mixed = run(attack, look(attack, [two], model, public=public))
    assert "0 surely single ones" in mixed.why[0]


def test_a_pair_of_rows_leaves_the_other_rows_as_they_are():
    honest, altered = (create_model("mlp:hidden=64", SHAPE, 4, 0, NORMALISATION) for _ in range(2))
    attack = Imprint(form="one-shot", where="first")
    before = torch.get_rng_state()
    altered = attack.alter(altered, Scene(SHAPE, 4), torch.Generator().manual_seed(3))
    assert torch.equal(before, torch.get_rng_state())
    (ours, _), (theirs, _) = two_linears(altered, SHAPE), two_linears(honest, SHAPE)
    assert torch.equal(ours.weight[2:], theirs.weight[2:])
    assert not torch.equal(ours.weight[:2], theirs.weight[:2])


def test_a_ramp_needs_a_block_of_its_own():
    with pytest.raises(ConfigError, match=r"got where=first\. Use where=inserted or form=ladder"):
        Imprint(form="sparse", where="first")


def test_an_update_of_the_honest_model_is_refused():
    network = create_model("lenet-dlg", SHAPE, 4, 0).eval()
    threat = ThreatModel.of("num-examples", "alters-model")
    seen = observe(network, [batch(photographs(2, 5))], threat=threat, num_classes=4)
    with pytest.raises(
        ConfigError, match=r"must hold the change of inserted.rows.weight.*what the attack's alter gives"
    ):
        run(Imprint(), seen)


def test_quantiles_split_numbers_evenly():
    answers = torch.randn(4000, generator=torch.Generator().manual_seed(0)).double() * 2 + 1
    for kind in ("normal", "empirical"):
        counts = torch.bucketize(answers, quantiles(answers, 8, kind)).bincount(minlength=9)
        assert counts[0] == 0
        assert (counts[1:] - 500).abs().max() < 100
    wide = quantiles(answers, 4, "laplace")
    scale = float(answers.std()) / 2**0.5
    assert wide[2] == pytest.approx(float(answers.mean()))
    assert float(wide[3] - wide[2]) == pytest.approx(scale * 0.6931, rel=1e-3)
    assert float(quantiles(answers, 4, "normal")[3]) == pytest.approx(
        NormalDist(float(answers.mean()), float(answers.std())).inv_cdf(0.75)
    )


def test_empirical_bins_need_public_images():
    with pytest.raises(ConfigError, match=r"needs at least 20 public images.*Add public-data to --knows"):
        look(Imprint(distribution="empirical"), [photographs(2, 5)])


@pytest.mark.parametrize(
    "bad",
    [
        {"bins": 1},
        {"form": "x"},
        {"query": "x"},
        {"mode": -1},
        {"distribution": "x"},
        {"gain": 0.0},
        {"where": "x"},
        {"shift": 0.0},
    ],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        Imprint(**bad)
