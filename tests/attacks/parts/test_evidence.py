"""Evidence about candidates: products, decoders and picks, against slower and more obvious ways."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gradveil.attacks.parts import evidence as module
from gradveil.attacks.parts.evidence import Evidence, gathered, linear_estimate, picked, posterior_mean
from gradveil.defences.veil import Veil
from gradveil.errors import ConfigError
from gradveil.models import create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch


def make_batch(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 12, 12, generator=rng)
    return Batch(images, torch.randint(0, 4, (count,), generator=rng), torch.zeros(count) > 0)


def look(model="patches:filters=3", rounds=2, defence=None):
    found = []
    for number in range(rounds):
        network = create_model(model, (1, 12, 12), 4, 0)
        torch.nn.init.normal_(
            list(network.parameters())[-1], std=0.5 + number, generator=torch.Generator().manual_seed(1)
        )
        private = [make_batch(1, seed) for seed in (5, 6)]
        known = ThreatModel.of("num-examples", "labels", *(["defence"] if defence else []))
        found.append(observe(network, private, threat=known, num_classes=4, defence=defence))
    return replace(found[0], later=tuple(found[1:]))


def naive_gradients(one, candidates, clip):
    """Return clipped gradients by autograd, image by image."""
    rows = []
    for image, label in zip(candidates.images, candidates.labels, strict=True):
        loss = F.cross_entropy(one.network(image[None]), label[None])
        wanted = [p for p in one.network.parameters() if p.requires_grad]
        row = torch.cat([g.flatten() for g in torch.autograd.grad(loss, wanted)])
        rows.append(row * min(1.0, clip / float(row.norm())))
    return torch.stack(rows).double()


@pytest.mark.parametrize(
    ("model", "defence"), [("patches:filters=3", Veil(rounds=2)), ("patches:filters=3", None), ("logistic", None)]
)
def test_products_are_those_of_the_gradients_in_units_of_the_noise(model, defence):
    seen, candidates = look(model, defence=defence), make_batch(6)
    found = gathered(seen, candidates)
    clip, std = (defence.clip, defence._std) if defence else (1e9, 1.0)
    gram, cross = 0.0, 0.0
    for one in (seen, *seen.later):
        rows = naive_gradients(one, candidates, clip)
        arrived = torch.cat([tensor.flatten(1) for tensor in one.mean_gradients.values()], 1).double()
        gram, cross = gram + rows @ rows.T / std**2, cross + arrived @ rows.T / std**2
    assert torch.allclose(found.gram, gram, rtol=1e-4, atol=1e-5)
    assert torch.allclose(found.cross, cross, rtol=1e-3, atol=1e-4)
    assert found.noisy == (defence is not None)


def make_evidence(candidates, targets, entries, seed=0):
    rng = torch.Generator().manual_seed(seed)
    gradients, arrived = (torch.randn(n, entries, generator=rng, dtype=torch.float64) for n in (candidates, targets))
    return gradients, arrived, Evidence(gradients @ gradients.T, arrived @ gradients.T, noisy=True)


def test_the_linear_decoder_is_that_of_the_covariances():
    gradients, arrived, evidence = make_evidence(7, 3, 4)
    images = torch.rand(7, 1, 2, 2, dtype=torch.float64)
    flat, centred = images.flatten(1), gradients - gradients.mean(0)
    both = (flat - flat.mean(0)).T @ centred / 7
    gain = both @ torch.linalg.inv(centred.T @ centred / 7 + 0.5 * torch.eye(4))
    wanted = flat.mean(0) + (arrived - gradients.mean(0)) @ gain.T
    assert torch.allclose(linear_estimate(evidence, images, ridge=0.5), wanted)


def test_likely_images_count_by_their_density():
    gradients, arrived, evidence = make_evidence(5, 2, 3)
    density = torch.exp(-torch.cdist(arrived, gradients).square() / 2)
    images = torch.rand(5, 1, 2, 2, dtype=torch.float64)
    wanted = density / density.sum(1, keepdim=True) @ images.flatten(1)
    assert torch.allclose(posterior_mean(evidence, images), wanted)


def test_the_nearest_candidate_is_picked():
    gradients = torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]], dtype=torch.float64)
    arrived = gradients[[2, 2]] + torch.tensor([[0.1, 0.0], [-4.6, -4.0]])
    evidence = Evidence(gradients @ gradients.T, arrived @ gradients.T, noisy=True)
    assert picked(evidence, [2, 2], others=2).tolist() == [True, False]


def test_what_would_be_seen_of_candidates_has_the_noise_of_the_law():
    _, _, evidence = make_evidence(3, 1, 6)
    drawn = evidence.of_candidates(torch.tensor([1]), 20_000, torch.Generator().manual_seed(0))
    apart = drawn - evidence.gram[1]
    assert torch.allclose(apart.T @ apart / len(apart), evidence.gram, atol=0.05 * float(evidence.gram.max()))
    quiet = replace(evidence, noisy=False).of_candidates(torch.tensor([0, 1]), 2, torch.Generator())
    assert torch.equal(quiet, evidence.gram[[0, 0, 1, 1]])


def test_too_many_numbers_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MOST_ENTRIES", 100)
    with pytest.raises(ConfigError, match="Lower samples"):
        gathered(look("logistic"), make_batch(3))
