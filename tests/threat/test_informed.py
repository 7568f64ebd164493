"""The best informed attacker: what is left when all other images are known."""

import copy

import pytest
import torch

from gradveil.attacks import Scene, build_attack
from gradveil.defences.parts.grid import grid_of
from gradveil.defences.veil import Veil
from gradveil.federated.client import Broadcast, Device, Streams, play_client
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.models import create_model
from gradveil.threat import ThreatModel
from gradveil.threat.informed import alone
from gradveil.threat.observe import Federation, observe
from gradveil.threat.seen import Seen
from gradveil.types import Batch

LR = 0.1


def make_batch(count):
    rng = torch.Generator().manual_seed(3)
    return Batch(torch.rand(count, 1, 12, 12, generator=rng), torch.arange(count) % 4, torch.zeros(count) > 0)


def played(network, data, defence):
    net = FlatModel(copy.deepcopy(network))  # it trains
    broadcast = Broadcast(net.shared_vector(dict(network.state_dict())), LR, 1, {})
    how = LocalSettings(algorithm="fedsgd", batch_size=0)
    update = play_client(net, Device(data, 0), broadcast, defence, how, Streams.of(7, 0, 1)).update
    return Seen(0, data, update, {}, {}, {}, data)


def test_what_is_left_is_the_update_of_a_client_with_that_image_alone_noise_included():
    network, data, defence = create_model("patches:filters=4", (1, 12, 12), 4, 0), make_batch(6), Veil(rounds=4)
    whole = played(network, data, defence)
    others = defence.contributions(network, data[torch.tensor([0, 1, 3, 4, 5])])
    left = alone(whole, 2, others, LR)
    single = played(network, data[torch.tensor([2])], defence)
    step = LR * grid_of(defence._std, bound=defence.clip)  # sums are rounded to whole steps
    apart = left.update.tensors["head.weight"] - single.update.tensors["head.weight"]
    assert float(apart.abs().max()) < 3 * step
    assert step < 0.01 * LR * defence._std
    assert left.update.num_examples == single.update.num_examples == 1
    assert torch.equal(left.private.images, data.images[2:3])


def test_it_is_not_that_of_another_image():
    network, data = create_model("patches:filters=4", (1, 12, 12), 4, 0), make_batch(6)
    quiet = Veil(mu=1e6, rounds=4)
    whole = played(network, data, quiet)
    wrong = quiet.contributions(network, data[torch.tensor([1, 2, 3, 4, 5])])
    left, single = alone(whole, 2, wrong, LR), played(network, data[torch.tensor([2])], quiet)
    apart = left.update.tensors["head.weight"] - single.update.tensors["head.weight"]
    assert float(apart.norm()) > 0.1 * LR * quiet.clip


@pytest.mark.parametrize("spec", ["imprint", "trap-weights"])
def test_rows_before_the_network_get_no_more_than_the_bound(spec):
    """A malicious server puts a block before the frozen features; without noise it reads the image off exactly."""
    attack, data = build_attack(spec), make_batch(1)
    network = create_model("patches:filters=4", (1, 12, 12), 4, 0)
    torch.nn.init.normal_(network.head.weight, generator=torch.Generator().manual_seed(0))  # a head of zeros stops it
    scene = Scene((1, 12, 12), 4)

    def errors(defence):
        seen = observe(
            network,
            [data],
            threat=ThreatModel.of("num-examples", "alters-model"),
            num_classes=4,
            defence=defence,
            federation=Federation(alter=lambda net: attack.alter(net, scene, torch.Generator().manual_seed(0))),
        )
        guess = attack(seen, torch.Generator().manual_seed(0)).images[0]
        return float((guess.nan_to_num(0.5) - data.images).square().mean())

    altered = attack.alter(copy.deepcopy(network), scene, torch.Generator().manual_seed(0))
    veil = Veil(mu=3, rounds=10)
    sent = veil.contributions(altered.train(), data)
    assert float(torch.cat([tensor.flatten() for tensor in sent.values()]).norm()) <= veil.clip
    assert errors(None) < 1e-3
    assert errors(veil) > 0.03  # of images whose pixels vary by 1 / 12
