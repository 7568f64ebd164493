from dataclasses import replace

import pytest
import torch

from gradveil.attacks import build_attack
from gradveil.attacks.encodings import Encodings
from gradveil.attacks.unmix import Unmix
from gradveil.defences import Countermove, build_defence
from gradveil.defences.mixup import Mixup
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.federated.protocol import ONE_GRADIENT, LocalSettings, Protocol
from gradveil.metrics import align
from gradveil.models import create_model
from gradveil.threat import Knowledge, PublicKnowledge, Reconstruction, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch
from tests.attacks.parts.test_unmixing import smooth
from tests.attacks.scene import psnr

SHAPE = (2, 10, 10)
GRANTS = ("encodings", "num-examples", "public-data", "labels")


def pictures(count, seed):
    labels = torch.arange(count) % 4
    return Batch((smooth(count, seed) + 1) / 2, labels, torch.zeros(count) > 0)


def look(defence, rounds=30, clients=1, grants=GRANTS, adaptive=True, how=ONE_GRADIENT):
    network = create_model("mlp:hidden=20", SHAPE, 4, 0).eval()
    private = [pictures(5, 20 + client) for client in range(clients)]
    threat = ThreatModel.of(*grants, *["defence"] * adaptive)
    seen = observe(
        network,
        private,
        threat=threat,
        num_classes=4,
        defence=build_defence(defence),
        protocol=Protocol(how, rounds=rounds),
        public=PublicKnowledge(pictures(200, 50)),
        federation=Federation(aux=pictures(30, 51)),
    )
    return torch.stack([batch.images for batch in private]), private, seen


def quality(truth, result):
    return torch.stack([psnr(t, align(t, g)).mean() for t, g in zip(truth, result.images, strict=True)])


@pytest.mark.parametrize(("defence", "gain"), [("mixup:k=3", 15), ("instahide:k=3", 3)])
def test_it_reconstructs_far_better_than_the_encodings(defence, gain):
    truth, private, seen = look(defence)
    _, _, blind = look(defence, adaptive=False)
    rng = torch.Generator().manual_seed(0)
    encoded = Encodings()(blind, rng)
    assert encoded.images.shape == truth.shape
    decoded = Unmix(train=30, width=8, restarts=2, rounds=20)(seen, rng)
    assert decoded.images.shape == truth.shape
    assert (quality(truth, decoded) > quality(truth, encoded) + gain).all()
    if defence.startswith("mixup"):
        order = torch.cdist(truth[0].flatten(1), decoded.images[0].flatten(1)).argmin(1)
        assert torch.equal(decoded.labels[0][order], private[0].labels)
        assert decoded.converged.all()


def test_a_known_defence_is_decoded_after_any_attack_and_clients_stay_apart(monkeypatch):
    quick = {"unmix": Countermove(decode=("unmix:train=40,width=8,restarts=4,rounds=20",))}
    monkeypatch.setattr(Mixup, "adaptive", lambda self, arrived: quick)
    truth, _, seen = look("mixup:k=3", rounds=20, clients=2)
    rng = torch.Generator().manual_seed(0)
    result = build_attack("encodings")(seen, rng)
    own = quality(truth, result)
    crossed = quality(truth.flip(0), result)
    assert (own > crossed + 5).all()
    assert (own > 20).all()


def test_single_images_a_round_are_enough():
    how = LocalSettings(algorithm="fedsgd", batch_size=1, batch_norm="freeze")
    truth, _, seen = look("mixup:k=2,pool=data", rounds=120, how=how)
    assert seen.num_examples == 1
    assert seen.num_images == 5
    assert seen.labels.shape == (120, 1, 4)
    result = Unmix(train=30, width=8, restarts=2, rounds=20)(seen, torch.Generator().manual_seed(0))
    assert result.images.shape == truth.shape
    assert quality(truth, result) > 20


def test_public_images_in_the_mixtures_are_noise_to_it():
    truth, _, seen = look("instahide:k=3,pool=public,flip=0", rounds=40)
    _, _, blind = look("instahide:k=3,pool=public,flip=0", rounds=40, adaptive=False)
    rng = torch.Generator().manual_seed(0)
    decoded = Unmix(train=40, width=8, restarts=2, rounds=20)(seen, rng)
    assert quality(truth, decoded) > quality(truth, Encodings()(blind, rng)) + 0.5


def test_the_reason_for_not_decoding_is_reported():
    _, _, few = look("mixup:k=2", rounds=1)
    rng = torch.Generator()
    assert "unmix needs several rounds" in Unmix()(few, rng).why[0]
    assert not any(Unmix()(few, rng).answers)
    _, _, other = look("ats", rounds=4)
    assert "unmix needs mixup or instahide" in Unmix()(other, rng).why[0]
    _, _, seen = look("mixup:k=2", rounds=2, grants=("encodings", "num-examples"))
    assert "unmix needs public-data" in Encodings()(seen, rng).why[0]
    with pytest.raises(ThreatModelError, match="public-data"):
        Unmix()(seen, rng)


def test_another_defence_does_not_change_the_guesses():
    truth, _, seen = look("none", rounds=1)
    assert quality(truth, Unmix()(seen, torch.Generator())) == torch.inf


def test_the_attack_before_it_is_a_setting():
    attack = build_attack("unmix:inner=gs:iterations=5;tv=0.01,train=10,restarts=2,rounds=4")
    assert attack.needs >= {"num-examples", "public-data", "defence"}
    assert "encodings" not in attack.needs
    _, _, seen = look("mixup:k=2", rounds=3, grants=("num-examples", "public-data"))
    result = attack(seen, torch.Generator().manual_seed(0))
    assert result.images.shape == (1, 5, *SHAPE)
    with pytest.raises(ConfigError, match="inner must be an attack that guesses"):
        build_attack("unmix:inner=unmix")
    with pytest.raises(ConfigError, match="rounds"):
        build_attack("unmix:rounds=0")
    with pytest.raises(ConfigError, match="keep"):
        build_attack("unmix:keep=0")
    with pytest.raises(ConfigError, match="rehearsals"):
        build_attack("unmix:rehearsals=-1")


