"""The generators of GRNN, compared with the published network written out layer by layer."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.attacks.parts.fresh_generators import FreshGenerators, doubled_convolution
from gradveil.attacks.parts.optimisers import BatchedRmsprop, LearningRate


@settings(deadline=None, max_examples=20)
@given(
    count=st.integers(1, 3), channels=st.integers(1, 4), outputs=st.integers(1, 3), height=st.integers(1, 4),
    width=st.integers(1, 4), seed=st.integers(0, 99),
)  # fmt: skip
def test_doubled_convolution_is_doubling_and_then_convolution(count, channels, outputs, height, width, seed):
    rng = torch.Generator().manual_seed(seed)
    maps = torch.randn(count, channels, height, width, generator=rng, dtype=torch.float64)
    kernels = torch.randn(count, 3, 3, outputs, channels, generator=rng, dtype=torch.float64)
    large = F.interpolate(maps, scale_factor=2, mode="nearest")
    plain = [F.conv2d(x[None], w.permute(2, 3, 0, 1), padding=1)[0] for x, w in zip(large, kernels, strict=True)]
    assert torch.allclose(doubled_convolution(maps, kernels), torch.stack(plain))


class Published(nn.Module):
    """One generator as in the paper's Figure 3, for images of 8 or 16 pixels per side."""

    def __init__(self, channels, side, noise, width):
        super().__init__()
        widths = [2 * width, width] if side == 16 else [width]
        self.z = noise
        self.first = nn.ConvTranspose2d(len(noise), 2 * widths[0], 4)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, 2 * b, 3, padding=1, bias=False) for a, b in zip(widths, [*widths[1:], channels], strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(conv.out_channels) for conv in self.convs)
        self.label = nn.Linear(len(noise), 3)

    def forward(self):
        maps = F.glu(self.first(self.z.view(1, -1, 1, 1)), 1)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            maps = F.glu(norm(conv(F.interpolate(maps, scale_factor=2, mode="nearest"))), 1)
        return maps.sigmoid(), self.label(self.z)

    def numbers(self):
        """Return the parameters in the order of our generator, and the logits."""
        first = torch.einsum("i,ijhw->jhw", self.z, self.first.weight)
        rest = [
            piece
            for conv, norm in zip(self.convs, self.norms, strict=True)
            for piece in (conv.weight.permute(2, 3, 0, 1), norm.weight, norm.bias)
        ]
        pieces = [first, self.first.bias, *rest]
        return torch.cat([piece.flatten() for piece in pieces]).detach(), self.label(self.z).detach()


@pytest.mark.parametrize("side", [8, 16])
def test_images_and_steps_are_those_of_the_published_network(side):
    ours = FreshGenerators((1, side, side), 1, noise=6, width=2, roughness=0.0)
    torch.manual_seed(0)
    theirs = [Published(1, side, ours._noise, 2) for _ in range(2)]
    starts, logits = (torch.stack(part) for part in zip(*(net.numbers() for net in theirs), strict=True))
    aims = torch.rand(2, 1, side, side)

    def closure(flat):
        leaf = flat.detach().requires_grad_()
        made = ours.pictures(leaf[:, : ours.size], None)
        loss = (made - aims).square().flatten(1).sum(1) + leaf[:, ours.size :].square().sum(1)
        return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]

    start = torch.cat([starts, logits], 1)
    assert torch.allclose(ours.pictures(starts, None), torch.cat([net()[0] for net in theirs]), atol=1e-5)
    rates = torch.cat([ours.rates(), torch.full((3,), ours.label_rate)])
    rmsprop = BatchedRmsprop(start, LearningRate(1e-3, 6), factors=rates)
    adams = [torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.99) for net in theirs]
    for _ in range(6):
        rmsprop.step(closure)
        for net, optimiser, aim in zip(theirs, adams, aims, strict=True):
            made, told = net()
            optimiser.zero_grad()
            ((made[0] - aim).square().sum() + told.square().sum()).backward()
            optimiser.step()
    after = torch.cat([net()[0] for net in theirs])
    assert torch.allclose(ours.pictures(rmsprop.variables[:, : ours.size], None), after, atol=2e-3)
    assert (after - torch.cat([ours.pictures(starts, None)])).abs().max() > 0.05  # the weights did move
    told = torch.stack([net.label(net.z) for net in theirs])
    assert torch.allclose(rmsprop.variables[:, ours.size :], told, atol=2e-3)


def test_it_is_initialised_like_torchs_layers():
    ours = FreshGenerators((1, 8, 8), 1, noise=50, width=4, roughness=0.0)
    drawn = ours.begin(200, torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    theirs = torch.stack([Published(1, 8, ours._noise, 4).numbers()[0] for _ in range(200)])
    places = torch.split(torch.arange(ours.size), ours._sizes)
    for place in places:
        assert drawn[:, place].mean() == pytest.approx(theirs[:, place].mean().item(), abs=0.02)
        assert drawn[:, place].std() == pytest.approx(theirs[:, place].std().item(), rel=0.1, abs=1e-6)


def test_odd_sizes_are_cropped_and_each_image_of_a_batch_has_its_own_generator():
    whole = FreshGenerators((3, 16, 16), 2, noise=5, width=2, roughness=0.0)
    cut = FreshGenerators((3, 10, 14), 2, noise=5, width=2, roughness=0.0)
    flat = whole.begin(3, torch.Generator().manual_seed(0))
    images = whole.pictures(flat, None)
    assert images.shape == (6, 3, 16, 16)
    assert torch.allclose(cut.pictures(flat, None), images[..., 3:13, 1:15], atol=1e-6)
    alone = whole.pictures(flat[1:2], None)
    assert torch.allclose(alone, images[2:4], atol=1e-6)


def test_roughness_is_the_mean_square_of_differences_twice():
    ours = FreshGenerators((1, 8, 8), 2, noise=5, width=2, roughness=0.5)
    flat = torch.zeros(1, ours.size)
    pictures = torch.rand(2, 1, 8, 8)
    expected = 0.0
    for picture in pictures[:, 0]:
        down = sum((picture[i + 1, j] - picture[i, j]) ** 2 for i in range(7) for j in range(8)) / 56
        right = sum((picture[i, j + 1] - picture[i, j]) ** 2 for i in range(8) for j in range(7)) / 56
        expected += 2 * 0.5 * float(down + right) / 2
    assert ours.penalty(flat, pictures).tolist() == pytest.approx([expected], rel=1e-5)
