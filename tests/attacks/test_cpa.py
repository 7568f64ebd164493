import pytest
import torch

from gradveil.attacks.cpa import Cpa
from gradveil.errors import ConfigError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.metrics import align
from gradveil.metrics.ssim import Ssim
from gradveil.models import Normalisation, create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.leaves import leaves
from tests.attacks.scene import psnr, run

ONLY_NUMBER = ("num-examples",)


def look(count, model="mlp:hidden=80", grants=ONLY_NUMBER, targets=1, channels=1, **how):
    truth = leaves(targets * count, channels=channels).view(targets, count, channels, 16, 16)
    normalisation = Normalisation((0.4,) * channels, (0.2,) * channels)
    network = create_model(model, (channels, 16, 16), 4, 0, normalisation).eval()
    private = [Batch(some, torch.arange(count) % 4, torch.zeros(count) > 0) for some in truth]
    return truth, observe(network, private, threat=ThreatModel.of(*grants), num_classes=4, **how)


def ssim(truth, guess):
    return Ssim()(truth, align(truth, guess))


@pytest.mark.parametrize("grants", [ONLY_NUMBER, ()])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_image_of_a_batch_is_exact_behind_a_relu(grants, channels):
    truth, seen = look(20, grants=grants, targets=2, channels=channels)
    found = run(Cpa(), seen)
    assert found.images.shape == truth.shape
    for target in range(2):
        assert (psnr(truth[target], align(truth[target], found.images[target])) > 60).all()
    assert found.converged.all()
    assert (found.loss < 1e-4).all()
    assert found.why == ("", "")


def test_a_sum_over_clients_is_a_batch():
    truth, seen = look(5, targets=4, protocol=Protocol(aggregation="secure"))
    found = run(Cpa(), seen)
    every = truth.flatten(0, 1)
    assert found.images.shape == (1, *every.shape)
    assert (psnr(every, align(every, found.images[0])) > 60).all()


@pytest.mark.parametrize(
    ("attack", "model"), [(Cpa(relu=False), "mlp:hidden=80"), (Cpa(), "mlp:hidden=80,activation=tanh")]
)
def test_without_relu_images_are_recognisable_and_not_called_exact(attack, model):
    truth, seen = look(20, model)
    found = run(attack, seen)
    assert (ssim(truth[0], found.images[0]) > 0.5).all()
    assert not found.converged.any()
    assert found.why == ("0 of 20 images surely exact",)


def test_the_published_objective_separates_a_small_batch():
    truth, seen = look(4)
    found = run(Cpa(way="published", relu=False, lr=0.01), seen)
    assert (ssim(truth[0], found.images[0]) > 0.5).float().mean() >= 0.5


def test_one_image_is_exact_through_any_activation():
    truth, seen = look(1, "mlp:hidden=8,activation=sigmoid")
    found = run(Cpa(), seen)
    assert psnr(truth[0], found.images[0]) > 60
    assert found.converged.all()


def convolutional():
    """Return a network whose convolution keeps the details of an image, and three Linear layers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(1024, 60)]
        layers += [torch.nn.ReLU(), torch.nn.Linear(60, 30), torch.nn.ReLU(), torch.nn.Linear(30, 4)]
    return torch.nn.Sequential(*layers).eval()


def test_through_a_convolution_features_are_exact_and_images_are_searched():
    truth = leaves(6)
    private = [Batch(truth, torch.arange(6) % 4, torch.zeros(6) > 0)]
    seen = observe(convolutional(), private, threat=ThreatModel.of(*ONLY_NUMBER), num_classes=4)
    found = run(Cpa(iterations=300), seen)
    assert found.why == ("features of 6 of 6 images surely exact; the images were searched",)
    assert (ssim(truth, found.images[0]) > 0.5).all()
    short = run(Cpa(iterations=1), seen)
    assert not short.converged.any()
    assert (short.loss > 10 * found.loss).all()


def test_noise_leaves_estimates_that_are_not_called_exact():
    truth, seen = look(12)
    rng = torch.Generator().manual_seed(0)
    for tensor in seen.updates.values():
        tensor += 1e-4 * torch.randn(tensor.shape, generator=rng)
    found = run(Cpa(), seen)
    assert (ssim(truth[0], found.images[0]) > 0.5).all()
    assert not found.converged.any()
    assert found.why == ("0 of 12 images surely exact",)


def test_an_update_of_nan_or_zero_has_no_guess():
    _, seen = look(6, targets=3)
    seen.updates["linear1.weight"][0, 0, 0] = torch.nan
    for tensor in seen.updates.values():
        tensor[1] = 0
    found = run(Cpa(), seen)
    assert found.images[:2].isnan().all()
    assert found.images[2].isfinite().all()
    assert "NaN" in found.why[0]
    assert "zero" in found.why[1]


def test_several_local_steps_are_out_of_reach():
    _, seen = look(8, protocol=Protocol(LocalSettings(epochs=2, batch_size=4), 0.1))
    found = run(Cpa(), seen)
    assert found.images.isnan().all()
    assert found.why == ("needs the gradient of a single step, got several local steps",)
    assert "got 3 local steps" in Cpa().too_large(8, 3)
    assert not Cpa().too_large(8, 1)


def test_a_batch_that_the_layer_is_too_narrow_for_is_named_in_the_row():
    _, seen = look(8, "mlp:hidden=8")
    found = run(Cpa(), seen)
    assert found.images.isnan().all()
    assert "smaller than the Linear layer is wide (8), got 8" in found.why[0]


def test_a_network_without_a_linear_layer_on_vectors_is_named():
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 8), torch.nn.Flatten())
    assert "must have a Linear layer with bias" in Cpa().unfit(network, (1, 8, 8), 2)
    bare = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4, bias=False))
    assert "must have a Linear layer with bias" in Cpa().unfit(bare, (1, 8, 8), 2)


@pytest.mark.parametrize("bad", [{"way": "luck"}, {"iterations": 0}, {"lr": 0.0}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        Cpa(**bad)


def test_a_batch_with_an_image_missing_is_not_called_exact():
    truth, seen = look(6)
    twice = torch.cat([truth[0, :5], truth[0, :1]])
    private = [Batch(twice, torch.arange(6) % 5 % 4, torch.zeros(6) > 0)]
    seen = observe(seen.network, private, threat=ThreatModel.of(*ONLY_NUMBER), num_classes=4)
    found = run(Cpa(), seen)
    assert (psnr(truth[0, :5], align(truth[0, :5], found.images[0])) > 60).all()
    assert not found.converged.any()
    assert found.why == ("5 of 6 images surely exact; 1 of 6 images do not stand out from noise or rounding",)
