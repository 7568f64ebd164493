import pytest
import torch

from gradveil.attacks.trap_weights import TrapWeights, trap_rows
from gradveil.defences import build_defence
from gradveil.errors import ConfigError
from tests.attacks.scene import run
from tests.attacks.test_imprint import SHAPE, look, photographs, share

FAST = TrapWeights(rows=400)


def test_rows_are_half_negative_and_half_slightly_smaller():
    rows = trap_rows(50, 101, 0.5, 0.9, torch.Generator().manual_seed(0))
    assert ((rows < 0).sum(1) == 50).all()
    assert ((rows > 0).sum(1) == 50).all()
    for row in rows:
        assert torch.allclose(row[row > 0].sort().values, 0.9 * (-row[row < 0]).sort().values)
    assert rows[rows < 0].square().mean().sqrt() == pytest.approx(0.5, rel=0.05)
    assert not torch.equal(rows[0] < 0, rows[1] < 0)


def test_a_smaller_scale_lets_fewer_images_pass():
    images = photographs(50, 5).flatten(1)
    passed = [
        float((images @ trap_rows(200, images.shape[1], 0.5, scale, torch.Generator().manual_seed(0)).T > 0).sum())
        for scale in (1.0, 0.95, 0.9)
    ]
    assert passed[0] > 1.5 * passed[1] > 2 * passed[2]


def test_single_images_are_read_exactly_and_distinguished_from_mixtures():
    truth = photographs(12, 5)
    found, result = share(FAST, truth, look(FAST, [truth]))
    assert found >= 0.5
    assert f"{round(found * 12)} surely single ones; the others may be mixtures" in result.why[0]
    kept = result.images[0][result.images[0].flatten(1).isfinite().all(1)]
    distances = torch.pdist(kept.flatten(1)) / (SHAPE[0] * SHAPE[1] * SHAPE[2]) ** 0.5
    assert distances.min() > 0.005


def test_the_first_layer_of_a_perceptron_can_be_used():
    attack, truth = TrapWeights(where="first"), photographs(6, 5)
    assert share(attack, truth, look(attack, [truth], "mlp:hidden=400"))[0] >= 0.5


@pytest.mark.parametrize(("where", "model"), [("inserted", "lenet-dlg"), ("first", "mlp:hidden=400")])
def test_noise_hides_faint_rows_only(where, model):
    truth, noise = photographs(6, 5), build_defence("gaussian:std=0.5,where=gradient")
    faint, usual = (
        share(attack, truth, look(attack, [truth], model, defence=noise), above=30)[0]
        for attack in (TrapWeights(rows=400, gain=1.0, where=where), TrapWeights(rows=400, where=where))
    )
    assert faint == 0
    assert usual >= 0.5


def test_a_batch_of_one_needs_one_open_row():
    truth = photographs(1, 5)
    found, result = share(FAST, truth, look(FAST, [truth]))
    assert found == 1
    assert result.why == ("",)


def test_images_that_activate_no_row_have_no_guess():
    attack = TrapWeights(rows=20, scale=0.2)
    seen = look(attack, [photographs(2, 5)])
    found = run(attack, seen)
    assert found.images.isnan().all()
    assert not found.converged.any()
    assert "0 guesses for 2 images" in found.why[0]


@pytest.mark.parametrize(
    "bad", [{"rows": 0}, {"sigma": 0.0}, {"scale": 0.0}, {"gain": 0.0}, {"where": "x"}, {"shift": 0.0}]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        TrapWeights(**bad)
