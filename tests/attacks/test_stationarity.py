import dataclasses

import pytest
import torch

from gradveil.attacks import build_attack, stationarity
from gradveil.attacks.encodings import Encodings
from gradveil.attacks.parts.imitation import Imitation
from gradveil.attacks.stationarity import Stationarity, _Goal, _How
from gradveil.defences.loda import Loda
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.federated.protocol import Protocol
from gradveil.models import create_model
from gradveil.threat import Knowledge, PublicKnowledge, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch
from tests.attacks.scene import psnr

SHAPE = (2, 8, 8)


def pictures(count, seed):
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 2, 3, 3, generator=rng)
    images = torch.nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear")
    return Batch(images, torch.zeros(count, dtype=torch.long), torch.zeros(count) > 0)


def look(defence, grants=("encodings", "num-examples", "defence"), rounds=1):
    network = create_model("resnet20:width=4", SHAPE, 4, 0).eval()
    private = [pictures(2, 1), pictures(2, 2)]
    seen = observe(
        network,
        private,
        threat=ThreatModel.of(*grants),
        num_classes=4,
        defence=defence,
        protocol=Protocol(rounds=rounds),
        public=PublicKnowledge(pictures(20, 4)),
        federation=Federation(aux=pictures(9, 3)),
    )
    return torch.stack([batch.images for batch in private]), seen


def nearest(truth, images):
    """PSNR of each truth's nearest guess; batches are shuffled."""
    return torch.stack(
        [torch.stack([psnr(t.expand_as(g), g).max() for t in ts]) for ts, g in zip(truth, images, strict=True)]
    )


@pytest.mark.parametrize("mean", [False, True])
def test_equation_6_by_hand(mean):
    _, seen = look(Loda(steps=1))
    features = Loda().features(seen.network, SHAPE)
    at, x = pictures(1, 5).images, pictures(1, 6).images

    def objective(obscured):
        return Loda(c=3.0, mean_squares=mean).objective(features, obscured, x, features(x)).sum()

    slope = torch.autograd.functional.jacobian(objective, at) / 2
    residual = slope * at.numel() if mean else slope
    how, goal = _How(features, mean=mean), _Goal.of(features, at)
    found = Stationarity(c=3.0)._loss(how, goal, x)
    assert found.item() == pytest.approx(residual.square().sum().item(), rel=1e-3)
    assert Stationarity(c=3.0)._loss(how, goal, at).item() == pytest.approx(0, abs=1e-6)


def test_at_the_bounds_a_gradient_that_points_outwards_is_no_error():
    _, seen = look(Loda(steps=1))
    features = Loda().features(seen.network, SHAPE)
    x = pictures(1, 6).images
    at = torch.zeros(1, *SHAPE)  # minus c (x' - x) is positive everywhere: at 0 that keeps x' where it is
    strong = Stationarity(c=1e4, bounds=True)
    how, goal = _How(features, mean=False), _Goal.of(features, at)
    assert strong._loss(how, goal, x).item() == pytest.approx(0, abs=1e-3)
    assert Stationarity(c=1e4)._loss(how, goal, x).item() > 1


@pytest.mark.parametrize("spec", ["stationarity:way=features,tv=0.05", "stationarity:c=0"])
def test_it_comes_closer_to_the_image_than_the_obscured_one(spec):
    defence = Loda(steps=60, c=0.0, layers="layer2.0.conv1", start="noise")
    truth, seen = look(defence)
    _, blind = look(defence, grants=("encodings", "num-examples"))
    rng = torch.Generator().manual_seed(0)
    shown = nearest(truth, Encodings()(blind, rng).images)
    found = build_attack(spec)(seen, rng)
    assert found.images.shape == truth.shape
    assert nearest(truth, found.images).mean() > shown.mean() + 1


def test_the_obscuring_is_learned_from_public_images():
    defence = Loda(steps=200, c=1e3, start="noise")  # nothing but far away: the negative, at its brightest and darkest
    grants = ("encodings", "num-examples", "defence", "public-data")
    truth, seen = look(defence, grants=grants)
    _, blind = look(defence, grants=("encodings", "num-examples"))
    rng = torch.Generator().manual_seed(0)
    found = build_attack("stationarity:way=learned,search=10")(seen, rng)
    shown = nearest(truth, Encodings()(blind, rng).images)
    assert shown.max() < 9
    assert nearest(truth, found.images).min() > shown.max() + 4


def test_the_errors_of_an_inversion_are_learned_from_too():
    defence = Loda(steps=200, c=1e3, start="noise")
    truth, seen = look(defence, grants=("encodings", "num-examples", "defence", "public-data"))

    def dimmed(images, seed):
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
        return (0.4 * images + 0.05 * noise).clamp(0, 1)

    exact = Encodings().run(seen, torch.Generator())
    found = dataclasses.replace(exact, images=dimmed(exact.images, 0))
    own = pictures(8, 7).images.round()  # as bright and dark as what this defence shows
    imitate = Imitation.of(own, dimmed(own, 1))
    attack = build_attack("stationarity:way=learned,search=10")
    scores = [
        nearest(truth, attack.decode(found, seen, torch.Generator().manual_seed(0), errors).images).mean()
        for errors in (None, imitate)
    ]
    assert scores[1] > scores[0] + 1, scores


def test_it_rehearses_on_the_attack_before_it_where_that_inverts():
    _, seen = look(Loda(steps=2), grants=("encodings", "num-examples", "labels", "defence", "public-data"))
    specs = ("gs:iterations=2", "encodings")
    for inner, same in zip(specs, (False, True), strict=True):
        exact, rehearsed = (
            build_attack(f"stationarity:inner={inner},way=learned,search=4,rehearsals={number}")(
                seen, torch.Generator().manual_seed(0)
            ).images
            for number in (0, 2)
        )
        assert torch.equal(exact, rehearsed) == same


@pytest.mark.parametrize(
    ("public", "stage"), [((), "stationarity"), (("public-data",), "stationarity:way=learned,search=24")]
)
def test_a_known_defence_is_decoded_after_any_attack_as_well_as_knowledge_allows(public, stage):
    truth, seen = look(Loda(steps=3), grants=("encodings", "num-examples", "defence", *public))
    found, wanted = (attack(seen, torch.Generator().manual_seed(0)) for attack in (Encodings(), build_attack(stage)))
    assert torch.allclose(found.images, wanted.images)
    assert found.images.shape == truth.shape


def test_settings_are_searched_on_public_images(monkeypatch):
    monkeypatch.setattr(stationarity, "STEPS", (3, 6))
    defence = Loda(steps=10)
    _, seen = look(defence, grants=("encodings", "num-examples", "defence", "public-data"))
    features = defence.features(seen.network, SHAPE)
    attack = Stationarity(search=3, way="features", start="public")
    assert Knowledge.PUBLIC_DATA in attack.needs
    chosen = attack._searched(defence, features, seen, torch.Generator().manual_seed(0))
    assert chosen.steps in (3, 6)
    assert chosen.tv in (1e-3, 1e-2, 1e-1, 1.0)
    _, without = look(defence)
    with pytest.raises(ThreatModelError, match="public-data"):
        attack(without, torch.Generator())


@pytest.mark.parametrize(
    "bad",
    [
        "way=none",
        "way=learned,search=0",
        "c=-1",
        "steps=0",
        "lr=0",
        "start=x",
        "search=-1",
        "tv=-1",
        "rehearsals=8,search=0",
    ],
)
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match=bad.split(",")[-1].split("=")[0]):
        build_attack(f"stationarity:{bad}")
