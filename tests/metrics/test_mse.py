import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.metrics.mse import Mse


def naive(truth, guess):
    """Return the mean squared error of one image, by loops."""
    total = 0.0
    channels, height, width = truth.shape
    for c in range(channels):
        for h in range(height):
            for w in range(width):
                one = min(max(truth[c, h, w].item(), 0.0), 1.0)
                other = min(max(guess[c, h, w].item(), 0.0), 1.0)
                total += (one - other) ** 2
    return total / (channels * height * width)


def test_by_hand():
    truth = torch.tensor([[[[0.0, 1.0], [0.5, 0.5]]]])
    guess = torch.tensor([[[[1.0, 1.0], [0.0, 0.75]]]])
    assert Mse()(truth, guess).tolist() == [(1 + 0 + 0.25 + 0.0625) / 4]


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 3), shape=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6)), data=st.data()
)
def test_equals_a_plain_loop(count, shape, data):
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    truth, guess = torch.rand(count, *shape, generator=rng), torch.randn(count, *shape, generator=rng)
    expected = torch.tensor([naive(*pair) for pair in zip(truth, guess, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(Mse()(truth, guess), expected, rtol=1e-12, atol=1e-14)


def test_black_and_white_are_the_worst():
    assert Mse()(torch.zeros(2, 3, 4, 4), torch.ones(2, 3, 4, 4)).tolist() == [1.0, 1.0]
