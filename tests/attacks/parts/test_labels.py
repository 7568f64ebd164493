import pytest
import torch

from gradveil.attacks.parts.labels import bias_excess, counted, distinct, idlg, known_or_recovered, last_layer
from gradveil.errors import ConfigError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.metrics import label_accuracy
from gradveil.models import create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch


def look(labels, model="lenet-dlg", classes=6, grants=("num-examples",)):
    """Return what a server sees of clients with these labels."""
    rng = torch.Generator().manual_seed(3)
    network = create_model(model, (1, 12, 12), classes, seed=1).eval()
    private = [
        Batch(torch.rand(len(row), 1, 12, 12, generator=rng), torch.tensor(row), torch.zeros(len(row)) > 0)
        for row in labels
    ]
    return observe(network, private, threat=ThreatModel.of(*grants), num_classes=classes)


@pytest.mark.parametrize("model", ["lenet-dlg", "lenet5:activation=sigmoid", "mlp:hidden=9"])
def test_idlg_is_exact_for_one_example_and_features_that_are_not_negative(model):
    seen = look([[label] for label in range(6)], model)
    assert known_or_recovered(seen).tolist() == [[label] for label in range(6)]


def test_distinct_labels_are_found_and_too_many_are_refused():
    labels = [[0, 3, 5], [1, 2, 4]]
    seen = look(labels, "lenet-dlg:init=default")
    weight = seen.gradients[[name for name in seen.gradients if name.endswith("weight")][-1]]
    assert distinct(weight, 3).tolist() == labels
    with pytest.raises(ConfigError, match="classes"):
        distinct(weight, 7)


@pytest.mark.parametrize("labels", [[[0, 0, 0, 5]], [[1, 1, 2, 2, 3, 3, 3, 3]], [[2] * 10], [list(range(6)) * 2]])
def test_repeated_labels_and_more_examples_than_classes_are_counted(labels):
    found = known_or_recovered(look(labels))
    assert found.shape == (1, len(labels[0]))
    assert label_accuracy(torch.tensor(labels[0]), found[0]) >= 0.75


def test_granted_labels_are_taken():
    seen = look([[4, 1]], grants=("num-examples", "labels"))
    assert known_or_recovered(seen).tolist() == [[1, 4]]


def test_counts_by_hand_with_and_without_a_bias():
    prediction = torch.full((4,), 0.25)
    bias = prediction - torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    assert counted(torch.zeros(1, 4, 2), bias, 4, prediction).tolist() == [[0, 0, 1, 2]]
    weight = torch.tensor([[-3.0, -3.0, 3.0, 3.0]])[:, :, None]
    assert sorted(counted(weight, None, 2, prediction)[0].tolist()) == [0, 1]


def test_idlg_fails_as_stated_for_negative_features():
    weight = torch.tensor([[[1.0], [-2.0]]])  # label 0 with a feature of -1: its row is positive
    assert idlg(weight).tolist() == [1]


def test_labels_of_several_local_steps_are_counted_together():
    rng = torch.Generator().manual_seed(3)
    network = create_model("lenet-dlg", (1, 12, 12), 6, seed=1).eval()
    labels = [[0, 0, 0, 5, 5, 5, 1, 2], [4, 4, 4, 4, 3, 3, 3, 3]]
    private = [Batch(torch.rand(8, 1, 12, 12, generator=rng), torch.tensor(row), torch.zeros(8) > 0) for row in labels]
    how = LocalSettings(epochs=3, batch_size=2)
    grants = ThreatModel.of("num-examples", "local-steps")
    seen = observe(network, private, threat=grants, num_classes=6, protocol=Protocol(how, 0.01))
    found = known_or_recovered(seen)
    assert all(label_accuracy(torch.tensor(row), guess) >= 0.75 for row, guess in zip(labels, found, strict=True))


def test_a_bias_gradient_that_cross_entropy_cannot_make_is_noticed():
    seen = look([[2], [3]])
    usual = bias_excess(seen, seen.gradients)
    assert all(0.1 < excess <= 1 for excess in usual)
    summed = {name: 20 * tensor[:1] for name, tensor in seen.gradients.items()}
    assert bias_excess(seen, summed) == pytest.approx([20 * usual[0]])


@pytest.mark.parametrize("size", [1e9, 1e30])
def test_labels_of_extremely_large_updates_are_counted(size):
    bias = size * torch.tensor([[-1.0, 0.5, 0.5], [-1.0, -1.0, 2.0], [3.0, 2.0, 1.0]])
    found = counted(torch.zeros(3, 3, 2), bias, 7, torch.full((3,), 1 / 3))
    assert found.shape == (3, 7)


def test_the_head_is_the_layer_that_is_called_last():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(6, 6)
            self.body = torch.nn.Linear(144, 6)

        def forward(self, images):
            return self.head(self.body(images.flatten(1)).tanh())

    private = [Batch(torch.rand(1, 1, 12, 12), torch.tensor([label]), torch.zeros(1) > 0) for label in range(6)]
    seen = observe(Net(), private, threat=ThreatModel.of("num-examples"), num_classes=6)
    assert torch.equal(last_layer(seen, seen.gradients)[0], seen.gradients["head.weight"])
    assert torch.equal(last_layer(seen, seen.gradients)[1], seen.gradients["head.bias"])
    assert known_or_recovered(seen).flatten().tolist() == list(range(6))  # tanh features: the bias is enough
