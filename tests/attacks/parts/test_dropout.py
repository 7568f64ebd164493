"""Dropout in a client's single step: masks are read off the gradient of one image, and searched for several."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from gradveil.attacks import build_attack
from gradveil.attacks.parts.dropout import SURE, Masked, with_masks
from gradveil.attacks.parts.local_training import replaced_outputs, replay_of
from gradveil.attacks.parts.search import Search
from gradveil.federated.protocol import LocalSettings
from gradveil.threat import Known
from gradveil.threat.received import received

HOW = LocalSettings(epochs=1, batch_size=0, batch_norm="freeze")


def network():
    torch.manual_seed(3)
    layers = nn.Flatten(), nn.Linear(64, 40), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(40, 4)
    return nn.Sequential(*layers)


def step(net, images, labels, how=HOW):
    """Return what a server sees of one gradient in training mode, and the units that Dropout kept."""
    net.train()
    kept = []
    net[3].register_forward_hook(lambda layer, inputs, output: kept.append(output != 0))
    torch.manual_seed(5)
    loss = nn.functional.cross_entropy(net(images), labels)
    gradient = dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters())), strict=True))
    known = Known(labels=labels, local_steps=how)
    shape, size = tuple(images.shape[1:]), len(images)
    return received(net, gradient, shape=shape, num_classes=4, kind="gradient", num_examples=size, known=known), kept[0]


def images(count):
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def masked(seen):
    return with_masks(Search(), replay_of(seen, "unroll", torch.Generator()), seen)


def test_the_mask_of_one_image_is_read_off_the_next_layer():
    seen, kept = step(network(), images(1), torch.tensor([2]))
    search, replay = masked(seen)
    assert isinstance(replay.network[3], Masked)
    assert torch.equal(search.move.outputs["3.logits"], torch.where(kept, SURE, -SURE))
    assert not search.move.unknowns
    with replaced_outputs(replay.network, search.move.outputs, 1):
        found = replay(images(1), torch.tensor([2]), {}, search.move.outputs)
    for name, wanted in seen.mean_gradients.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.AdamW])
def test_weight_decay_does_not_hide_the_mask(optimiser):
    net, decay, lr = network(), 0.01, 0.05
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    kept = []
    net.train()[3].register_forward_hook(lambda layer, inputs, output: kept.append(output != 0))
    steps = optimiser(net.parameters(), lr=lr, weight_decay=decay)
    nn.functional.cross_entropy(net(images(1)), torch.tensor([2])).backward()
    before = deepcopy(net)
    before.load_state_dict(start)
    steps.step()
    change = {name: p.detach() - start[name] for name, p in net.named_parameters()}
    how = LocalSettings(epochs=1, batch_size=0, weight_decay=decay, optimiser=optimiser.__name__.lower())
    known = Known(labels=[2], local_steps=how)
    seen = received(before, change, shape=(1, 8, 8), num_classes=4, lr=lr, num_examples=1, known=known)
    search, _ = masked(seen)
    assert torch.equal(search.move.outputs["3.logits"], torch.where(kept[0], SURE, -SURE))


def test_masks_of_several_images_are_searched_from_the_average():
    seen, kept = step(network(), images(3), torch.tensor([0, 1, 2]))
    search, replay = masked(seen)
    assert not search.move.outputs
    first = search.move.unknowns["3.logits"](2, torch.Generator().manual_seed(0))
    assert first.shape == (2, 3 * 40)
    torch.testing.assert_close(first, torch.zeros(2, 120), atol=0.1, rtol=0)  # the logit of one half
    true = torch.where(kept, SURE, -SURE).reshape(1, -1)
    found = replay(images(3), torch.tensor([0, 1, 2]), {}, {"3.logits": true})
    for name, wanted in seen.mean_gradients.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-6)


def test_batch_statistics_and_masks_go_together():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.BatchNorm1d(40), nn.Dropout(0.5), nn.Linear(40, 4))
    seen, kept = step(net, images(3), torch.tensor([0, 1, 2]), LocalSettings(epochs=1, batch_size=0))
    _, replay = masked(seen)
    found = replay(images(3), torch.tensor([0, 1, 2]), {}, {"3.logits": torch.where(kept, SURE, -SURE).reshape(1, -1)})
    for name, wanted in seen.mean_gradients.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-5)


def test_whole_channels_are_read_off_a_convolution():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Dropout2d(0.5), nn.Conv2d(6, 2, 3), nn.Flatten(), nn.Linear(32, 4)
    )
    net.train()
    torch.manual_seed(1)
    loss = nn.functional.cross_entropy(net(images(1)), torch.tensor([1]))
    gradient = dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters())), strict=True))
    known = Known(local_steps=HOW, labels=[1])
    seen = received(net, gradient, shape=(1, 8, 8), num_classes=4, kind="gradient", num_examples=1, known=known)
    search, replay = masked(seen)
    assert 0 < int((search.move.outputs["2.logits"] > 0).sum()) < 6
    found = replay(images(1), torch.tensor([1]), {}, search.move.outputs)
    torch.testing.assert_close(found["0.weight"], seen.mean_gradients["0.weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", [None, LocalSettings(epochs=1, batch_size=0, batch_norm="freeze", dropout="off")])
def test_dropout_that_is_off_or_not_stated_is_left_alone(how):
    seen, _ = step(network(), images(1), torch.tensor([2]), how)
    search, replay = masked(seen)
    assert not search.move.outputs
    assert not search.move.unknowns
    assert not any(isinstance(layer, Masked) for layer in replay.network.modules())


def test_knowing_that_dropout_was_on_recovers_the_image():
    net = network()
    errors = {}
    for dropout in ("on", "off"):
        how = LocalSettings(epochs=1, batch_size=0, batch_norm="freeze", dropout=dropout)
        seen, _ = step(deepcopy(net), images(1), torch.tensor([2]), how)
        guess = build_attack("gs:iterations=300,tv=0")(seen, torch.Generator().manual_seed(0))
        errors[dropout] = float((guess.images[0] - images(1)).square().mean())
    assert errors["on"] < 0.001 < 0.01 < errors["off"]
