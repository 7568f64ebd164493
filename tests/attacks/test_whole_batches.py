"""What attacks on whole batches make of a known defence: cpa and spear."""

import pytest
import torch

from gradveil.attacks import build_attack
from gradveil.attacks.parts.undoing import COMPLETED, CUT_ANYWAY, completed_weight
from gradveil.attacks.whole_batches import WITHOUT
from gradveil.defences import build_defence
from gradveil.metrics import align
from gradveil.models import Normalisation, create_model
from gradveil.threat import Knowledge, ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.leaves import leaves
from tests.attacks.scene import psnr, run

ATTACKS = ("cpa", "spear:restarts=256")
COUNT = 8


def both(attack, defence, marked=False, model="mlp:hidden=100/60"):
    """Return the PSNR of each image for the plain attacker and for one who knows the defence, and both results."""
    truth = leaves(COUNT)
    network = create_model(model, (1, 16, 16), 4, 0, Normalisation((0.4,), (0.2,))).eval()
    private = [Batch(truth, torch.arange(COUNT) % 4, torch.full((COUNT,), marked))]
    threat = ThreatModel.of("num-examples", "defence")
    seen = observe(network, private, threat=threat, num_classes=4, defence=build_defence(defence))
    results = [run(build_attack(attack), one) for one in (seen.without(Knowledge.DEFENCE), seen)]
    closeness = [psnr(truth, align(truth, result.images[0])).nan_to_num(0.0) for result in results]
    return *closeness, *results


@pytest.mark.parametrize("attack", ATTACKS)
def test_removed_entries_are_completed_before_images_are_told_apart(attack):
    plain, known, _, result = both(attack, "prune:fraction=0.5")
    assert result.answers == (COMPLETED,)
    assert known.mean() > 60 > plain.mean() + 20


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("defence", ["gaussian:std=1e-5,where=gradient", "quantise:bits=8", "clip:norm=0.1"])
def test_a_row_says_that_known_noise_rounding_and_scales_add_nothing(attack, defence):
    plain, known, before, after = both(attack, defence)
    assert torch.equal(plain, known)
    assert torch.equal(before.converged, after.converged)
    assert after.why[0].endswith(f"as the plain attack: knowing {defence.partition(':')[0]} {CUT_ANYWAY}")
    assert not any(after.answers)


@pytest.mark.parametrize("attack", ATTACKS)
def test_concealed_samples_are_found_beside_the_images_and_left_out(attack):
    plain, known, _, result = both(attack, "dcs2:steps=20,start=noise", marked=True)
    assert result.answers == (WITHOUT,)
    assert known.mean() > plain.mean() + 5


def test_nothing_is_said_of_a_defence_that_a_decoder_answers():
    result = both("cpa", "mixup:k=2")[3]
    assert not any("as the plain attack" in why for why in result.why)


def test_the_next_layers_removed_entries_are_completed_too():
    truth = leaves(3)
    network = create_model("mlp:hidden=40/30,activation=tanh", (1, 16, 16), 4, 0).eval()
    private, threat = [Batch(truth, torch.arange(3), torch.zeros(3) > 0)], ThreatModel.of("num-examples", "defence")
    pruned, whole = (
        observe(network, private, threat=threat, num_classes=4, defence=build_defence(spec))
        for spec in ("prune:fraction=0.5", "none")
    )
    wanted, name = whole.updates["linear2.weight"].double(), "linear2.weight"
    found = completed_weight(pruned, name, 3)
    there = found != 0  # a row of which too little is left stays unknown
    assert there.sum() > 1.5 * (pruned.updates[name] != 0).sum()
    assert torch.allclose(found[there], wanted[there], rtol=1e-3, atol=1e-6)
    assert torch.equal(completed_weight(pruned.without(Knowledge.DEFENCE), name, 3), pruned.updates[name].double())
    assert completed_weight(pruned, "no.weight", 3) is None


@pytest.mark.parametrize("attack", ATTACKS)
def test_they_have_a_second_row_for_attackers_who_know_the_defence(attack):
    assert build_attack(attack).adapts_to(build_defence("prune"))
    assert not build_attack(attack).adapts_to(build_defence("none"))
