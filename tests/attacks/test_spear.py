import pytest
import torch

from gradveil.attacks.spear import Spear
from gradveil.errors import ConfigError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.metrics.matching import align
from gradveil.models import Normalisation, create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.scene import psnr, run


def look(count, model="mlp:hidden=100/60", grants=("num-examples",), targets=1, **how):
    rng = torch.Generator().manual_seed(3)
    truth = torch.rand(targets, count, 1, 12, 12, generator=rng)
    network = create_model(model, (1, 12, 12), 4, 0, Normalisation((0.4,), (0.2,))).eval()
    private = [Batch(some, torch.arange(count) % 4, torch.zeros(count) > 0) for some in truth]
    return truth, observe(network, private, threat=ThreatModel.of(*grants), num_classes=4, **how)


@pytest.mark.parametrize(("way", "count", "model"), [
    ("span", 10, "mlp:hidden=100/60"), ("zeros", 6, "mlp:hidden=100/60"), ("auto", 2, "mlp:hidden=100"),
])  # fmt: skip
@pytest.mark.parametrize("grants", [("num-examples",), ()])
def test_every_image_of_a_batch_is_exact(way, count, model, grants):
    truth, seen = look(count, model, grants, targets=2)
    found = run(Spear(way=way), seen)
    assert found.images.shape == truth.shape
    for target in range(2):
        assert (psnr(truth[target], align(truth[target], found.images[target])) > 60).all()
    assert found.converged.all()
    assert (found.loss < 1e-4).all()
    assert found.why == ("", "")


def test_a_batch_that_is_found_in_part_is_not_called_exact():
    """With one hidden layer only zeros can be used, and they give a part of this batch."""
    truth, seen = look(6, "mlp:hidden=100")
    found = run(Spear(restarts=256), seen)
    assert not (psnr(truth[0], align(truth[0], found.images[0])) > 60).all()
    assert not found.converged.any()
    assert "of 6 images surely exact" in found.why[0]


def test_noise_raises_the_loss_and_nothing_is_called_exact():
    _, seen = look(10)
    rng = torch.Generator().manual_seed(0)
    for tensor in seen.updates.values():
        tensor += 0.01 * torch.randn(tensor.shape, generator=rng)
    found = run(Spear(restarts=128), seen)
    assert not found.converged.any()
    assert (found.loss > 0.05).all()
    assert "images surely exact" in found.why[0]


def test_several_local_steps_are_out_of_reach():
    _, seen = look(8, protocol=Protocol(LocalSettings(epochs=2, batch_size=4), 0.1))
    found = run(Spear(), seen)
    assert found.images.isnan().all()
    assert found.why == ("needs the gradient of a single step, got several local steps",)
    assert "got 3 local steps" in Spear().too_large(8, 3)
    assert not Spear().too_large(8, 1)


@pytest.mark.parametrize(("model", "why"), [
    ("lenet-dlg", "first layer must be a Linear"), ("mlp:activation=sigmoid", "ReLU must follow"),
    ("mlp:hidden=6", r"smaller than the first layer is wide \(6\), got 8"),
])  # fmt: skip
def test_a_network_out_of_reach_is_named_in_the_row(model, why):
    _, seen = look(8, model)
    found = run(Spear(), seen)
    assert found.images.isnan().all()
    assert not found.converged.any()
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found.why[0])


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="restarts must be at least 1"):
        Spear(restarts=0)
    with pytest.raises(ConfigError, match="way"):
        Spear(way="luck")


def test_a_batch_with_an_image_missing_is_not_called_exact_although_its_gradient_is_explained():
    """An image that is there twice adds nothing to the gradient, so one of the two has no guess."""
    truth, seen = look(6)
    twice = torch.cat([truth[0, :5], truth[0, :1]])
    private = [Batch(twice, torch.arange(6) % 5 % 4, torch.zeros(6) > 0)]
    seen = observe(seen.network, private, threat=ThreatModel.of("num-examples"), num_classes=4)
    found = run(Spear(), seen)
    assert (found.loss < 1e-4).all()
    assert found.images[0].isfinite().flatten(1).all(1).sum() == 5
    assert not found.converged.any()
    assert found.why == ("5 of 6 images surely exact; 1 of 6 images do not stand out from noise or rounding",)
