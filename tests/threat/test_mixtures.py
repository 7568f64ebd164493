import pytest
import torch

from gradveil.defences import build_defence
from gradveil.errors import ThreatModelError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.models import create_model
from gradveil.threat import PublicKnowledge, ThreatModel
from gradveil.threat.mixtures import mixing_of
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch


def pictures(count, seed):
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(count, 1, 8, 8, generator=rng), torch.arange(count) % 3, torch.zeros(count) > 0)


@pytest.mark.parametrize("flips", [False, True])
def test_shares_are_those_the_mixtures_were_made_with(flips):
    rng = torch.Generator().manual_seed(0)
    images = pictures(5, 1).images
    shares = torch.rand(7, 5, generator=rng)
    shares[:, 2] = 0
    shares = shares / shares.sum(1, keepdim=True)
    mixed = torch.einsum("en,n...->e...", shares, images)
    if flips:
        mixed = torch.where(torch.rand(mixed.shape, generator=rng) < 0.5, mixed, 1 - mixed)
    torch.testing.assert_close(mixing_of(mixed, images), shares, atol=1e-3, rtol=0)


def test_mixtures_with_strangers_have_no_shares_and_neither_have_too_many_images():
    images, stranger = pictures(5, 1).images, pictures(1, 9).images
    assert mixing_of(0.5 * images[:2] + 0.5 * stranger, images) is None
    assert mixing_of(1 - images[:1] * (images[:1] > 0.5), pictures(20, 3).images) is None


def look(defence, *knows):
    return observe(
        create_model("mlp:hidden=20", (1, 8, 8), 3, 0).eval(),
        [pictures(4, 20), pictures(4, 21)],
        threat=ThreatModel.of("num-examples", *knows),
        num_classes=3,
        defence=build_defence(defence),
        protocol=Protocol(LocalSettings("fedsgd", batch_size=2, batch_norm="freeze"), rounds=3),
        public=PublicKnowledge(pictures(9, 50)),
        federation=Federation(aux=pictures(9, 51)),
    )


@pytest.mark.parametrize("defence", ["mixup:k=3", "instahide:k=3"])
def test_granted_shares_are_those_of_each_update(defence):
    seen = look(defence, "mixing", "encodings")
    assert seen.mixing.shape == (6, 2, 4)
    torch.testing.assert_close(seen.mixing.sum(2), torch.ones(6, 2), atol=1e-3, rtol=0)
    private = torch.stack([pictures(4, 20).images] * 3 + [pictures(4, 21).images] * 3)
    mixed = 2 * torch.einsum("tbn,tn...->tb...", seen.mixing, private) - 1
    shown = 2 * seen.encodings.images.view_as(mixed) - 1
    torch.testing.assert_close(mixed.abs(), shown.abs(), atol=1e-3, rtol=0)
    torch.testing.assert_close(seen.only([4]).mixing, seen.mixing[[4]])


def test_shares_must_be_granted_and_exist():
    with pytest.raises(ThreatModelError, match="asks for mixing"):
        _ = look("mixup:k=3").mixing
    with pytest.raises(ThreatModelError, match="grants mixing, but none"):
        _ = look("instahide:k=4,pool=public", "mixing").mixing
