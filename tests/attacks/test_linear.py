import pytest
import torch

from gradveil.attacks.linear import Linear
from gradveil.errors import ConfigError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.models import Normalisation, create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.scene import psnr, run

NORMALISATION = Normalisation((0.4,), (0.2,))


def look(images, model="mlp:hidden=40", normalisation=NORMALISATION, **how):
    network = create_model(model, (1, 8, 8), 4, 0, normalisation).eval()
    labels = torch.arange(len(images[0])) % 4
    private = [Batch(some, labels, torch.zeros(len(some)) > 0) for some in images]
    return observe(network, private, threat=ThreatModel.of("num-examples"), num_classes=4, **how)


def pictures(targets, size, seed=0):
    """Pictures of whole 8-bit values."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (targets, size, 1, 8, 8), generator=rng) / 255


@pytest.mark.parametrize("model", ["mlp:hidden=40", "logistic", "mlp:hidden=30/20,activation=sigmoid"])
@pytest.mark.parametrize("normalisation", [None, NORMALISATION])
def test_a_single_image_is_exact(model, normalisation):
    truth = pictures(3, 1)
    found = run(Linear(), look(truth, model, normalisation))
    assert (psnr(truth[:, 0], found.images[:, 0]) > 90).all()
    assert found.converged.all()
    assert found.why == ("",) * 3
    assert (found.labels == -1).all()


def test_the_ratio_worked_by_hand():
    truth = pictures(1, 1)
    seen = look(truth, normalisation=None)
    row = seen.updates["linear1.bias"][0].abs().argmax()
    by_hand = seen.updates["linear1.weight"][0, row] / seen.updates["linear1.bias"][0, row]
    assert torch.allclose(run(Linear(), seen).images.flatten(), by_hand.clamp(0, 1), atol=1e-6)


def test_a_single_image_is_exact_after_several_local_steps():
    truth = pictures(1, 1)
    seen = look(truth, protocol=Protocol(LocalSettings(epochs=4, batch_size=1), 0.1))
    assert psnr(truth[0], run(Linear(), seen).images[0]) > 60


def test_rows_reached_by_one_image_give_it_and_others_are_reported_as_mixed():
    truth = pictures(1, 8)
    found = run(Linear(), look(truth, "mlp:hidden=100"))
    distance = torch.cdist(truth[0].flatten(1), found.images[0].flatten(1)).amin(1)
    single = int((distance < 0.01).sum())
    assert 1 <= single < 8
    assert f"8 guesses for 8 images, {single} surely single ones; the others may be mixtures" in found.why[0]


def test_a_layer_that_is_not_linear_is_refused():
    with pytest.raises(ConfigError, match=r"first layer must be a Linear with bias.*got Conv2d.*--model mlp"):
        run(Linear(), look(pictures(1, 1), "lenet-dlg"))


def test_a_target_without_gradient_has_no_guess():
    seen = look(pictures(2, 1))
    for tensor in seen.updates.values():
        tensor[0] = 0
    found = run(Linear(), seen)
    assert found.images[0].isnan().all()
    assert found.images[1].isfinite().all()
    assert found.why == ("gradient is zero: nothing to match", "")
