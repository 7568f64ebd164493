import torch

from gradveil.metrics.mse import Mse
from gradveil.metrics.rmse import Rmse


def test_by_hand():
    truth, guess = torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4)
    guess[0, 0, 0, 0], guess[1] = 1.0, 0.25
    assert Rmse()(truth, guess).tolist() == [0.5, 0.25]


def test_its_square_is_the_mse():
    rng = torch.Generator().manual_seed(0)
    truth, guess = torch.rand(5, 3, 6, 7, generator=rng), torch.rand(5, 3, 6, 7, generator=rng)
    torch.testing.assert_close(Rmse()(truth, guess).square(), Mse()(truth, guess), rtol=1e-12, atol=0)


def test_it_is_255_times_smaller_than_on_bytes():
    rng = torch.Generator().manual_seed(1)
    truth, guess = torch.randint(0, 256, (2, 1, 3, 8, 8), generator=rng).double()
    on_bytes = (truth - guess).square().mean().sqrt()
    torch.testing.assert_close(255 * Rmse()(truth / 255, guess / 255)[0], on_bytes)
