"""Networks that mix the images of a batch are found, with the layer that does it."""

import pytest
import torch
from torch import nn

from gradveil.models import create_model
from gradveil.networks.mixing import frozen_norms, mixing_layer, random_images

IMAGES = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Centred(nn.Module):
    """Subtract the batch's mean: no normalisation layer, and no statistics that are kept."""

    def forward(self, features):
        return features - features.mean(0, keepdim=True)


class Between(nn.Module):
    """A network whose own forward mixes images, between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 5), nn.Linear(5, 3)

    def forward(self, images):
        features = self.first(images.flatten(1))
        return self.last(features * features.std(0))


class Backward(torch.autograd.Function):
    """The identity, whose gradient is mixed over the batch."""

    @staticmethod
    def forward(features):
        return features.clone()

    @staticmethod
    def setup_context(context, inputs, output):
        context.save_for_backward(output)

    @staticmethod
    def backward(context, slopes):
        return slopes * context.saved_tensors[0].mean()


class MixedGradient(nn.Module):
    def forward(self, features):
        return Backward.apply(features)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images):
        flat = images.flatten(1)
        return self.scale * torch.softmax(flat @ flat.T, 1) @ flat


def around(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), *layers, nn.Flatten(), nn.Linear(108, 3))


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ((Centred(),), r"'1' (Centred)"),
        ((nn.ReLU(), nn.Sequential(nn.Identity(), Centred())), r"'2.1' (Centred)"),
        ((nn.BatchNorm2d(3),), r"'1' (BatchNorm2d)"),
        ((nn.BatchNorm2d(3, track_running_stats=False),), r"'1' (BatchNorm2d)"),
        ((MixedGradient(),), r"'0' (Conv2d)"),
    ],
)
def test_a_layer_that_mixes_is_named(layers, named):
    assert mixing_layer(around(*layers).train(), IMAGES) == named


def test_code_between_layers_is_found_by_the_layer_after_it():
    torch.manual_seed(0)
    assert mixing_layer(Between(), IMAGES) == "the network's own forward, before layer 'last',"
    assert mixing_layer(nn.Sequential(Between()), IMAGES) == "'0' (Between), before layer '0.last',"
    assert mixing_layer(Whole(), IMAGES) == "the network's own forward"


@pytest.mark.parametrize(
    "layers",
    [
        (),
        (nn.GroupNorm(1, 3),),
        (nn.InstanceNorm2d(3),),
        (nn.Dropout(0.5), nn.Dropout2d(0.5)),
        (nn.ReLU(inplace=True),),
    ],
)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_layers_that_treat_each_image_by_itself_pass(layers, training, count):
    network = around(*layers).train(training)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state = torch.get_rng_state()
    assert mixing_layer(network, IMAGES[:count]) is None
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_batch_norm_mixes_unless_it_is_frozen():
    network = around(nn.BatchNorm2d(3)).train()
    assert mixing_layer(frozen_norms(network, training=True), IMAGES) is None
    assert network[1].training


@pytest.mark.parametrize("model", ["mlp", "lenet5", "lenet-dlg", "convnet", "resnet20", "densenet121"])
def test_no_network_of_the_zoo_mixes_images(model):
    network = frozen_norms(create_model(model, (3, 32, 32), 10, 0), training=True)
    assert mixing_layer(network, random_images(network, (3, 32, 32))) is None
