from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.attacks.parts import separation
from gradveil.attacks.parts.separation import (
    KEEP,
    PROJECT,
    LastLayer,
    Told,
    by_channel,
    by_weight,
    projected,
    split_last,
    stacked,
    told_apart,
    unreached,
)
from gradveil.defences import Defence
from gradveil.networks.grads import example_gradients, layer_inputs
from tests.attacks.scene import scene

SHARE = 0.3


class Decoy(Defence):
    """A defence that adds the gradient of a noise image per private image, with a mixture of both labels."""

    def on_gradient(self, gradient, batch, client):
        image, labels = decoy(batch.labels, client.id, batch.images.shape[-1])
        added = example_gradients(client.model, image, labels)
        return {name: tensor + added[name].mean(0) for name, tensor in gradient.items()}


def decoy(labels, number, side=8):
    rng = torch.Generator().manual_seed(number)
    other = F.one_hot((labels + 1) % 4, 4).float()
    return 3 * torch.randn(len(labels), 1, side, side, generator=rng), (1 - SHARE) * other + SHARE * F.one_hot(
        labels, 4
    )


def hidden(**how):
    grants = how.pop("grants", ("num-examples", "labels"))
    truth, labels, seen = scene(targets=3, defence=Decoy(), grants=grants, **how)
    return truth[:, 0], labels[:, 0], seen


def test_the_last_layers_gradient_splits_into_private_image_and_decoy():
    truth, labels, seen = hidden()
    for target in range(3):
        mine = {name: tensor[target].double() for name, tensor in seen.mean_gradients.items()}
        private, other = split_last(LastLayer.of(mine, "fc"), "fc", seen, int(labels[target]), SHARE)
        images, mixed = decoy(labels[target : target + 1], target)
        with torch.no_grad():
            for half, image, label in (
                (private, truth[target : target + 1], F.one_hot(labels[target : target + 1], 4)),
                (other, images, mixed),
            ):
                features = layer_inputs(seen.network, ["fc"], image)[0][0].double()
                assert torch.allclose(half.inputs, features, rtol=1e-3, atol=1e-4)
                assert torch.allclose(half.error, (seen.network(image).softmax(1) - label)[0].double(), atol=1e-4)


def test_the_remainder_is_the_private_images_gradient():
    truth, labels, seen = hidden()
    found = stacked(seen.mean_gradients, told_apart(seen, seen.mean_gradients, SHARE))
    own = projected(example_gradients(seen.network, truth, labels), found)
    names = [name for name in found if not name.startswith((KEEP, PROJECT))]
    assert set(names) == set(seen.updates)
    for name in names:
        assert torch.allclose(own[name], found[name], rtol=1e-3, atol=1e-3 * float(found[name].abs().max())), name
    kept = {name for name in names if bool(found[KEEP + name].all())}
    assert {"fc.weight", "fc.bias", "conv3.weight", "conv3.bias"} <= kept
    assert bool(found["conv3.weight"].ne(0).any())


def test_a_network_that_is_no_chain_reveals_its_last_layer():
    truth, labels, seen = hidden(model="convnet:width=4", side=9)
    found = stacked(seen.mean_gradients, told_apart(seen, seen.mean_gradients, SHARE))
    last = [name for name in seen.updates if bool(found[KEEP + name].any())]
    assert last == list(seen.updates)[-2:]
    own = example_gradients(seen.network, truth, labels)
    assert torch.allclose(own[last[0]], found[last[0]], atol=1e-3 * float(found[last[0]].abs().max()))


def test_separation_is_skipped_if_it_is_impossible():
    _, _, unlabelled = hidden(grants=("num-examples",))
    assert not any(told_apart(unlabelled, unlabelled.mean_gradients, SHARE))
    _, _, batches = hidden(size=2)
    assert not any(told_apart(batches, batches.mean_gradients, SHARE))
    _, _, seen = hidden()
    without = {name: tensor for name, tensor in seen.mean_gradients.items() if name != "fc.bias"}
    assert not any(told_apart(seen, without, SHARE))
    seen.network.fc = nn.Linear(seen.network.fc.in_features, 5)
    assert not any(told_apart(seen, seen.mean_gradients, SHARE))


