"""Compare GRNN on several targets at once with GRNN on one target at a time, as published, in one run.

The network is lenet-dlg on digits of mnist-5k, one image per target, no defence. The contenders take turns in each
round:

- published: a generator of PyTorch's layers for 1 x 32 x 32 images, cropped to 28 x 28, with all weights of its first
  layer, `torch.optim.RMSprop`, and a plain second derivative; the loss is that of `grnn`;
- ours, one at a time: `grnn` with a chunk of one target;
- ours, T at once: `grnn` with T targets in a chunk.

It prints milliseconds per step and target (median over the rounds), and the speed-up over the first contender.

    python benchmarks/grnn.py [--targets 4,8,16] [--steps 40] [--rounds 3] [--threads 1] [--model lenet-dlg] [--cpu]

`--cpu` measures the CPU time of the process, for machines that are busy with other work.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil import create_model, load_dataset
from gradveil.attacks.grnn import Grnn
from gradveil.data.pixels import to_unit
from gradveil.threat import Observation, ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch

SEED = 0


class Published(nn.Module):
    """The published generator and its label branch, for 28 x 28 grey images."""

    def __init__(self, noise: int = 128, width: int = 32) -> None:
        super().__init__()
        widths = [4 * width, 2 * width, width, 1]
        self.first = nn.ConvTranspose2d(noise, 2 * widths[0], 4)
        self.convs = nn.ModuleList(nn.Conv2d(a, 2 * b, 3, padding=1, bias=False) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm2d(2 * b) for b in widths[1:])
        self.label = nn.Linear(noise, 10)

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image and the label probabilities of a noise vector."""
        maps = F.glu(self.first(noise[..., None, None]), 1)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            maps = F.glu(norm(conv(F.interpolate(maps, scale_factor=2.0, mode="nearest"))), 1)
        return maps[..., 2:30, 2:30].sigmoid(), self.label(noise).softmax(1)


def look(model: str, targets: int) -> Observation:
    """Return what a server sees of ``targets`` clients with one image each."""
    data = load_dataset("mnist-5k")
    images, labels = to_unit(data.train.images), torch.from_numpy(data.train.labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED))[:targets]
    private = [Batch(images[i : i + 1], labels[i : i + 1], torch.ones(1, dtype=torch.bool)) for i in order.tolist()]
    network = create_model(model, data.shape, data.num_classes, SEED).eval()
    return observe(network, private, threat=ThreatModel.of("num-examples"), num_classes=data.num_classes)


def published(seen: Observation, steps: int) -> None:
    """Run ``steps`` steps on the first target."""
    torch.manual_seed(SEED)
    generator, noise = Published(), torch.randn(1, 128)
    optimiser = torch.optim.RMSprop(generator.parameters(), lr=1e-4, momentum=0.99)
    parameters = list(seen.network.parameters())
    wanted = torch.cat([tensor[0].flatten() for tensor in seen.mean_gradients.values()])
    for _ in range(steps):
        image, label = generator(noise)
        loss = F.cross_entropy(seen.network(image), label)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        apart = (torch.cat([gradient.flatten() for gradient in gradients]) - wanted).square().sum()
        rough = sum(image.diff(dim=axis).square().mean() for axis in (2, 3))
        optimiser.zero_grad()
        (apart + apart.sqrt() + 2e-3 * rough).backward()
        optimiser.step()


def ours(seen: Observation, targets: int, steps: int) -> None:
    """Run ``steps`` steps on all targets."""
    attack = Grnn(iterations=steps, chunk=targets)
    attack(seen, torch.Generator().manual_seed(SEED))


def main() -> None:
    """Time all contenders and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="4,8,16")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="lenet-dlg")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    alone = look(options.model, 1)
    contenders: dict[str, tuple[int, Callable[[], None]]] = {
        "published, one at a time": (1, lambda: published(alone, options.steps)),
        "ours, one at a time": (1, lambda: ours(alone, 1, options.steps)),
    }
    for count in map(int, options.targets.split(",")):
        seen = look(options.model, count)
        contenders[f"ours, {count} at once"] = (count, lambda seen=seen, count=count: ours(seen, count, options.steps))
    clock = time.process_time if options.cpu else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.rounds + 1):
        for name, (count, run) in contenders.items():
            started = clock()
            run()
            if turn:  # the first turn is a warm-up
                times[name].append((clock() - started) / count / options.steps * 1e3)
    first = statistics.median(next(iter(times.values())))
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:26} {median:7.2f} ms per step and target   {first / median:5.2f} times as fast")


if __name__ == "__main__":
    main()
