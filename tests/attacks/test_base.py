import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from gradveil.attacks import build_attack
from gradveil.attacks.gs import Gs
from gradveil.attacks.idlg import Idlg
from gradveil.attacks.labels import Labels
from gradveil.defences import Countermove, build_defence
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.federated.protocol import Protocol
from gradveil.metrics import align
from tests.attacks.scene import psnr, run, scene


def test_the_base_of_all_attacks_does_not_import_the_search():
    code = "import sys, gradveil.attacks; print(*[name for name in sys.modules if name.startswith('gradveil.attacks')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    parts = {name.removeprefix("gradveil.attacks.parts.") for name in found if ".parts." in name}
    assert parts == {"countermoves", "stages"}


def test_an_update_without_information_is_reported_and_the_others_are_attacked():
    truth, _, seen = scene(targets=3)
    spoiled = {name: tensor.clone() for name, tensor in seen.updates.items()}
    for tensor in spoiled.values():
        tensor[0] = 0
        tensor[1] = torch.nan
    result = run(Idlg(iterations=40), replace(seen, updates=spoiled))
    assert [reason.split(":")[0] for reason in result.why[:2]] == ["gradient is zero", "update holds NaN or infinity"]
    assert result.images[:2].isnan().all()
    assert not result.converged[:2].any()
    assert (result.labels[:2] == -1).all()
    assert psnr(truth[2], result.images[2]).min() > 30


@pytest.mark.parametrize("granted", [("num-examples",), ()])
def test_an_attack_does_not_run_on_updates_that_hold_nothing(granted, monkeypatch):
    _, _, seen = scene(targets=2, size=3, grants=granted)
    spoiled = {name: torch.full_like(tensor, torch.nan) for name, tensor in seen.updates.items()}
    monkeypatch.setattr(Labels, "run", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(Labels, "needs", frozenset())
    result = run(Labels(), replace(seen, updates=spoiled))
    assert result.why == ("update holds NaN or infinity: nothing to match",) * 2
    assert result.images.shape[:2] == result.labels.shape == (2, 3 if granted else 1)
    assert result.images.isnan().all()
    assert not result.converged.any()


def test_of_several_rounds_the_least_loss_is_kept_for_each_client():
    truth, _, seen = scene(targets=2, protocol=Protocol(rounds=3))
    assert seen.num_targets == 6
    spoiled = {name: tensor.clone() for name, tensor in seen.updates.items()}
    for tensor in spoiled.values():
        tensor[[0, 2, 3, 4]] = torch.randn(tensor[:4].shape, generator=torch.Generator().manual_seed(0))
    result = run(Gs(iterations=500), replace(seen, updates=spoiled))
    assert result.images.shape == truth.shape
    assert psnr(truth.flatten(0, 1), result.images.flatten(0, 1)).min() > 14
    assert len(result.why) == 2


def test_known_mixtures_of_labels_are_matched_and_unknown_ones_searched():
    defence = build_defence("mixup:k=2")
    for grants in (("num-examples", "labels"), ("num-examples", "defence")):
        _, _, seen = scene(targets=1, size=2, grants=(*grants, "encodings"), defence=defence)
        found = run(Gs(iterations=500, adapt="" if "labels" in grants else "unmix"), seen)
        shown = seen.encodings.images
        assert found.labels.shape == (1, 2)
        assert psnr(shown, align(shown, found.images[0])).mean() > 14


def test_missing_knowledge_is_named_with_the_options_to_type():
    _, _, seen = scene(grants=("labels", "num-examples"))
    with pytest.raises(
        ThreatModelError, match=r"Attack 'ggl' needs public-data; add --knows labels,num-examples,public-data\.$"
    ):
        run(build_attack("ggl"), seen)
    with pytest.raises(
        ThreatModelError, match=r"needs defence, encodings, public-data; add --knows \S*public-data and --adaptive\.$"
    ):
        run(build_attack("unmix"), seen)


def test_only_a_decoder_can_be_a_stage_of_a_countermove(monkeypatch):
    _, _, seen = scene(grants=("num-examples", "defence"), size=2, defence=build_defence("mixup:k=2"))
    monkeypatch.setattr(type(seen.defence), "adaptive", lambda *_: {"odd": Countermove(decode=("gs",))})
    with pytest.raises(ConfigError, match="must decode by a decoder, got the attack 'gs'"):
        run(Gs(iterations=1), seen)
