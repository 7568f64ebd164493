import re

import pytest
import torch
from torch import nn

from gradveil.attacks.r_gap import RGap, rank_analysis
from gradveil.errors import ConfigError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.models import Normalisation, create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.scene import psnr, run, scene


def small(act=lambda: nn.LeakyReLU(0.2), bias=False):
    """The paper's CNN6 at a small size: strided convolutions, LeakyReLU and a Linear."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 6, 4, 2, 2, bias=bias),
            act(),
            nn.Conv2d(6, 12, 3, 2, 1, bias=bias),
            act(),
            nn.Conv2d(12, 16, 3, 1, 1, bias=bias),
            act(),
            nn.Flatten(),
            nn.Linear(144, 4, bias=bias),
        )


def look(network, size=1, **how):
    truth = torch.rand(2, size, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    private = [Batch(some, torch.tensor([2] * size), torch.zeros(size) > 0) for some in truth]
    return truth, observe(network.eval(), private, threat=ThreatModel.of("num-examples"), num_classes=4, **how)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", [lambda: nn.LeakyReLU(0.2), nn.Tanh, nn.Sigmoid])
def test_it_is_exact_if_there_are_enough_equations(act, bias):
    truth, seen = look(small(act, bias))
    found = run(RGap(), seen)
    assert (psnr(truth[:, 0], found.images[:, 0]) > 60).all()
    assert found.labels.tolist() == [[2], [2]]
    assert found.converged.all()
    assert found.why == ("", "")


def test_networks_of_the_zoo_with_normalisation():
    for model in ("lenet-dlg", "mlp:activation=leaky-relu,hidden=50"):
        network = create_model(model, (1, 8, 8), 4, 0, Normalisation((0.4,), (0.2,)))
        truth, seen = look(network)
        assert (psnr(truth[:, 0], run(RGap(), seen).images[:, 0]) > 60).all(), model


def test_the_rank_analysis_counts_equations_and_names_layers_with_too_few():
    first, *_, last = rank_analysis(small(), (1, 8, 8))
    assert tuple(first) == ("0", 64, 150, 16 * 6, 150 + 96 - 64)
    assert tuple(last) == ("7", 144, 0, 144, 0)
    narrow = nn.Sequential(nn.Conv2d(1, 1, 2, 4, bias=False), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(4, 4))
    assert rank_analysis(narrow, (1, 8, 8))[0].surplus == 4 + 4 - 64
    _, seen = look(narrow)
    found = run(RGap(), seen)
    assert found.why[0] == "fewer equations than unknowns in 0 (-56)"


def test_a_failed_target_names_the_unsolved_layer():
    """Errors of the layers behind reach the first one."""
    _, seen = look(small(nn.Sigmoid))
    seen.updates["2.weight"][0].mul_(1.01)
    found = run(RGap(), seen)
    assert found.converged.tolist() == [False, True]
    assert re.fullmatch(r"the equations of [024] have a misfit of 0\.\d+, where 0\.001 counts as solved", found.why[0])
    assert found.why[1] == ""


def test_non_finite_numbers_are_reported():
    _, seen = look(small(bias=True))
    seen.updates["7.bias"][0] = 0
    found = run(RGap(), seen)
    assert not found.converged[0]
    assert re.fullmatch(r"the equations of \d hold numbers that are not finite", found.why[0])


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.flatten, self.linear = nn.Conv2d(1, 1, 3, 1, 1), nn.Flatten(), nn.Linear(64, 4)

    def forward(self, images):
        return self.linear(self.flatten(images + self.conv(images)))


class Key(nn.Module):
    """As FedKL's locks: it needs no image."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self):
        return self.scale


class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten, self.key, self.linear = nn.Flatten(), Key(), nn.Linear(64, 4)

    def forward(self, images):
        return self.linear(self.key() * self.flatten(images))


@pytest.mark.parametrize(
    ("network", "got"),
    [
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)), r"ReLU \(1\)"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 4)), "AvgPool2d"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4)), "BatchNorm2d"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh()), "does not end in a Linear"),
        (nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(64, 4)), "does not follow a layer"),
        (Keyed(), r"Key \(key\), which is called without inputs"),
        (Residual(), "do not follow each other, as in residual connections"),
    ],
)
def test_other_networks_are_refused(network, got):
    _, seen = look(network)
    with pytest.raises(ConfigError, match=rf"plain chain of convolutions.*got .*{got}"):
        run(RGap(), seen)


def test_several_images_or_steps_are_refused():
    _, seen = look(small(), size=2)
    with pytest.raises(ConfigError, match="updates of 1 image, got 2"):
        run(RGap(), seen)
    _, seen = look(small(), protocol=Protocol(LocalSettings(epochs=2)))
    with pytest.raises(ConfigError, match="gradient of a single step"):
        run(RGap(), seen)


def test_a_target_without_gradient_has_no_guess():
    _, _, seen = scene()
    for tensor in seen.updates.values():
        tensor[0] = 0
    found = run(RGap(), seen)
    assert found.images[0].isnan().all()
    assert found.images[1].isfinite().all()
