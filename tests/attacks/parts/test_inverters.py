"""Inverters learn the way back: exactly where it is linear, better than guessing where it is not."""

import pytest
import torch

from gradveil.attacks.parts.inversion_examples import Examples
from gradveil.attacks.parts.inverters import SketchFeatures, learn, load_inverter, matched_error, save_inverter
from gradveil.errors import DataError


def examples(count=200, images=1, classes=3, seed=0):
    """Return examples whose sketch is an orthogonal mixture of their pixels."""
    rng = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(images * 16, images * 16, generator=torch.Generator().manual_seed(9))).Q
    pictures = torch.rand(count, images, 1, 4, 4, generator=rng)
    rows = pictures.flatten(1) @ basis
    labels = torch.arange(count * images).view(count, images) % classes
    return Examples({"w": rows[:, :5], "b": rows[:, 5:]}, pictures, labels, torch.arange(count) < 40)


@pytest.mark.parametrize("learner", ["kernel", "network"])
def test_a_learned_inverter_beats_the_mean_image_on_new_images(learner):
    inverter = learn(examples(400), 0, learner, hidden=64, steps=600, seed=0)
    assert inverter.error < 0.3 * inverter.blind
    new = examples(20, seed=5)
    guess = inverter(new.sketches, None)
    assert guess.shape == (20, 16)
    assert float((guess - new.images.flatten(1)).square().mean()) < 0.4 * inverter.blind


def test_known_labels_are_used():
    """The sketch tells nothing here, the label everything."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (300, 1), generator=rng)
    pictures = (labels.float() / 3).view(-1, 1, 1, 1, 1).expand(-1, 1, 1, 4, 4).contiguous()
    noise = {"w": torch.randn(300, 8, generator=rng)}
    own = Examples(noise, pictures, labels, torch.arange(300) < 60)
    knowing, ignorant = (learn(own, classes, "kernel", 1, 1, 0) for classes in (3, 0))
    assert knowing.error < 0.05 * ignorant.error


def test_guesses_do_not_depend_on_the_length_of_an_update():
    inverter, new = learn(examples(), 0, "kernel", 1, 1, 0), examples(5, seed=3)
    longer = {name: rows * 7 for name, rows in new.sketches.items()}
    assert torch.allclose(inverter(longer, None), inverter(new.sketches, None), atol=1e-4)


def test_even_features_weigh_all_tensors_alike():
    parts = {"large": torch.randn(50, 4) * 100, "small": torch.randn(50, 4) / 100}
    even, plain = (SketchFeatures.of(parts, 0, even=flag) for flag in (True, False))
    assert even(parts, None)[:, 4:].norm() > 0.3 * even(parts, None)[:, :4].norm()
    assert plain(parts, None)[:, 4:].norm() < 0.01 * plain(parts, None)[:, :4].norm()


def test_batches_are_compared_in_the_order_that_fits_best():
    truth = torch.rand(6, 3, 10)
    shuffled = truth[:, [2, 0, 1]]
    assert matched_error(shuffled, truth).max() < 1e-12
    assert matched_error(truth[:, :1], truth[:, 1:2]).min() > 0
    guess = torch.zeros(6, 3, 10, requires_grad=True)
    matched_error(guess, truth).sum().backward()
    assert guess.grad is not None
    assert guess.grad.abs().sum() > 0


@pytest.mark.parametrize("learner", ["kernel", "network"])
def test_a_saved_inverter_answers_the_same(tmp_path, learner):
    inverter, new = learn(examples(), 3, learner, hidden=8, steps=5, seed=0), examples(4, seed=2)
    save_inverter(tmp_path / "x.safetensors", inverter)
    loaded = load_inverter(tmp_path / "x.safetensors")
    assert torch.equal(loaded(new.sketches, new.labels), inverter(new.sketches, new.labels))
    assert (loaded.error, loaded.blind) == (inverter.error, inverter.blind)
    (tmp_path / "y.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError):
        load_inverter(tmp_path / "y.safetensors")
