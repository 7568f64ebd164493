import pytest
import torch

from gradveil.attacks import matching
from gradveil.attacks.gs import Gs
from gradveil.attacks.idlg import Idlg
from tests.attacks.scene import run, scene


def test_targets_do_not_disturb_each_other():
    _, _, seen = scene(targets=3)
    together = run(Gs(iterations=5, chunk=3), seen)
    apart = run(Gs(iterations=5, chunk=1), seen)
    assert torch.allclose(together.images, apart.images, atol=1e-4)


def test_the_best_restart_by_the_attackers_own_loss_is_kept(monkeypatch):
    _, _, seen = scene(targets=2)
    losses = torch.tensor([3.0, 1.0, 2.0, 0.5, 4.0, 9.0])  # three restarts of each of two targets

    def search(attack, search, step, task, rng):
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
