"""Learned inversion meets every defence, also one that names no countermove."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gradveil.attacks import build_attack
from gradveil.audits import audit
from gradveil.audits.cells import check
from gradveil.audits.settings import make_audit_settings
from gradveil.data import load_dataset
from gradveil.defences import build_defence
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.registry import names
from gradveil.scratch import scratch_in
from gradveil.threat import Knowledge, PublicKnowledge, ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch

MINE = '''
"""A defence of a user's own, with no countermove."""
from dataclasses import dataclass, replace
from gradveil.defences import Defence

@dataclass(frozen=True)
class Backwards(Defence):
    """Send the update with all signs turned and the largest tensor reversed."""

    def on_update(self, update, client):
        """Turn it round."""
        return update.map(lambda tensor: -tensor.flip(0))
'''


def blobs(count, seed):
    """Return images with one bright square each, whose place is all that there is to learn."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.zeros(count, 1, 8, 8)
    for picture, (row, column) in zip(images, torch.randint(6, (count, 2), generator=rng).tolist(), strict=True):
        picture[:, row : row + 3, column : column + 3] = 1
    return Batch(images, torch.randint(3, (count,), generator=rng), torch.zeros(count).bool())


def watched(spec, *knows, images=1, targets=6):
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.Sigmoid(), torch.nn.Flatten(), torch.nn.Linear(144, 3)
    )
    whole = blobs(images * targets, 5)
    private = [whole[slice(start, start + images)] for start in range(0, images * targets, images)]
    threat = ThreatModel.of("num-examples", "public-data", "labels", *knows)
    seen = observe(
        network, private, threat=threat, num_classes=3, defence=build_defence(spec),
        public=PublicKnowledge(blobs(200, 1)),
    )  # fmt: skip
    return seen, torch.stack([batch.images for batch in private])


def error(result, truth):
    return float((result.images - truth).square().mean())


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path / 'mine.py'}:Backwards"


def test_knowing_a_defence_that_names_no_countermove_brings_the_images_back(mine):
    attack = build_attack("lti:samples=300")
    seen, truth = watched(mine, "defence")
    blind = float((truth.mean((0, 1)) - truth).square().mean())
    plain, known = (attack(one, torch.Generator().manual_seed(0)) for one in (seen.without(Knowledge.DEFENCE), seen))
    assert error(known, truth) < 0.5 * blind
    assert error(known, truth) < 0.6 * error(plain, truth)
    assert bool(known.converged.all())
    assert "300 played updates" in known.why[0]


def test_batches_come_back_in_some_order():
    attack = build_attack("lti:samples=300")
    seen, truth = watched("none", images=2, targets=3)
    result = attack(seen, torch.Generator().manual_seed(0))
    assert result.images.shape == truth.shape
    best = torch.minimum(
        (result.images - truth).square().mean((1, 2, 3, 4)), (result.images.flip(1) - truth).square().mean((1, 2, 3, 4))
    )
    assert float(best.mean()) < 0.8 * float((truth.mean((0, 1)) - truth).square().mean())


def test_it_adapts_to_every_defence_that_does_something(mine):
    attack = build_attack("lti")
    for name in names("defences"):
        if name != "chain":
            assert attack.adapts_to(build_defence(name)) == (name != "none")
    assert attack.adapts_to(build_defence(mine))
    assert not build_attack("gs").adapts_to(build_defence(mine))


def test_the_inverter_is_learned_once_per_scratch_folder(tmp_path):
    attack, (seen, _) = build_attack("lti:samples=60"), watched("none")
    with scratch_in(tmp_path):
        one = attack(seen, torch.Generator().manual_seed(0))
        (kept,) = tmp_path.glob("*")
        assert kept.name.startswith("inverter-")
        before = kept.stat().st_mtime_ns
        two = attack(seen, torch.Generator().manual_seed(0))
        assert kept.stat().st_mtime_ns == before
    assert torch.equal(one.images, two.images)


def test_a_round_that_cannot_be_played_is_named():
    from dataclasses import replace

    seen, _ = watched("none")
    result = build_attack("lti")(replace(seen, script=None), torch.Generator())
    assert result.images.isnan().all()
    assert all("can't be played" in why for why in result.why)
    with pytest.raises(ThreatModelError, match="public-data"):
        build_attack("lti")(seen.without(Knowledge.PUBLIC_DATA), torch.Generator())
    with pytest.raises(ConfigError, match="samples"):
        build_attack("lti:samples=3")


def test_updates_of_more_images_than_it_learns_get_no_guess_and_the_reason():
    seen, _ = watched("none", images=65, targets=1)
    result = build_attack("lti:samples=20")(seen, torch.Generator())
    assert result.images.isnan().all()
    assert result.why == ("learned inversion can search at most 64 images per update, got 65",)


def test_it_can_be_where_a_search_begins():
    seen, truth = watched("none")
    learned, noise = (
        build_attack(f"gs:iterations=1,lr=1e-6,start={start}")(seen, torch.Generator().manual_seed(0))
        for start in ("lti", "normal")
    )
    assert error(learned, truth) < 0.5 * error(noise, truth)
    assert Knowledge.PUBLIC_DATA in build_attack("gs:start=lti").needs


def test_an_audit_has_an_adaptive_row_for_ones_own_defence(tmp_path, mine):
    settings = make_audit_settings(
        {
            "dataset": "mnist-5k", "model": "logistic", "defences": mine, "attacks": "lti:samples=40", "adaptive": True,
            "rounds": 2, "tap": (1,), "targets": 2, "clients": 3, "partition": "iid:images=20",
            "knows": "labels,num-examples,public-data", "metrics": "psnr,ssim",
        }
    )  # fmt: skip
    result = audit(settings, tmp_path / "run", workers=0)
    assert not result.failed
    known = [row for row in result.rows if row.get("adaptive")]
    assert len(known) == 2
    assert all(row["defence"].endswith("mine.py:Backwards") for row in known)
    assert not (tmp_path / "run" / "scratch").exists()


STATEFUL = '''
"""A defence that can't be played without what a client kept from earlier rounds."""
from dataclasses import dataclass
from gradveil.defences import Defence
from gradveil.errors import DefenceError

