from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.attacks.parts.representations import (
    ROWS,
    class_representations,
    linear_chain,
    trained_classes,
)
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.federated.protocol import ONE_GRADIENT, LocalSettings, Protocol
from gradveil.models import create_model
from gradveil.networks.watch import inputs_of
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.threat.received import received
from gradveil.types import Batch


def clients(labels, seed=0, side=12):
    """Return clients with these labels (rows of equal length); images of one class are similar."""
    rng = torch.Generator().manual_seed(seed)
    kinds = torch.rand(10, 1, side, side, generator=rng)
    return [
        Batch(
            (kinds[row] + 0.1 * torch.randn(len(row), 1, side, side, generator=rng)).clamp(0, 1),
            torch.tensor(row),
            torch.zeros(len(row)) > 0,
        )
        for row in labels
    ]


def look(model, private, how=None, lr=0.01, seed=1):
    network = create_model(model, (1, 12, 12), 6, seed=seed).eval()
    return network, observe(
        network, private, threat=ThreatModel.of(), num_classes=6, protocol=Protocol(how or ONE_GRADIENT, lr)
    )


def true_representations(network, batch, chain):
    """Return the true mean input of each layer by class, (classes present, features), which no attack knows."""
    with torch.no_grad(), inputs_of(network, chain) as reached:
        network(batch.images)
    return {name: {c: reached[name][batch.labels == c].mean(0) for c in set(batch.labels.tolist())} for name in chain}


def correlation(one, two):
    return float(torch.corrcoef(torch.stack([one, two]))[0, 1])


def test_the_change_of_a_linear_layer_by_hand():
    """Two classes, zero weights, so both have p = 1/2: class 0 with r = (2, 0), class 1 with r = (0, 4)."""
    network = nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(2, 2)))
    nn.init.zeros_(network.fc.weight)
    nn.init.zeros_(network.fc.bias)
    images = torch.tensor([[2.0, 0.0], [0.0, 4.0]]).view(2, 1, 1, 2)
    private = [Batch(images, torch.tensor([0, 1]), torch.zeros(2) > 0)]
    seen = observe(network, private, threat=ThreatModel.of(), num_classes=2)
    assert seen.updates["fc.weight"][0].tolist() == [[0.5, -1.0], [-0.5, 1.0]]
    both = torch.ones(1, 2) > 0
    found = class_representations(seen, both)["fc"][0]
    scale = 1.25**0.5
    assert found.tolist() == [pytest.approx([0.5 / scale, -1 / scale]), pytest.approx([-0.5 / scale, 1 / scale])]


def test_rows_are_taken_by_what_a_class_has_more_of_than_others_and_turned_by_the_sign_of_their_error():
    """A hidden layer of three: the first unit is class 0's, the second class 1's with a negative error."""
    network = nn.Sequential(OrderedDict(flatten=nn.Flatten(), one=nn.Linear(2, 3), act=nn.ReLU(), two=nn.Linear(3, 2)))
    change = {
        "two.weight": torch.tensor([[3.0, 0.0, 4.0], [0.0, 3.0, 4.0]]),
        "two.bias": torch.tensor([0.1, 0.1]),
        "one.weight": torch.tensor([[1.0, 2.0], [-3.0, 0.0], [9.0, 9.0]]),
        "one.bias": torch.tensor([1.0, -1.0, 1.0]),
    }
    seen = received(network, change, shape=(1, 1, 2), num_classes=2)
    found = class_representations(seen, rows="elements")
    assert found["two"][0, 0].tolist() == pytest.approx([0.6, 0.0, 0.8])
    assert found["one"][0, 0].tolist() == pytest.approx([1 / 5**0.5, 2 / 5**0.5])
    assert found["one"][0, 1].tolist() == pytest.approx([1.0, 0.0])


@settings(max_examples=25, deadline=None)
@given(
    label=st.integers(0, 5),
    seed=st.integers(0, 1000),
    model=st.sampled_from(["mlp:hidden=20/10", "mlp:hidden=20/10,activation=tanh", "lenet5:activation=sigmoid"]),
    rows=st.sampled_from(ROWS),
)
def test_one_image_is_exact_at_every_layer_up_to_a_factor(label, seed, model, rows):
    private = clients([[label]], seed)
    network, seen = look(model, private, seed=seed)
    found, chain = class_representations(seen, rows=rows), linear_chain(seen)
    truth = true_representations(network, private[0], chain)
    for name in chain:
        inferred, wanted = found[name][0, label], truth[name][label]
        assert torch.nn.functional.cosine_similarity(inferred, wanted, dim=0) > 1 - 1e-4
        assert found[name][0].isfinite().all(1).nonzero().flatten().tolist() == [label]


