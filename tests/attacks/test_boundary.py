import pytest
import torch

from gradveil.attacks.boundary import Boundary
from gradveil.attacks.parts.boundary_search import find_boundary
from gradveil.attacks.parts.subspace import Subspace
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.metrics.roc import area
from gradveil.models import create_model
from gradveil.registry import components
from gradveil.types import Batch


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"queries": 10}, ConfigError, "queries must be at least 64, got 10"),
        ({"subspace": "dtc"}, UnknownNameError, "Did you mean 'dct'"),
        ({"reduction": 0}, ConfigError, "reduction must be at least 1"),
        ({"estimates": 0}, ConfigError, "estimates must be at least 1"),
        ({"every": 0}, ConfigError, "every must be at least 1"),
        ({"images": 0}, ConfigError, "images must be at least 1"),
    ],
)
def test_bad_settings(change, error, text):
    with pytest.raises(error, match=text):
        Boundary(**change)


def test_it_is_listed_among_the_attacks(gradveil):
    assert components("attacks")["boundary"] is Boundary
    assert "boundary" in gradveil("list", "attacks").out


def test_training_images_of_an_overfitted_network_lie_farther_from_the_boundary():
    rng = torch.Generator().manual_seed(0)
    images, labels = torch.rand(60, 1, 6, 6, generator=rng), torch.randint(0, 3, (60,), generator=rng)
    network = create_model("mlp", (1, 6, 6), 3, 0)
    optimiser = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(80):  # learns noise by heart
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(network(images[:30]), labels[:30]).backward()
        optimiser.step()
    batch = Batch(images, labels, torch.zeros(60, dtype=torch.bool))
    scores = Boundary(queries=200, subspace="full").scores(network.eval(), batch, torch.Generator().manual_seed(0))
    assert area(scores[:30], scores[30:]) > 0.8


def test_the_score_is_the_distance_in_the_chosen_subspace():
    rng = torch.Generator().manual_seed(0)
    network = create_model("mlp", (1, 8, 8), 3, 0).eval()
    images = torch.rand(9, 1, 8, 8, generator=rng)
    batch = Batch(images, network(images).argmax(1), torch.zeros(9, dtype=torch.bool))
    scores = Boundary(queries=150, subspace="dct", reduction=2, estimates=20).scores(
        network, batch, torch.Generator().manual_seed(3)
    )
    found = find_boundary(
        network, images, batch.labels, Subspace.of("dct", images, 2), queries=150, estimates=20,
        rng=torch.Generator().manual_seed(3),
    )  # fmt: skip
    assert torch.equal(scores, found.distances)
