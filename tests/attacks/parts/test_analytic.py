import pytest
import torch
from torch import nn

from gradveil.attacks.base import Scene
from gradveil.attacks.parts.analytic import (
    Block,
    Candidates,
    Rows,
    best,
    collect,
    first_linear,
    insert,
    likely_pictures,
    on_grid,
    outside,
    public_images,
    ratios,
    rows_of,
    set_rows,
    set_shift,
    strong,
    supported,
    two_linears,
)
from gradveil.errors import ConfigError
from gradveil.models import create_model
from gradveil.models.base import Normalisation
from gradveil.networks.space import Space
from gradveil.types import Batch
from tests.attacks.scene import scene

SHAPE = (1, 6, 6)
NORMALISED = Normalisation((0.3,), (0.2,))


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def block_of(rows=3, network=None):
    block = Block(rows, SHAPE)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng()))
    return block


def test_rows_compute_the_given_function_of_pixels():
    network = create_model("mlp", SHAPE, 4, 0, NORMALISED)
    space, layer = Space(network, SHAPE, torch.zeros(())), nn.Linear(36, 3)
    rows, thresholds = torch.randn(3, 36, generator=rng()), torch.tensor([0.1, -2.0, 3.0])
    set_rows(layer, rows, thresholds, space)
    pixels = torch.rand(5, *SHAPE, generator=rng(1))
    found = layer(space.from_pixels(pixels).flatten(1))
    assert torch.allclose(found, pixels.flatten(1) @ rows.T - thresholds, atol=1e-5)


def test_a_block_before_a_network_sees_what_the_network_saw():
    network = create_model("mlp", SHAPE, 4, 0, NORMALISED).eval()
    pixels = torch.rand(5, *SHAPE, generator=rng(1))
    plain = network(pixels)
    block = block_of()
    with torch.no_grad():
        block.shift.weight.zero_()
        block.shift.bias.zero_()
    whole = insert(network, block)
    assert torch.allclose(whole(pixels), plain)
    seen = []
    block.rows.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    whole(pixels)
    assert torch.allclose(seen[0], (pixels.flatten(1) - 0.3) / 0.2, atol=1e-6)


@pytest.mark.parametrize("size", [0.05, 0.5])
def test_a_shift_has_the_given_relative_size_and_zero_mean(size):
    block, pictures = block_of(), torch.randn(200, 36, generator=rng(2))
    set_shift(block, torch.randn(36, 3, generator=rng(3)), pictures, size)
    added = block.shift(block.act(block.rows(pictures))).detach()
    contrast = (pictures - pictures.mean(0)).square().mean().sqrt()
    assert float(added.mean(0).abs().max()) < 1e-3 * size
    assert float(added.square().mean().sqrt() / contrast) == pytest.approx(size, rel=1e-3)


def test_likely_images_are_public_ones_or_noise_with_the_normalisations_moments():
    network = create_model("mlp", SHAPE, 4, 0, NORMALISED)
    public = Batch(torch.rand(30, *SHAPE), torch.zeros(30, dtype=torch.long), torch.zeros(30) > 0)
    assert torch.equal(likely_pictures(network, Scene(SHAPE, 4, public), rng()), public.images)
    assert public_images(Scene(SHAPE, 4, public[slice(5)])) is None
    noise = likely_pictures(network, Scene(SHAPE, 4), rng(), count=2000)
    assert noise.shape == (2000, *SHAPE)
    assert float(noise.mean()) == pytest.approx(0.3, abs=0.03)
    assert float(noise.std()) == pytest.approx(0.2, abs=0.03)
    assert float(noise.mean((1, 2, 3)).std()) > 0.2 * 0.2**0.5 * 0.9  # whole images differ in brightness


def test_the_first_layer_is_found_or_refused():
    network = create_model("mlp", SHAPE, 4, 0, NORMALISED)
    assert first_linear(network, SHAPE) == "linear1"
    first, after = two_linears(network, SHAPE)
    assert (first, after) == (network.linear1, network.linear2)
    with pytest.raises(ConfigError, match="first layer must be a Linear with bias on the flattened image, got Conv2d"):
        first_linear(create_model("lenet-dlg", SHAPE, 4, 0), SHAPE)
    with pytest.raises(ConfigError, match="begins with Linear, ReLU and Linear, got Linear, Sigmoid, Linear"):
        two_linears(create_model("mlp:activation=sigmoid", SHAPE, 4, 0), SHAPE)


