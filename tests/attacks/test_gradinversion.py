import torch
from torch import nn

from gradveil.attacks import matching
from gradveil.attacks.gradinversion import Gradinversion
from gradveil.metrics import align
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.scene import psnr, run


def look(*grants, labels=((0, 2), (1, 3))):
    """A network with BatchNorm whose gradient says little, and pictures whose statistics say more."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(4 * 36, 4)
    ).eval()  # fmt: skip
    coarse = torch.rand(4, 1, 3, 3)
    truth = nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear").view(2, 2, 1, 8, 8)
    private = [Batch(truth[t], torch.tensor(row), torch.zeros(2) > 0) for t, row in enumerate(labels)]
    return truth, observe(network, private, threat=ThreatModel.of("num-examples", *grants), num_classes=4)


def close(truth, result):
    return torch.stack([psnr(t, align(t, g)).mean() for t, g in zip(truth, result.images, strict=True)]).mean()


def test_it_finds_pictures_and_labels():
    truth, seen = look()
    result = run(Gradinversion(iterations=400, restarts=2), seen)
    assert result.labels.tolist() == [[0, 2], [1, 3]]
    assert close(truth, result) > close(truth, run(Gradinversion(iterations=1, restarts=2), seen)) + 4


def test_statistics_draw_the_guess_to_their_own():
    _, seen = look("batch-statistics", "labels")

    def miss(weight):
        guess = run(Gradinversion(iterations=150, restarts=1, batch_norm=weight), seen).images
        found = torch.stack([seen.network[0](images).mean((0, 2, 3)) for images in guess])
        return (found - seen.batch_statistics["1"][0]).norm().item()

    assert miss(1.0) < 0.5 * miss(0.0)


def test_the_group_holds_seeds_together(monkeypatch):
    _, seen = look("labels")
    found = []
    search_chunk = matching._search
    monkeypatch.setattr(matching, "_search", lambda *given: found.append(search_chunk(*given)) or found[-1])

    def spread(weight):
        run(Gradinversion(iterations=150, restarts=3, group=weight, noise=0.0), seen)
        seeds = found[-1].images.view(2, 3, -1)
        return (seeds - seeds.mean(1, keepdim=True)).square().mean().item()

    assert spread(1.0) < 0.5 * spread(0.0)


def test_repeated_labels_are_counted():
    _, seen = look(labels=((1, 1), (3, 0)))
    counted = run(Gradinversion(iterations=1, labels="counted"), seen)
    assert counted.labels[0].tolist() == [1, 1]
    assert run(Gradinversion(iterations=1), seen).labels[0].tolist() != [1, 1]
