import torch

from gradveil.attacks.encodings import Encodings
from gradveil.defences import build_defence
from gradveil.federated.protocol import Protocol
from tests.attacks.scene import run, scene

GRANTS = ("num-examples", "encodings")


def test_it_shows_what_the_network_saw():
    truth, labels, seen = scene(grants=GRANTS, defence=build_defence("ats:policy=29"))  # 29 inverts
    result = run(Encodings(), seen)
    assert torch.allclose(result.images, 1 - truth)
    assert torch.equal(result.labels, labels)


def test_of_several_rounds_one_is_kept_and_labels_are_the_likeliest():
    truth, _, seen = scene(size=4, grants=GRANTS, defence=build_defence("mixup:k=2"), protocol=Protocol(rounds=3))
    assert seen.num_targets == 6
    result = run(Encodings(), seen)
    assert result.images.shape == truth.shape
    assert result.labels.shape == (2, 4)
