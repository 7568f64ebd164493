"""Distances to the decision boundary, compared with the closed form of a plane and with foolbox's HopSkipJump."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import nn

from gradveil.attacks.parts.boundary_search import FEWEST, find_boundary
from gradveil.attacks.parts.subspace import SUBSPACES, Subspace
from gradveil.data import load_dataset
from gradveil.models import create_model


class Counted(nn.Module):
    """A network that records its inputs."""

    def __init__(self, network):
        super().__init__()
        self.network, self.asked, self.least, self.most = network, 0, 1.0, 0.0

    def forward(self, images):
        self.asked += len(images)
        self.least, self.most = min(self.least, images.min().item()), max(self.most, images.max().item())
        return self.network(images)


def felt(network, images, labels, kind="full", *, queries=1000, reduction=2, estimates=30):
    space = Subspace.of(kind, images, reduction)
    rng = torch.Generator().manual_seed(0)
    return find_boundary(network, images, labels, space, queries=queries, estimates=estimates, rng=rng)


@pytest.fixture(scope="module")
def line():
    """Return a network with a plane through the middle of [0, 1] as boundary, images near it, and their distances."""
    rng = torch.Generator().manual_seed(0)
    smooth = F.interpolate(torch.randn(1, 1, 3, 3, generator=rng), size=(8, 8), mode="bilinear").flatten()
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with torch.no_grad():
        network[1].weight.copy_(torch.stack([smooth, -smooth]))
        network[1].bias.copy_(torch.stack([-smooth.sum() / 2, smooth.sum() / 2]))
    images = 0.35 + 0.3 * torch.rand(40, 1, 8, 8, generator=rng)
    sides = (images.flatten(1) - 0.5) @ smooth
    return network.eval(), images, (sides < 0).long(), sides.abs() / smooth.norm()


def seen_of_normal(network, images, kind):
    """Return the share of the plane's normal that lies in the subspace: all, except for components of noise images."""
    if kind != "pca":
        return 1.0
    normal = F.normalize(network[1].weight[0], dim=0)
    return (Subspace.of(kind, images, 2).components @ normal).norm()


@pytest.mark.parametrize("kind", SUBSPACES)
def test_the_distance_to_a_plane_is_the_closed_form(line, kind):
    network, images, labels, true = line
    found = felt(network, images, labels, kind, queries=4000)
    ratio = found.distances / true
    assert ratio.min() > 0.999  # never nearer than the truth
    assert ratio.median() < 1.1 / seen_of_normal(network, images, kind)
    assert spearmanr(found.distances, true).statistic > 0.95


def test_more_queries_come_nearer(line):
    network, images, labels, _ = line
    means = [felt(network, images, labels, queries=queries).distances.mean() for queries in (FEWEST, 300, 1500)]
    assert means[0] > means[1] > means[2]


@pytest.mark.parametrize("queries", [FEWEST, 333])
def test_queries_are_counted_exactly_and_never_exceed_the_budget(line, queries):
    network, images, labels, _ = line
    counted = Counted(network)
    found = felt(counted, images, labels, queries=queries)
    assert counted.asked == found.asked.sum()
    assert found.asked.max() <= queries
    assert found.asked.min() > queries - 60
    assert counted.least >= 0
    assert counted.most <= 1


def test_points_are_beyond_the_boundary_inside_the_box_and_as_far_as_stated(line):
    network, images, labels, _ = line
    found = felt(network, images, labels)
    assert found.points.min() >= 0
    assert found.points.max() <= 1
    assert (found.points - images).flatten(1).norm(dim=1).allclose(found.distances)
    assert (network(found.points).argmax(1) != labels).double().mean() > 0.9  # except for rounding


def test_misclassified_images_have_distance_0_and_cost_one_query(line):
    network, images, labels, _ = line
    labels = labels.clone()
    labels[:5] = 1 - labels[:5]
    found = felt(network, images, labels)
    assert (found.distances[:5] == 0).all()
    assert (found.asked[:5] == 1).all()
    assert (found.distances[5:] > 0).all()


def test_a_single_image_starts_from_noise(line):
    network, images, labels, true = line
    alone = int(true.argmin())
    found = felt(network, images[[alone]], labels[[alone]])
    assert 0 < found.distances < 8


def test_a_network_with_a_constant_answer_gets_the_largest_distance_in_the_box():
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    nn.init.zeros_(network[1].weight)
    nn.init.constant_(network[1].bias, 0.0)
    with torch.no_grad():
        network[1].bias[0] = 1.0
    found = felt(network.eval(), torch.rand(3, 1, 4, 4), torch.zeros(3, dtype=torch.int64))
    assert found.distances.tolist() == [math.sqrt(16)] * 3


def test_no_images_have_no_distances(line):
    network, images, labels, _ = line
    assert felt(network, images[:0], labels[:0]).distances.shape == (0,)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_full_space_agrees_with_foolbox():
    """Both take equal starts and queries; foolbox gets one image at a time, because it confuses lengths."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import foolbox

    digits = load_dataset("mnist-5k")
    order = torch.randperm(len(digits.train), generator=torch.Generator().manual_seed(0))
    images = (torch.from_numpy(digits.train.images).float() / 255)[order]
    labels = torch.from_numpy(digits.train.labels)[order]
    network = create_model("lenet5", digits.shape, 10, 0)
    optimiser = torch.optim.SGD(network.parameters(), 0.05, 0.9)
    for start in [*range(0, 1000, 20)] * 4:
        optimiser.zero_grad()
        F.cross_entropy(network(images[start : start + 20]), labels[start : start + 20]).backward()
        optimiser.step()
    network.eval()
    some = slice(2000, 2060)
    images, labels = images[some], labels[some]
    answers = network(images).argmax(1)
    counted = Counted(network)
    model = foolbox.PyTorchModel(counted.eval(), bounds=(0, 1), device="cpu")
    attack = foolbox.attacks.HopSkipJumpAttack(steps=5)
    torch.manual_seed(0)
    right = (answers == labels).nonzero()[:, 0][:16]
    theirs = []
    for i in right:
        ways = (images - images[i]).flatten(1).norm(dim=1).masked_fill(answers == labels[i], torch.inf)
        start = images[ways.argmin()][None]
        criterion = foolbox.criteria.Misclassification(labels[i][None])
        theirs.append(float((attack.run(model, images[i][None], criterion, starting_points=start) - images[i]).norm()))
    queries = counted.asked // len(right)
    ours = felt(network, images, labels, queries=queries, estimates=100).distances[right]
    ratio = ours / torch.tensor(theirs)
    assert spearmanr(ours, theirs).statistic > 0.9
    assert 0.8 < ratio.median() < 1.2
    assert ratio.min() > 0.6
    assert ratio.max() < 1.7
