"""The task: handwritten digits that come with a package, a LeNet, and plain training and testing."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradveil

MOMENTUM = 0.9


class Net(nn.Module):
    """A LeNet for digits of 28x28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return one number per class."""
        hidden = F.max_pool2d(F.relu(self.conv1(images)), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(hidden)))))


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> DataLoader:
    """Return one client's part of the training images."""
    return _loader(gradveil.load_dataset("mnist-5k").train, slice(partition_id, None, num_partitions), batch_size)


def load_test_data() -> DataLoader:
    """Return the test images."""
    return _loader(gradveil.load_dataset("mnist-5k").test, slice(None), 500)


def _loader(split: gradveil.data.Split, part: slice, batch_size: int) -> DataLoader:
    images, labels = torch.from_numpy(split.images[part]) / 255, torch.from_numpy(split.labels[part])
    return DataLoader(TensorDataset(images, labels), batch_size, shuffle=True)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train by SGD with momentum, and return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr, MOMENTUM)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net: nn.Module, loader: DataLoader) -> float:
    """Return the share of images that the network classifies correctly."""
    net.eval()
    with torch.no_grad():
        right = sum(int((net(images).argmax(1) == labels).sum()) for images, labels in loader)
    return right / len(loader.dataset)
