import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradveil.models import Normalisation, create_model, load_weights

IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The normalisation that the given CIFAR-10 weights were trained with; CIFAR's own gives 91.69 % and 92.35 %."""


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("spec", "shape", "num_classes", "parameters"),
    [
        ("resnet20", (3, 32, 32), 10, 269_722),
        ("resnet32", (3, 32, 32), 10, 464_154),
        # option B adds 16·32 + 2·32 and 32·64 + 2·64
        ("resnet20:shortcut=B", (3, 32, 32), 10, 269_722 + 576 + 2_176),
        ("resnet18:stem=7x7", (3, 224, 224), 1000, 11_689_512),
        ("resnet34:stem=7x7", (3, 224, 224), 1000, 21_797_672),
        # 3·64·9 instead of 3·64·49 in the stem, 513·10 instead of 513·1000 in the head
        ("resnet18", (3, 32, 32), 10, 11_689_512 - 192 * 40 - 513 * 990),
    ],
)
def test_parameters(spec, shape, num_classes, parameters):
    with torch.device("meta"):
        assert count(create_model(spec, shape, num_classes, seed=0)) == parameters


def test_7x7_stem_divides_the_side_by_four():
    for stem, side in {"7x7": 8, "3x3": 32}.items():
        network = create_model(f"resnet18:width=2,stem={stem}", (3, 32, 32), 4, seed=0)
        sizes = []
        network.layer1.register_forward_hook(lambda module, inputs, output, sizes=sizes: sizes.append(output.shape))
        network(torch.rand(2, 3, 32, 32))
        assert sizes == [(2, 2, side, side)]


def test_parameters_have_torchvisions_names():
    names = set(create_model("resnet18:width=2,stem=7x7", (3, 32, 32), 4, seed=0).state_dict())
    assert len(names) == 122
    assert {"conv1.weight", "bn1.running_var", "layer1.1.bn2.bias", "layer2.0.downsample.0.weight"} <= names
    assert {"layer4.0.downsample.1.running_mean", "fc.weight", "fc.bias"} <= names
    assert "layer1.0.downsample.0.weight" not in names


def test_option_a_keeps_every_other_pixel_and_pads_with_zero_channels():
    block = create_model("resnet20:width=2", (3, 8, 8), 4, seed=0).layer2[0]
    images = torch.rand(1, 2, 5, 4)
    shortcut = block.downsample(images)
    assert not list(block.downsample.parameters())
    torch.testing.assert_close(shortcut[:, 1:3], images[:, :, ::2, ::2])
    assert shortcut.shape == (1, 4, 3, 2)
    assert not shortcut[:, [0, 3]].any()
    assert block(images).shape == shortcut.shape


def test_block_adds_the_shortcut_before_its_last_activation():
    block = create_model("resnet20", (3, 8, 8), 4, seed=0).eval().layer1[1]
    nn.init.zeros_(block.bn2.weight)  # the residual is 0: an input that is not negative passes unchanged
    images = torch.rand(1, 16, 4, 4)
    torch.testing.assert_close(block(images), images)
    torch.testing.assert_close(block(-images), torch.zeros_like(images))


@pytest.fixture(scope="module")
def real_data():
    folder = os.environ.get("GRADVEIL_TEST_DATA")
    if not folder:
        pytest.skip("GRADVEIL_TEST_DATA is not set: no CIFAR-10 and no pretrained weights")
    return Path(folder)


@pytest.mark.parametrize(
    ("name", "percent"), [("resnet20", 91.73), pytest.param("resnet32", 92.63, marks=pytest.mark.slow)]
)
def test_given_weights_reach_their_accuracy_on_cifar10(real_data, name, percent):
    records = np.fromfile(real_data / "cifar-10-batches-bin" / "test_batch.bin", dtype=np.uint8).reshape(-1, 3073)
    images, labels = records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
    network = create_model(name, (3, 32, 32), 10, seed=0, normalisation=IMAGENET).eval()
    load_weights(network, real_data / "weights" / f"cifar10_{name}.safetensors")
    with torch.inference_mode():
        guesses = [network(torch.from_numpy(part) / 255).argmax(1) for part in np.array_split(images, 100)]
    correct = int((torch.cat(guesses).numpy() == labels).sum())
    assert (len(labels), correct) == (10_000, round(100 * percent))
