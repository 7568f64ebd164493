import torch

from gradveil.models import Normalisation, create_model
from gradveil.networks.space import Space


def space():
    network = create_model("mlp:hidden=3", (2, 3, 3), 4, 0, Normalisation((0.25, 0.5), (0.5, 2.0)))
    return Space(network, (2, 3, 3), torch.zeros(1))


def test_pixels_survive_a_round_trip():
    pixels = torch.rand(5, 2, 3, 3)
    torch.testing.assert_close(space().to_pixels(space().from_pixels(pixels)), pixels)
    black = space().from_pixels(torch.zeros(1, 2, 3, 3))
    assert black[0, :, 0, 0].tolist() == [-0.5, -0.25]


def test_the_box_clamps_pixels_of_each_channel_and_image():
    guess = 4 * torch.randn(3, 2 * 18)  # two images per row
    boxed = space().to_pixels(space().box(guess).view(6, 2, 3, 3))
    plain = space().to_pixels(guess.view(6, 2, 3, 3)).clamp(0, 1)
    torch.testing.assert_close(boxed, plain)


def test_a_network_that_does_not_normalise_is_searched_in_pixels():
    plain = Space(create_model("mlp:hidden=3", (1, 2, 2), 4, 0), (1, 2, 2), torch.zeros(1))
    pixels = torch.rand(1, 1, 2, 2)
    assert torch.equal(plain.from_pixels(pixels), pixels)
