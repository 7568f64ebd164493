"""An error leaves the site as a code without noise, so whether there is one must not depend on the private images."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.defences import Client, build_defence
from gradveil.defences.dp_sgd import DpSgd
from gradveil.defences.parts import clipped
from gradveil.defences.pogz import Pogz
from gradveil.errors import DefenceError
from gradveil.models import create_model
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update
from tests.security.sites import CLASSES, RUN, SIDE, OneSite, code, private_set, update_of

NOISY = ["dp-sgd:noise=8.0", "pogz:noise=1.0", "ca-fl:per=update"]
PIXEL = 5


def trap(threshold):
    """Return weights of an mlp whose gradient overflows if, and only if, a pixel is above the threshold."""
    network = create_model("mlp", (1, SIDE, SIDE), CLASSES, 0)
    model = {name: torch.zeros_like(tensor) for name, tensor in network.state_dict().items()}
    model["linear1.weight"][0, PIXEL], model["linear1.bias"][0] = 1e30, -threshold * 1e30
    model["linear2.weight"][0, 0], model["linear.weight"][0, 0] = 1e30, 1.0
    return model


@pytest.mark.parametrize("defence", NOISY)
def test_no_error_tells_whether_a_pixel_is_above_a_threshold(tmp_path, defence):
    data = private_set(images=1, seed=3)
    pixel = float(data.train.images[0].reshape(-1)[PIXEL]) / 255
    site = OneSite(tmp_path, replace(RUN, defence=defence, model="mlp"), data)
    for number, threshold in enumerate((pixel - 0.1, pixel + 0.1), start=1):
        answer = site.train(number, trap(threshold))
        assert code(answer) == ""
        assert update_of(answer)


def with_norm(training):
    """Return a network whose statistics do not move if its weights are zero, whatever the images are."""
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
    return network.train(training)


@pytest.mark.parametrize("name", ["pogz", "ca-fl"])
def test_a_layer_that_tracks_statistics_is_refused_even_if_they_did_not_move(name):
    defence = build_defence(name)
    still = Update({"2.weight": torch.ones(2, 4)}, 1, {"0.running_mean": torch.zeros(1)})
    nothing = Batch(torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.long), torch.zeros(0) > 0)
    frozen, tracking = (
        Client(0, 1, with_norm(training), {}, nothing, {}, {}, SecretStream(0)) for training in (False, True)
    )
    assert defence.on_update(still, frozen).num_examples == 1
    with pytest.raises(DefenceError, match="running_mean"):
        defence.on_update(still, tracking)


@pytest.mark.parametrize(("clip", "entries"), [(1.0, 10**6), (1.0, 10**4), (0.01, 10**5), (1e-3, 10**5)])
def test_a_huge_gradient_never_exceeds_the_bound(monkeypatch, clip, entries):
    grid = DpSgd(clip=clip)._grid
    one = Batch(torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.long), torch.zeros(1) > 0)
    for share in torch.linspace(0.5, 1, 9).tolist():
        huge = {"w": torch.full((1, entries), 3e38 * share)}
        monkeypatch.setattr(clipped, "per_example_gradients", lambda model, batch, copies, huge=huge: huge)
        total = clipped.clipped_sum(None, one, {"w": huge["w"][0]}, clip * clipped.BELOW, grid, clip)[0]["w"] * grid
        assert 0.99 * clip < float(total.norm()) <= clip


@pytest.mark.parametrize("wrong", [-0.999, float("nan"), float("inf")])
def test_a_server_cannot_lower_the_noise_of_a_layer_by_an_impossible_importance(wrong):
    told = {"importance.a": torch.tensor(1.0), "importance.b": torch.tensor(wrong)}
    stds = Pogz(noise=1.0, clip=1.0)._stds({"a": [], "b": []}, told)
    bound = 1 / 2**0.5
    assert sum((2 * bound) ** 2 / std**2 for std in stds.values()) == pytest.approx(1.0)
    assert min(stds.values()) >= 2 * bound
