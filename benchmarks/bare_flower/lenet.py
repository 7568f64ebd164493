"""LeNet-5 in plain PyTorch."""

from torch import nn


def lenet5() -> nn.Sequential:
    """Return LeNet-5 for 28 x 28 digits, with as many parameters as gradveil's (61,706)."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
