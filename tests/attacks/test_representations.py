import pytest
import torch

from gradveil.attacks.parts.representations import class_representations
from gradveil.attacks.representations import Representations
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.models import create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.scene import psnr, run, scene

FAST = Representations(iterations=400, tv=1e-5)


def smooth(count, seed=1, side=12):
    coarse = torch.rand(count, 1, 3, 3, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")


def look(labels, model="mlp:hidden=40/20", grants=("num-examples",), images=None, **how):
    images = smooth(len(labels)) if images is None else images
    network = create_model(model, (1, 12, 12), 6, 0).eval()
    private = [Batch(images, torch.tensor(labels), torch.zeros(len(labels)) > 0)]
    return images, observe(network, private, threat=ThreatModel.of(*grants), num_classes=6, **how)


def test_it_beats_a_blank_guess_and_finds_the_class():
    truth, labels, seen = scene(targets=3, grants=("num-examples",))
    found = run(Representations(iterations=1000, tv=1e-5), seen)
    assert torch.equal(found.labels, labels)
    blank = psnr(truth.flatten(0, 1), torch.full_like(truth, 0.5).flatten(0, 1))
    assert (psnr(truth.flatten(0, 1), found.images.flatten(0, 1)) > blank + 6).all()
    assert found.converged.all()
    assert not run(Representations(iterations=1), seen).converged.any()


def test_a_perceptron_reveals_its_image_up_to_a_factor():
    images, seen = look([4])
    found = run(Representations(iterations=400, tv=0.0), seen)
    assert torch.nn.functional.cosine_similarity(found.images.flatten(), images.flatten(), dim=0) > 0.999


def test_several_images_give_one_guess_per_class_and_none_for_the_rest():
    alike = smooth(2)[[0, 1, 0, 1, 0, 1]]  # all images of a class the same
    _, seen = look([1, 4, 1, 4, 1, 4], images=alike)
    found = run(FAST, seen)
    assert found.labels.tolist() == [[1, 4, -1, -1, -1, -1]]
    assert found.images[0, :2].isfinite().all()
    assert found.images[0, 2:].isnan().all()
    assert found.loss.isfinite().all()


def test_several_local_steps_need_not_be_known():
    _, seen = look([1, 4, 1, 4], protocol=Protocol(LocalSettings(epochs=2, batch_size=2), 0.01))
    assert run(FAST, seen).labels.tolist() == [[1, 4, -1, -1]]


def test_granted_labels_are_taken():
    _, seen = look([2, 2, 5], grants=("num-examples", "labels"))
    assert run(FAST, seen).labels.tolist() == [[2, 5, -1]]


def test_more_classes_than_images_leave_the_strongest():
    _, seen = look([3])
    seen.updates["linear.bias"][0] = torch.tensor([0.0, 1.0, 0.0, 0.9, 0.0, 0.0])
    seen.updates["linear.weight"][0, 1] = 1e-3
    assert run(FAST, seen).labels.tolist() == [[3]]


def test_a_later_layer_can_be_chosen_and_an_unknown_one_is_refused():
    _, seen = look([3])
    last = run(Representations(iterations=300, layer="linear", tv=0.0), seen)
    network_sees = class_representations(seen)["linear"][0, 3]
    hidden = seen.network[:-1](last.images[0]).detach()[0]
    assert torch.nn.functional.cosine_similarity(hidden, network_sees, dim=0) > 0.99
    with pytest.raises(UnknownNameError, match="linear, linear1, linear2"):
        run(Representations(iterations=1, layer="fc"), seen)


def test_the_best_restart_of_each_class_is_kept_and_iterates_end_there():
    _, seen = look([1, 4])
    one = run(Representations(iterations=20), seen)
    many = run(Representations(iterations=20, restarts=4, keep=4), seen)
    assert (many.loss <= one.loss + 1e-4).all()
    assert many.iterates.shape == (5, *many.images.shape)
    assert torch.equal(many.iterates[-1], many.images)


def test_targets_without_a_class_have_no_guess_and_say_why():
    _, seen = look([3])
    seen.updates["linear.bias"].fill_(-1.0)
    found = run(FAST, seen)
    assert found.images.isnan().all()
    assert found.labels.tolist() == [[-1]]
    assert not found.converged.any()
    assert found.why == ("no class was found in the last layer",)


def test_chunks_give_an_image_for_every_class(monkeypatch):
    _, seen = look([1, 4])
    monkeypatch.setattr("gradveil.attacks.parts.feature_inversion._TOGETHER", 1)
    found = run(Representations(iterations=3, keep=1), seen)
    assert found.images.isfinite().all()
    assert found.iterates.shape == (2, 1, 2, 1, 12, 12)


@pytest.mark.parametrize(
    "bad", [{"iterations": 0}, {"lr": 0.0}, {"tv": -1.0}, {"restarts": 0}, {"keep": -1}, {"rows": "x"}]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        Representations(**bad)
