"""What an analytic attacker who knows the defence undoes: removed entries, noise, a scale, a concealed sample."""

import pytest
import torch

from gradveil.attacks import build_attack
from gradveil.attacks.parts.undoing import COMPLETED, LOW_RANK, SEPARATED, undone_rows
from gradveil.attacks.whole_batches import WITHOUT
from gradveil.defences import build_defence
from gradveil.threat import Knowledge
from tests.attacks.scene import psnr, run, scene

GRANTS = ("num-examples", "labels", "defence")


def both(attack, defence, model, size=1, **how):
    """Return the PSNR (T,) of the plain attacker and of one who knows the defence, and the latter's result."""
    truth, _, seen = scene(targets=3, defence=build_defence(defence), grants=GRANTS, model=model, size=size, **how)
    plain = run(build_attack(attack), seen.without(Knowledge.DEFENCE))
    known = run(build_attack(attack), seen)
    assert not any(plain.answers)
    return *(_closeness(truth, result) for result in (plain, known)), known


def _closeness(truth, result):
    guess = torch.where(result.images.isfinite(), result.images, torch.full_like(truth, 0.5))
    return psnr(truth.flatten(0, 1), guess.flatten(0, 1))


def test_removed_entries_follow_from_other_rows():
    """Of one image, the strongest row keeps what any row keeps; rows of several images keep different pixels."""
    plain, known, result = both("linear", "prune:fraction=0.5", "mlp:hidden=32,activation=relu", size=2)
    assert result.answers == (COMPLETED,) * 3
    assert known.mean() > plain.mean() + 5


def test_noise_is_averaged_over_the_rows_of_a_layer():
    """The oracle is the likeliest direction of a rank-one matrix: the first right singular vector."""
    plain, known, result = both("linear", "gaussian:std=0.003", "mlp:hidden=64")
    assert result.answers == (LOW_RANK,) * 3
    assert (known > plain + 3).all()
    _, _, seen = scene(targets=3, defence=build_defence("gaussian:std=0.003"), grants=GRANTS, model="mlp:hidden=64")
    name = _first(seen)
    rows = undone_rows(seen, name, 1).rows
    noisy = torch.cat([seen.updates[f"{name}.weight"][0], seen.updates[f"{name}.bias"][0][:, None]], 1).double()
    direction = torch.linalg.svd(noisy).Vh[0]
    strongest = rows.bias[0].abs().argmax()
    ratio = rows.weight[0, strongest] / rows.bias[0, strongest]
    assert torch.allclose(ratio, direction[:-1] / direction[-1], rtol=1e-4, atol=1e-5)


def _first(seen):
    return next(iter(seen.updates)).removesuffix(".weight")


@pytest.mark.parametrize("defence", ["clip:norm=0.1", "soteria"])
def test_a_row_says_if_knowing_changes_nothing(defence):
    plain, known, result = both("linear", defence, "mlp:hidden=16")
    assert torch.equal(plain, known)
    assert all(why.startswith(f"as the plain attack: knowing {defence.partition(':')[0]}") for why in result.why)


def test_a_clipped_scale_is_undone():
    """The quotients do not depend on it, but softmax and label agree with the last layer only at the true scale."""
    plain, known, result = both("r-gap", "clip:norm=0.01", "lenet-dlg", side=12)
    assert result.answers == ("scale undone",) * 3
    assert (known >= plain - 0.1).all()
    assert float(result.loss.max()) < 1e-2


def test_equations_of_removed_entries_are_left_out():
    plain, known, result = both("r-gap", "prune:fraction=0.2", "lenet-dlg", side=28)
    assert result.answers == (COMPLETED,) * 3
    assert known.mean() > plain.mean() + 3


def test_spear_finds_concealed_samples_and_leaves_them_out():
    defence = "dcs2:steps=20,start=noise"
    plain, known, result = both("spear", defence, "mlp:hidden=64/48,activation=relu", marked=True)
    assert result.answers == (WITHOUT,) * 3
    assert known.mean() > plain.mean() + 5


def test_a_concealed_samples_part_is_separated():
    _, known, result = both("linear", "dcs2:steps=20,start=noise", "logistic", marked=True)
    split = [answer == SEPARATED for answer in result.answers]
    assert any(split)
    for row, (answer, why) in enumerate(zip(result.answers, result.why, strict=True)):
        assert (answer == SEPARATED and known[row] > 40) or "could not be separated" in why


@pytest.mark.parametrize("attack", ["linear", "r-gap", "imprint", "trap-weights", "spear"])
def test_analytic_attacks_have_an_adaptive_row(attack):
    assert build_attack(attack).adapts_to(build_defence("prune"))
    assert not build_attack(attack).adapts_to(build_defence("none"))
