"""A training loop of your own: record it, attack what it would send, and check the model with a gate.

Run it from any folder: python own_loop.py [FOLDER]. It trains a small network with BatchNorm and Dropout by Adam on
handwritten digits, and ends in pictures, a page and a privacy card. Replace `Net`, `images` and `labels` by yours.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradveil


class Net(nn.Module):
    """A small convolutional network, as one finds it in many projects."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 5, stride=2, padding=2),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Conv2d(12, 12, 5, stride=2, padding=2),
            nn.BatchNorm2d(12),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(588, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return one number per class."""
        return self.head(self.features(images))


def main(out: Path) -> None:
    """Record one step, attack it, and check the model on all digits."""
    digits = gradveil.load_dataset("mnist-5k").train
    images, labels = torch.from_numpy(digits.images) / 255, torch.from_numpy(digits.labels)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    with gradveil.Recorder(model, optimizer, out / "recorded", images=True) as recorder:
        model.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[:1]), labels[:1]).backward()
        optimizer.step()
    result = gradveil.attack(**recorder.files, attack="gs:iterations=300", out=out / "attacked")
    print(f"The attack's picture has a PSNR of {result.rows[0]['psnr']:.1f} dB: {result.pictures[0]}")

    loader = DataLoader(TensorDataset(images[::4], labels[::4]), batch_size=100)
    checked = gradveil.check(Net(), loader, rounds=5, clients=4, targets=4, out=out / "checked")
    print(checked)
    print(f"Page: {checked.page}\nPrivacy card: {checked.card}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own-loop"))