@settings(max_examples=25, deadline=None)
@given(labels=st.lists(st.integers(0, 5), min_size=4, max_size=4), seed=st.integers(0, 1000))
def test_the_classes_of_a_single_step_are_found_exactly_on_a_fresh_network(labels, seed):
    _, seen = look("lenet5", clients([labels], seed), seed=seed)
    weight, bias = seen.updates["fc3.weight"], seen.updates["fc3.bias"]
    assert set(trained_classes(weight, bias)[0].nonzero().flatten().tolist()) == set(labels)
    assert set(trained_classes(weight, None)[0].nonzero().flatten().tolist()) == set(labels)


def test_most_classes_are_found_after_many_steps():
    labels = [[0, 1] * 8, [2, 5] * 8, [3, 4] * 8, [1, 3] * 8]
    _, seen = look("lenet5", clients(labels), LocalSettings(epochs=10, batch_size=4))
    found = trained_classes(seen.updates["fc3.weight"], seen.updates["fc3.bias"])
    right = [set(row.nonzero().flatten().tolist()) == set(own) for row, own in zip(found, labels, strict=True)]
    assert sum(right) >= 3


def test_a_zero_update_has_no_class():
    assert not trained_classes(torch.zeros(1, 3, 2), torch.zeros(1, 3)).any()


@pytest.mark.parametrize("how", [None, LocalSettings(epochs=1, batch_size=8)])
def test_two_classes_are_separated_at_every_layer(how):
    private = clients([[0, 3] * 8, [2, 5] * 8])
    network, seen = look("lenet5", private, how)
    found, chain = class_representations(seen), linear_chain(seen)
    for target, batch in enumerate(private):
        for name, truth in true_representations(network, batch, chain).items():
            for label, wanted in truth.items():
                (other,) = (truth[c] for c in truth if c != label)
                alike = correlation(found[name][target, label], wanted)
                assert alike > 0.8
                assert alike > correlation(found[name][target, label], other)


def test_errors_go_back_through_the_weights_and_past_units_that_are_on_by_hand():
    """Class 0 has r = (5, 0) and turns on the first unit, class 1 (0, 7) and the second; the third is always off."""
    network = nn.Sequential(OrderedDict(flatten=nn.Flatten(), one=nn.Linear(2, 3), act=nn.ReLU(), two=nn.Linear(3, 2)))
    with torch.no_grad():
        network.two.weight.copy_(torch.tensor([[2.0, -1.0, 3.0], [1.0, 1.0, -3.0]]))
        network.one.bias.copy_(torch.tensor([0.0, 0.0, -100.0]))
    back = [(2.0 - 1.0) / 2, (1.0 + 1.0) / 2]  # W^T (e_i - 1/2) of the one unit that is on
    change = {
        "two.weight": torch.tensor([[1.0, -0.2, 0.0], [-0.2, 1.0, 0.0]]),
        "two.bias": torch.tensor([0.1, 0.1]),
        "one.weight": torch.tensor([[back[0] * 5, 0.0], [0.0, back[1] * 7], [0.0, 0.0]]),
        "one.bias": torch.tensor([*back, 0.0]),
    }
    found = class_representations(received(network, change, shape=(1, 1, 2), num_classes=2))["one"][0]
    assert found[0].tolist() == pytest.approx([1.0, 0.0])
    assert found[1].tolist() == pytest.approx([0.0, 1.0])


def test_an_unknown_method_is_refused():
    _, seen = look("logistic", clients([[1]]))
    with pytest.raises(UnknownNameError, match="rows"):
        class_representations(seen, rows="guesses")


def test_the_chain_is_the_linear_layers_at_the_end():
    for model, names in (("lenet5", ["fc1", "fc2", "fc3"]), ("convnet:width=2", ["linear"]), ("logistic", ["linear"])):
        _, seen = look(model, clients([[1]]))
        assert linear_chain(seen) == names
        assert not any(layer._forward_hooks for layer in seen.network.modules())


def test_a_layer_with_parameters_between_ends_the_chain():
    network = nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), one=nn.Linear(4, 3), norm=nn.LayerNorm(3), act=nn.ReLU(), two=nn.Linear(3, 2))
    )
    change = {name: torch.rand_like(p) for name, p in network.named_parameters()}
    assert linear_chain(received(network, change, shape=(1, 2, 2), num_classes=2)) == ["two"]


def test_a_network_without_a_linear_layer_is_refused():
    network = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten())
    change = {name: torch.rand_like(p) for name, p in network.named_parameters()}
    with pytest.raises(ConfigError, match="ends in a Linear layer"):
        class_representations(received(network, change, shape=(1, 2, 2), num_classes=2))