def test_ratios_equal_the_image_if_only_one_reaches_the_row():
    space = Space(create_model("mlp", SHAPE, 4, 0, NORMALISED), SHAPE, torch.zeros((), dtype=torch.float64))
    pixels = torch.rand(2, *SHAPE, generator=rng(), dtype=torch.float64)
    inputs = space.from_pixels(pixels).flatten(1)  # (2, D)
    factors = torch.tensor([[0.5, 0.0], [0.0, -2.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)  # rows x images
    found = ratios(Rows((factors @ inputs)[None], factors.sum(1)[None]), space)[0]
    assert torch.allclose(found[:2], pixels.flatten(1))
    assert torch.allclose(found[2], pixels.flatten(1).mean(0))
    assert not found[3].any()


def test_a_layer_that_was_not_sent_is_refused():
    _, _, seen = scene()
    assert rows_of(seen, "fc").weight.dtype == torch.float64
    with pytest.raises(ConfigError, match=r"must hold the change of x.weight and x.bias, got none of x.weight, x.bias"):
        rows_of(seen, "x")


def whole_pictures(count=3, seed=0):
    return torch.randint(0, 256, (count, 64), generator=rng(seed)).double() / 255


def test_rounding_noise_is_dropped_and_the_strongest_rows_come_first():
    found = strong(whole_pictures(), torch.tensor([1.0, 3.0, 1e-9]))
    assert found.strength.tolist() == [3.0, 1.0]
    assert torch.equal(found.images, whole_pictures()[[1, 0]])
    assert len(strong(whole_pictures(), torch.ones(3), most=2).images) == 2


def test_rows_that_agree_support_each_other():
    images = whole_pictures()[[0, 0, 1]] + 1e-5
    assert supported(Candidates(images, torch.ones(3), torch.ones(3))).support.tolist() == [2, 2, 1]


@pytest.mark.parametrize("share", [0.13, 0.37, 0.5, 0.8])
def test_mixtures_are_recognised_by_pixels_off_the_8_bit_grid(share):
    one, other = whole_pictures(2)
    assert on_grid(torch.stack([one, other])).all()
    assert not on_grid((share * one + (1 - share) * other)[None]).any()


def test_black_and_white_images_give_no_evidence():
    assert not on_grid(torch.tensor([[0.0, 1.0] * 32])).any()


def test_chosen_guesses_differ_and_single_images_come_first():
    one, other, third = whole_pictures(3)
    mixture, far = 0.37 * one + 0.63 * other, third + 2
    images = torch.stack([far, mixture, one, one + 1e-4, other])
    found = Candidates(images, torch.tensor([9.0, 5.0, 1.0, 2.0, 3.0]), torch.ones(5, dtype=torch.int64))
    chosen, sure = best(found, 3)
    assert set(chosen[:2].tolist()) <= {2, 3, 4}
    assert chosen[0] == 4
    assert sure.tolist() == [True, True, False]
    assert chosen[2] == 1
    assert 0 not in chosen.tolist()
    assert outside(far[None]) > 1


def test_targets_without_enough_guesses_are_reported():
    _, _, seen = scene(targets=2, size=2)
    single = Candidates(whole_pictures(1), torch.ones(1), torch.ones(1, dtype=torch.int64))
    nothing = Candidates(torch.empty(0, 64).double(), torch.empty(0), torch.empty(0, dtype=torch.int64))
    found = collect(seen, [single, nothing], "mixtures")
    assert found.images.shape == (2, 2, 1, 8, 8)
    assert torch.allclose(found.images[0, 0].flatten(), whole_pictures(1)[0].float())
    assert found.images[0, 1].isnan().all()
    assert found.converged.tolist() == [True, False]
    assert found.why[0] == "1 guesses for 2 images, 1 surely single ones; the others may be mixtures"
    assert found.loss[1].isnan()
