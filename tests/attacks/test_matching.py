import pytest
import torch

from gradveil.attacks import matching
from gradveil.attacks.dlg import Dlg
from gradveil.attacks.gs import Gs
from gradveil.attacks.idlg import Idlg
from gradveil.errors import ConfigError
from gradveil.metrics import align
from gradveil.models import Normalisation, create_model
from gradveil.observe import observe
from gradveil.threat import ThreatModel
from gradveil.types import Batch


def scene(targets=2, size=1, grants=("num-examples", "labels"), normalisation=None, side=8):
    """Small smooth pictures, a network that leaks, and what a server sees."""
    rng = torch.Generator().manual_seed(1)
    coarse = torch.rand(targets * size, 1, 3, 3, generator=rng)
    truth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear").view(
        targets, size, 1, side, side
    )
    labels = torch.randint(0, 4, (targets, size), generator=rng)
    network = create_model("lenet-dlg", (1, side, side), 4, 0, normalisation).eval()
    private = [Batch(truth[t], labels[t], torch.zeros(size) > 0) for t in range(targets)]
    return truth, labels, observe(network, private, threat=ThreatModel.of(*grants), num_classes=4)


def psnr(truth, guess):
    mse = (truth - guess).square().flatten(1).mean(1)
    return -10 * mse.log10()


def run(attack, seen, seed=0):
    return attack(seen, torch.Generator().manual_seed(seed))


def test_idlg_finds_pictures_and_labels():
    truth, labels, seen = scene(grants=("num-examples",))
    result = run(Idlg(iterations=40, restarts=2), seen)
    assert torch.equal(result.labels, labels)
    assert psnr(truth.flatten(0, 1), result.images.flatten(0, 1)).min() > 30
    assert result.converged.all()


def test_dlg_finds_pictures_and_labels_together():
    truth, labels, seen = scene(targets=1, grants=("num-examples",))
    result = run(Dlg(iterations=60, restarts=4), seen)
    assert torch.equal(result.labels, labels)
    assert psnr(truth.flatten(0, 1), result.images.flatten(0, 1)).min() > 30


@pytest.mark.parametrize("normalisation", [None, Normalisation((0.3,), (0.5,))])
def test_gs_comes_close_with_and_without_normalisation(normalisation):
    truth, _, seen = scene(normalisation=normalisation)
    result = run(Gs(iterations=500), seen)
    start = run(Gs(iterations=1), seen)
    close = psnr(truth.flatten(0, 1), result.images.flatten(0, 1))
    assert close.min() > 17
    assert (close > psnr(truth.flatten(0, 1), start.images.flatten(0, 1)) + 5).all()


def test_gs_on_a_batch():
    truth, _, seen = scene(targets=1, size=2)
    result = run(Gs(iterations=800), seen)
    assert psnr(truth[0], align(truth[0], result.images[0])).mean() > 14


def test_targets_do_not_disturb_each_other():
    _, _, seen = scene(targets=3)
    together = run(Gs(iterations=5, chunk=3), seen)
    apart = run(Gs(iterations=5, chunk=1), seen)
    assert torch.allclose(together.images, apart.images, atol=1e-4)


def test_the_best_restart_by_the_attackers_own_loss_is_kept(monkeypatch):
    _, _, seen = scene(targets=2)
    losses = torch.tensor([3.0, 1.0, 2.0, 0.5, 4.0, 9.0])  # three restarts of each of two targets

    def search(seen, wanted, batch_size, labels, search, rng):
        images = torch.arange(6.0).view(6, 1, 1, 1, 1).expand(6, 1, 1, 8, 8) / 10
        return images, torch.zeros(6, 1, 4), losses, images.new_empty(0, 6, 1, 1, 8, 8)

    monkeypatch.setattr(matching, "_search", search)
    result = run(Idlg(restarts=3), seen)
    assert result.loss.tolist() == [1.0, 0.5]
    assert result.images[:, 0, 0, 0, 0].tolist() == pytest.approx([0.1, 0.3])


def test_restarts_begin_at_different_points():
    _, _, seen = scene(targets=1)
    guesses = {run(Idlg(iterations=1), seen, seed).loss.item() for seed in range(3)}
    assert len(guesses) == 3


def test_iterates_are_kept_for_the_report():
    _, _, seen = scene()
    result = run(Gs(iterations=8, keep=4), seen)
    assert result.iterates.shape == (5, *result.images.shape)
    assert result.iterates.min() >= 0
    assert result.iterates.max() <= 1


def test_an_update_that_says_nothing_is_named_and_the_others_go_on():
    from dataclasses import replace

    truth, _, seen = scene(targets=3)
    spoiled = {name: tensor.clone() for name, tensor in seen.updates.items()}
    for tensor in spoiled.values():
        tensor[0] = 0
        tensor[1] = torch.nan
    result = run(Idlg(iterations=40), replace(seen, updates=spoiled))
    assert [reason.split(":")[0] for reason in result.why[:2]] == ["gradient is zero", "update holds NaN or infinity"]
    assert result.images[:2].isnan().all()
    assert not result.converged[:2].any()
    assert psnr(truth[2], result.images[2]).min() > 30


@pytest.mark.parametrize("bad", [{"iterations": 0}, {"lr": 0.0}, {"restarts": 0}, {"chunk": 0}, {"keep": -1}])
@pytest.mark.parametrize("attack", [Gs, Dlg])
def test_bad_settings(attack, bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        attack(**bad)
