"""Images and a client for tests of defences that mix images."""

import torch
from torch import nn

from gradveil.defences import Client
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch


def pictures(count, seed=0, shape=(2, 4, 4)):
    rng = torch.Generator().manual_seed(seed)
    marks = torch.arange(count) == 0
    return Batch(torch.rand(count, *shape, generator=rng), torch.randint(0, 5, (count,), generator=rng), marks)


def client_with(data, aux=None, seed=0):
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(32), nn.Linear(32, 5)).eval()
    return Client(0, 1, model, {}, data, {}, {}, SecretStream(seed), aux)


def coefficients_of(encoded, parts):
    """Return the weights (N, M) of the parts (M, ...) in each encoding, by least squares."""
    columns = parts.double().flatten(1).T
    return torch.linalg.lstsq(columns, encoded.double().flatten(1).T).solution.T