@dataclass(frozen=True)
class Stateful(Defence):
    """Refuse to play without a key that only real clients have."""

    def on_update(self, update, client):
        """Look for the key."""
        raise DefenceError("Defence 'stateful' needs the key of a client, got none.")
'''


@pytest.mark.parametrize("spec", ["lti:samples=40", "standard:iterations=4,samples=40"])
def test_a_defence_that_cannot_be_played_without_a_clients_state_is_named(spec, tmp_path):
    (tmp_path / "own.py").write_text(STATEFUL)
    seen, _ = watched("none", "defence", targets=2)
    seen._facts[Knowledge.DEFENCE] = build_defence(f"{tmp_path / 'own.py'}:Stateful")
    found = build_attack(spec)(seen, torch.Generator().manual_seed(0))
    assert "can't be played: Defence 'stateful' needs the key" in found.why[0]
    assert bool(found.images.isfinite().all())


def test_knowing_a_defence_that_cannot_be_played_does_not_make_learned_inversion_worse(tmp_path):
    (tmp_path / "own.py").write_text(STATEFUL)
    seen, truth = watched("none", "defence", targets=2)
    attack, blind = build_attack("lti:samples=300"), float((truth.mean((0, 1)) - truth).square().mean())
    seen._facts[Knowledge.DEFENCE] = build_defence(f"{tmp_path / 'own.py'}:Stateful")
    found = attack(seen, torch.Generator().manual_seed(0))
    assert found.why[0].startswith("clients were played without the defence")
    assert "300 played updates" in found.why[0]
    assert error(found, truth) < 0.6 * blind


@pytest.mark.parametrize("spec", ["lti:samples=40", "standard:iterations=4,samples=40", "cpa:iterations=4"])
def test_an_update_with_nan_has_no_guess_and_changes_no_other(spec):
    seen, _ = watched("none", targets=2)
    whole = build_attack(spec)(seen, torch.Generator().manual_seed(0))
    broken = {name: tensor.clone() for name, tensor in seen.updates.items()}
    next(iter(broken.values()))[0].view(-1)[0] = torch.nan
    found = build_attack(spec)(replace(seen, updates=broken), torch.Generator().manual_seed(0))
    assert "NaN" in found.why[0]
    assert found.images[0].isnan().all()
    assert torch.allclose(found.images[1], whole.images[1], equal_nan=True, atol=1e-5)


@pytest.mark.parametrize("spec", ["lti", "gs:start=lti", "standard"])
def test_too_few_public_images_are_named_before_any_work(spec, tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (60, 1, 8, 8), dtype=np.uint8)
    path, labels = tmp_path / "few.npz", np.arange(60) % 3
    np.savez(path, x_train=images[:45], y_train=labels[:45], x_test=images[45:], y_test=labels[45:])
    settings = make_audit_settings({"dataset": str(path), "attacks": spec, "targets": 1})
    if spec == "standard":  # plays what needs fewer
        return check(settings, load_dataset(str(path)))
    with pytest.raises(ConfigError, match=r"needs at least 20 public images.*got 15\. Use a data set"):
        audit(settings, tmp_path / "run", workers=0)
    assert not (tmp_path / "run").exists()
    return None
