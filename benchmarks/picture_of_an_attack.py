"""Draw the README's picture of an attack: what a server reconstructs from eight clients' gradients, step by step.

python benchmarks/picture_of_an_attack.py docs/images/attack-digits.png
"""

import sys

import matplotlib.pyplot as plt
import torch

from gradveil import Batch, ThreatModel, build_attack, create_model, load_dataset, observe
from gradveil.data.pixels import to_unit
from gradveil.metrics.psnr import Psnr

ATTACK = "gs:iterations=2000,sign=none,schedule=cosine,lr=0.3,tv=1e-6,keep=10"
SHOWN = (1, 2, 4, 10)


def main(path: str) -> None:
    """Attack eight digits at once and draw one row for each iterate in ``SHOWN``."""
    digits = load_dataset("mnist-5k")
    images = to_unit(digits.train.images[200::500])
    labels = torch.from_numpy(digits.train.labels[200::500])
    private = [Batch(images[i : i + 1], labels[i : i + 1], torch.tensor([True])) for i in range(8)]
    network = create_model("lenet-dlg", digits.shape, 10, seed=0)
    seen = observe(network, private, threat=ThreatModel.of("num-examples"), num_classes=10)
    guess = build_attack(ATTACK)(seen, torch.Generator().manual_seed(0))
    stages = [(f"step {200 * i}", guess.iterates[i][:, 0]) for i in SHOWN]
    rows = [("private", images), *stages]
    figure, axes = plt.subplots(len(rows), 8, figsize=(8, 1.08 * len(rows)), squeeze=False)
    for line, (name, pictures) in zip(axes, rows, strict=True):
        psnr = Psnr()(images, pictures).mean()
        title = name if name == "private" else f"{name}\n{psnr:.0f} dB"
        line[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9)
        for axis, picture in zip(line, pictures, strict=True):
            axis.imshow(picture[0], cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=110)
    print(Psnr()(images, guess.images[:, 0]), guess.labels[:, 0], labels)


if __name__ == "__main__":
    main(sys.argv[1])
