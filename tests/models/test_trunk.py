"""Frozen trunks: what is never trained or sent, and features that are remembered."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradveil.errors import ConfigError
from gradveil.federated.flat import FlatModel
from gradveil.models.trunk import (
    BIAS,
    FeatureMemo,
    FeatureNetwork,
    Trunk,
    fingerprint_of,
    frozen_names,
    image_hashes,
    learn_features,
    require_fingerprint,
    trunk_of,
)


class Doubling(Trunk):
    """Twice the pixels, and a count of the images that were computed."""

    def __init__(self) -> None:
        super().__init__(fingerprint_of("doubling"))
        self.register_buffer("factor", torch.tensor(2.0))
        self.weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.computed = 0

    def features(self, images: Tensor) -> Tensor:
        self.computed += len(images)
        return self.factor * images.flatten(1)


def network():
    return FeatureNetwork(Doubling(), 4, 3, takes_pixels=True)


def pictures(count, seed=0):
    return torch.rand(count, 1, 2, 2, generator=torch.Generator().manual_seed(seed))


def test_features_have_norm_one_and_a_constant():
    found = network().trunk(torch.tensor([[[[3.0, 0.0], [0.0, 4.0]]]]))
    assert torch.allclose(found, torch.tensor([[0.6, 0.0, 0.0, 0.8, BIAS]]))
    assert torch.equal(network().trunk(torch.zeros(1, 1, 2, 2)), torch.tensor([[0.0, 0.0, 0.0, 0.0, BIAS]]))


def test_only_the_head_is_broadcast_trained_and_sent():
    net = FlatModel(network())
    assert frozen_names(net.module) == {"trunk.factor", "trunk.weight"}
    assert net.shared_names == ["head.weight"]
    assert len(net.values) == len(net.gradients) == 15
    assert not net.has_private
    net.receive(torch.ones(15))
    assert float(net.module.trunk.factor) == 2


def test_a_trunk_stays_in_evaluation_mode():
    module = network().train()
    assert module.training
    assert not module.trunk.training


def test_known_features_are_not_computed_again():
    module, images = network(), pictures(40)
    memo = learn_features(module, module.trunk, images)
    plain, before = module.trunk(images), module.trunk.computed
    module.trunk.memo = memo
    assert torch.equal(module.trunk(images), plain)
    order = torch.randperm(40)[:7]
    assert torch.equal(module.trunk(images[order]), plain[order])
    assert module.trunk.computed == before
    other = pictures(3, seed=1)
    module.trunk(torch.cat([images[:1], other]))
    assert module.trunk.computed == before + 4
    assert len(memo.keys) == 40, "a memo only learns when it is asked to"


def test_gradients_by_the_image_are_never_remembered():
    module, images = network(), pictures(2)
    module.trunk.memo = learn_features(module, module.trunk, images)
    leaf = images.clone().requires_grad_()
    module.trunk(leaf)[:, 0].sum().backward()
    assert bool(leaf.grad.any())


def test_an_empty_memo_knows_nothing():
    assert FeatureMemo().find(pictures(1)) is None
    assert FeatureMemo().find(pictures(0)) is None
    assert len(learn_features(network(), Doubling(), pictures(0)).keys) == 0


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 35), st.integers(0, 2**31 - 1))
def test_hashes_are_of_the_content(place, seed):
    image = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
    changed = image.clone()
    changed.view(-1)[place] += 1e-3
    found = image_hashes(torch.cat([image, changed, image.clone(memory_format=torch.channels_last)])).tolist()
    assert found[0] == found[2] != found[1]


def test_another_trunk_is_refused():
    trunk = Doubling()
    require_fingerprint(trunk, trunk.fingerprint[:12].upper())
    require_fingerprint(trunk, "")
    with pytest.raises(ConfigError, match="must have the fingerprint '0000', got"):
        require_fingerprint(trunk, "0000")


def test_fingerprints_are_of_bytes_shapes_and_text():
    one = torch.arange(4.0)
    assert fingerprint_of("a", one) == fingerprint_of("a", copy.deepcopy(one))
    assert (
        len({fingerprint_of(*parts) for parts in (("a", one), ("b", one), ("a", one + 1), ("a", one.view(2, 2)))}) == 4
    )


def test_networks_without_a_trunk():
    assert trunk_of(torch.nn.Linear(2, 2)) is None
    assert frozen_names(torch.nn.Linear(2, 2)) == frozenset()


def test_a_copied_network_shares_the_features_but_learns_for_itself():
    one = network()
    images = pictures(5)
    one.trunk.memo = learn_features(one, one.trunk, images)
    other = copy.deepcopy(one)
    assert other.trunk.memo.features is one.trunk.memo.features
    other.trunk.memo.learns = True
    other(pictures(3, seed=1))
    assert len(other.trunk.memo.features) == 3
    assert len(one.trunk.memo.features) == 5
