import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.attacks.parts.imitation import Imitation, imitated, learned_filter, least_loss, unrehearsable
from gradveil.defences import build_defence
from gradveil.errors import ThreatModelError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.models import create_model
from gradveil.threat import Knowledge, PublicKnowledge, Reconstruction, ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch

SHAPE = (1, 8, 8)
SINGLE = LocalSettings(algorithm="fedsgd", batch_size=1, batch_norm="freeze")


def pictures(count, seed):
    coarse = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    images = torch.nn.functional.interpolate(coarse, size=SHAPE[1:], mode="bilinear")
    return Batch(images, torch.arange(count) % 3, torch.zeros(count) > 0)


def look(defence="mixup:k=2,pool=data", rounds=3, how=SINGLE, public=20, grants=("num-examples", "labels")):
    return observe(
        create_model("mlp:hidden=6", SHAPE, 3, 0).eval(),
        [pictures(4, 1)],
        threat=ThreatModel.of(*grants, "defence", "public-data"),
        num_classes=3,
        defence=build_defence(defence),
        protocol=Protocol(how, rounds=rounds),
        public=PublicKnowledge(pictures(public, 2)),
    )


def first_layer(seen, rng):
    """Invert updates of one image exactly: the weights' gradient over the bias's gradient is the input."""
    weight, bias = list(seen.gradients.values())[:2]
    rows, updates = bias.abs().argmax(1), torch.arange(len(bias))
    images = (weight[updates, rows] / bias[updates, rows, None]).view(-1, 1, *seen.shape)
    nothing = torch.zeros(len(images))
    return Reconstruction(images, torch.full((len(images), 1), -1), nothing, nothing == 0, ("",) * len(images))


def test_a_filter_and_a_rest_by_hand():
    exact, others = pictures(6, 3).images, pictures(3, 4).images
    dot = torch.zeros(SHAPE)
    dot[0, 2, 3] = 0.2
    imitate = Imitation.of(exact, 0.5 * exact + 0.1)
    shown = imitate(others, torch.Generator().manual_seed(0))
    assert torch.allclose(shown, 0.5 * others + 0.1, atol=5e-3)
    spotted = Imitation(lambda images: images, dot[None])(others, torch.Generator())
    assert torch.equal(spotted, (others + dot).clamp(0, 1))


def test_the_rests_are_those_of_whole_images_and_each_may_be_drawn():
    rests = torch.tensor([-0.1, 0.0, 0.1]).view(3, 1, 1, 1).expand(3, *SHAPE)
    grey = torch.full((60, *SHAPE), 0.5)
    shown = Imitation(lambda images: images, rests)(grey, torch.Generator().manual_seed(0)).flatten(1)
    assert torch.equal(shown.amin(1), shown.amax(1))
    assert {round(value, 1) for value in shown[:, 0].tolist()} == {0.4, 0.5, 0.6}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), noise=st.floats(0, 1), count=st.integers(1, 4))
def test_imitated_images_are_images_with_errors_of_the_same_size(seed, noise, count):
    rng = torch.Generator().manual_seed(seed)
    exact = pictures(5, seed).images
    inverted = (exact + noise * torch.randn(exact.shape, generator=rng)).clamp(0, 1)
    shown = Imitation.of(exact, inverted)(pictures(count, seed + 1).images, rng)
    assert shown.shape == (count, *SHAPE)
    assert ((shown >= 0) & (shown <= 1)).all()
    errors = [(shown - pictures(count, seed + 1).images).square().mean(), (inverted - exact).square().mean()]
    assert errors[0] < 4 * errors[1] + 1e-2


@pytest.mark.parametrize("how", [SINGLE, LocalSettings(batch_norm="freeze")])
def test_played_clients_are_inverted_by_the_same_attack_without_their_encodings(how):
    seen, asked = look(how=how), []

    def invert(played, rng):
        asked.append(played)
        images = torch.full((played.num_targets, played.num_examples, *SHAPE), 0.5)
        return Reconstruction(images, torch.zeros(images.shape[:2]), torch.zeros(5), torch.zeros(5) > 0)

    imitate = imitated(invert, seen, 5, torch.Generator().manual_seed(0))
    (played,) = asked
    assert played.num_targets == 5
    assert played.num_examples == seen.num_examples
    assert played.labels.shape[2] == 3  # mixed as the defence does, so labels are soft
    assert not played.knows(Knowledge.ENCODINGS)
    assert torch.allclose(imitate(pictures(3, 5).images, torch.Generator()), torch.full((3, *SHAPE), 0.5), atol=1e-3)


def test_what_an_exact_inversion_returns_is_left_as_it_is():
    imitate = imitated(first_layer, look(), 6, torch.Generator().manual_seed(0))
    images = pictures(4, 6).images
    assert torch.allclose(imitate(images, torch.Generator()), images, atol=2e-2)


def test_the_worst_by_their_loss_and_those_without_a_guess_are_left_out():
    seen = look()

    def invert(played, rng):
        found = first_layer(played, rng)
        images = found.images.clone()
        images[0], images[1] = 0.0, torch.nan
        return Reconstruction(images, found.labels, torch.tensor([9.0, 1.0, 1.0, 2.0]), found.converged)

    rng = torch.Generator().manual_seed(0)
    assert imitated(invert, seen, 4, rng, keep=0.75).rests.abs().max() < 2e-2
    assert imitated(invert, seen, 4, rng, keep=1.0).rests.abs().max() > 0.2
    nothing = imitated(lambda s, r: _blank(first_layer(s, r)), seen, 4, rng)
    assert nothing is None


def _blank(found):
    return Reconstruction(found.images * torch.nan, found.labels, found.loss, found.converged)


def test_least_loss_by_hand():
    loss = torch.tensor([0.3, 0.1, torch.nan, 0.2])
    assert least_loss(loss, 0.25, fewest=2).tolist() == [False, True, False, True]
    assert least_loss(torch.ones(3), 0.3, fewest=1).all()


def test_why_it_can_not_rehearse():
    assert unrehearsable(look()) == ""
    assert "4 public images" in unrehearsable(look(public=3))
    several = LocalSettings(algorithm="fedavg", batch_size=2, batch_norm="freeze")
    assert "several local steps" in unrehearsable(look(how=several, rounds=1))
    with pytest.raises(ThreatModelError, match="num-examples"):
        unrehearsable(look(grants=()))


def test_a_filter_is_the_least_squares_solution():
    rng = torch.Generator().manual_seed(0)
    known = torch.rand(8, 2, 6, 6, generator=rng)
    wanted = torch.stack([known[:, 1], 1 - known[:, 0]], 1)
    assert torch.allclose(learned_filter(known, wanted)(known), wanted, atol=1e-2)