QUICK = Unmix(train=30, width=8, restarts=2, rounds=20)


def inverted(seen, worst, seed=0):
    """Return guesses of the encodings, every fifth with noise of size ``worst``, and losses that tell."""
    rng = torch.Generator().manual_seed(seed)
    found = Encodings().run(seen, rng)
    sizes = torch.where(torch.arange(seen.num_targets) % 5 == 0, worst, 0.01)
    noise = torch.randn(found.images.shape, generator=rng) * sizes.view(-1, 1, 1, 1, 1)
    return replace(found, images=(found.images + noise).clamp(0, 1), loss=sizes)


def test_the_worst_guesses_by_their_loss_are_left_out():
    truth, _, seen = look("mixup:k=3")
    found = inverted(seen, 0.5)
    scores = {keep: quality(truth, replace(QUICK, keep=keep).decode(found, seen, rng_of(0))) for keep in (0.75, 1.0)}
    assert scores[0.75] > scores[1.0] + 2
    equal = replace(found, loss=torch.zeros_like(found.loss))
    all_of_them = quality(truth, QUICK.decode(equal, seen, rng_of(0)))
    assert torch.equal(all_of_them, scores[1.0])


def test_soft_labels_and_granted_shares_help():
    truth, _, seen = look("mixup:k=3", rounds=4, grants=(*GRANTS, "mixing"))
    found = inverted(seen, 0.02)
    views = {
        "blind": seen.without(Knowledge.LABELS, Knowledge.ENCODINGS, Knowledge.MIXING),
        "labels": seen.without(Knowledge.ENCODINGS, Knowledge.MIXING),
        "mixing": seen,
    }
    scores = {name: quality(truth, QUICK.decode(found, view, rng_of(0))) for name, view in views.items()}
    assert scores["mixing"] > 25
    assert scores["labels"] > 20
    assert scores["blind"] < scores["labels"] - 2, scores


def faded(seen, rng):
    """Invert updates of one image by the first layer, with half the contrast, stripes and noise."""
    weight, bias = list(seen.gradients.values())[:2]
    rows, updates = bias.abs().argmax(1), torch.arange(len(bias))
    images = (weight[updates, rows] / bias[updates, rows, None]).view(-1, 1, *SHAPE)
    stripes = torch.randn(len(images), 1, SHAPE[0], 1, SHAPE[2], generator=rng)
    noise = torch.randn(images.shape, generator=rng)
    images = (0.25 + 0.5 * images + 0.1 * stripes + 0.05 * noise).clamp(0, 1)
    nothing = torch.zeros(len(images))
    return Reconstruction(images, torch.full((len(images), 1), -1), nothing, nothing == 0, ("",) * len(images))


def look_singly(defence="mixup:k=2,pool=data", grants=("num-examples", "public-data")):
    how = LocalSettings(algorithm="fedsgd", batch_size=1, batch_norm="freeze")
    return look(defence, rounds=60, how=how, grants=grants)


@pytest.mark.parametrize("grants", [("num-examples", "public-data"), ("num-examples", "public-data", "labels")])
def test_rehearsed_on_inverted_public_images_it_corrects_the_errors_of_inversions(grants):
    truth, _, seen = look_singly(grants=grants)
    found = faded(seen, rng_of(1))
    scores = [
        quality(truth, replace(QUICK, rehearsals=number).decode_after(faded, found, seen, rng_of(0)))
        for number in (0, 8)
    ]
    assert scores[1] > scores[0] + 1.5, scores


@pytest.mark.parametrize("defence", ["mixup:k=2,pool=data", "instahide:k=2,pool=data"])
def test_without_rehearsals_or_with_granted_encodings_it_learns_from_exact_mixtures(defence):
    _, _, seen = look_singly(defence)
    found, quick = faded(seen, rng_of(1)), replace(QUICK, train=3, restarts=1, rounds=3)
    exact = quick.decode(found, seen, rng_of(0)).images
    same = [
        replace(quick, rehearsals=0).decode_after(faded, found, seen, rng_of(0)),
        replace(quick, rehearsals=8).decode_after(None, found, seen, rng_of(0)),
    ]
    assert all(torch.equal(one.images, exact) for one in same)
    other = replace(quick, rehearsals=2).decode_after(faded, found, seen, rng_of(0))
    assert other.images.isfinite().all()
    assert not torch.equal(other.images, exact)


def test_an_attack_that_inverts_is_rehearsed_and_granted_encodings_are_not():
    _, _, seen = look("mixup:k=2", rounds=3)
    short = "train=3,width=4,restarts=1,rounds=3"
    inverted = [build_attack(f"unmix:inner=gs:iterations=2,{short},rehearsals={n}")(seen, rng_of(0)) for n in (0, 2)]
    granted = [build_attack(f"unmix:{short},rehearsals={n}")(seen, rng_of(0)) for n in (0, 2)]
    assert not torch.equal(inverted[0].images, inverted[1].images)
    assert torch.equal(granted[0].images, granted[1].images)
    few = seen.with_public(seen.public_data[slice(0, 4)])
    result = replace(QUICK, train=3, rehearsals=2).decode_after(faded, Encodings().run(seen, rng_of(0)), few, rng_of(0))
    assert "not rehearsed: a played client needs 5 public images" in result.why[0]


def rng_of(seed):
    return torch.Generator().manual_seed(seed)