def test_a_gradient_of_rank_one_has_no_decoy_if_some_images_have_none():
    truth, labels, seen = hidden()
    alone = example_gradients(seen.network, truth, labels)
    mixed = {name: torch.cat([alone[name][:1], tensor[1:]]) for name, tensor in seen.mean_gradients.items()}
    assert [told is None for told in told_apart(seen, mixed, SHARE)] == [True] + [False] * (len(truth) - 1)
    told = told_apart(seen, mixed, SHARE, spares=True)
    found = stacked(mixed, told)
    for name, tensor in mixed.items():
        assert torch.allclose(found[name][0], tensor[0])
        assert bool(found[KEEP + name][0].all())
    guess = {name: torch.ones_like(tensor) for name, tensor in mixed.items()}
    assert all(torch.allclose(projected(guess, found)[name][0], guess[name][0]) for name in guess)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_a_projection_leaves_what_columns_do_not_reach(rows, columns, seed):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    left = unreached(matrix)
    assert torch.allclose(left @ matrix, torch.zeros_like(matrix), atol=1e-9)
    assert torch.allclose(left @ left, left, atol=1e-9)
    assert torch.allclose(left, left.T)
    assert torch.linalg.matrix_rank(left, atol=1e-6) == max(0, rows - columns)


def test_gradients_by_channel_and_back():
    for shape in ((2, 3, 4), (2, 3, 4, 5, 5)):
        gradient = torch.randn(shape)
        channels = by_channel(gradient)
        assert channels.shape[:2] == (2, 4)
        assert torch.equal(channels[1, 2], gradient[1, :, 2].flatten())
        assert torch.equal(by_weight(channels, gradient), gradient)


def test_a_search_that_explains_nothing_restarts(monkeypatch):
    _, labels, seen = hidden()
    monkeypatch.setattr(separation, "STARTS", 1)
    monkeypatch.setattr(separation, "STEPS", 12)

    def told(tries):
        monkeypatch.setattr(separation, "TRIES", tries)
        gradients = [{name: tensor[t].double() for name, tensor in seen.mean_gradients.items()} for t in range(3)]
        return [
            split_last(LastLayer.of(g, "fc"), "fc", seen, int(labels[t]), SHARE) is not None
            for t, g in enumerate(gradients)
        ]

    assert not all(told(1))
    assert all(told(60))


class Pruned(Decoy):
    """The same, after which the smaller half of each tensor's entries is set to zero."""

    def on_update(self, update, client):
        kept = {name: t * (t.abs() >= t.abs().flatten().quantile(0.4)) for name, t in update.tensors.items()}
        return replace(update, tensors=kept)


def test_the_last_layer_splits_although_it_was_pruned():
    truth, labels, seen = scene(
        targets=3, defence=Pruned(), grants=("num-examples", "labels"), model="lenet-dlg", side=8
    )
    found = told_apart(seen, seen.mean_gradients, SHARE, gaps=True)
    own = example_gradients(seen.network, truth[:, 0], labels[:, 0])
    weight, apart = own["fc.weight"], stacked(seen.mean_gradients, [told or Told() for told in found])
    split = [target for target, told in enumerate(found) if told is not None]
    assert split
    for target in split:
        keep = apart[f"{KEEP}fc.weight"][target]
        pruned = seen.mean_gradients["fc.weight"][target] == 0
        wanted = weight[target] * keep
        assert bool((pruned & (keep > 0)).any())  # entries that the server never saw
        assert float((apart["fc.weight"][target] - wanted).norm() / wanted.norm()) < 0.05
        assert not apart[f"{KEEP}conv3.weight"][target].any()
    assert not any(told_apart(seen, {n: torch.zeros_like(t) for n, t in seen.mean_gradients.items()}, SHARE, gaps=True))
