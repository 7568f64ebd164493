"""The tasks of the DCS2 paper: four data sets with networks and baselines, and trainings under a defence."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from gradveil.config import TrainSettings
from gradveil.data import Dataset, Split, load_dataset
from gradveil.defences import build_defence
from gradveil.defences.dcs2 import Dcs2
from gradveil.randomness import derive_seed
from gradveil.reproduce.base import Lab
from gradveil.reproduce.trainings import thinned, trained

CLIENTS, DEFENDED = 10, 5
"""The number of clients, and the number of the client that defends in the authors' code."""


@dataclass(frozen=True)
class Size:
    """The sizes of a task at one scale.

    Attributes:
        targets: number of attacked images.
        iterations: iterations of the attack.
        steps: steps of the defence's search for concealed samples when attacked.
        images: images per client.
        rounds: rounds of training; 0 skips training.
        training_steps: steps of the defence's search for concealed samples in training.
    """

    targets: int
    iterations: int
    steps: int
    images: int = 0
    rounds: int = 0
    training_steps: int = 1


@dataclass(frozen=True)
class Dcs2Task:
    """One of the paper's data sets and its training (Section 4.1, Appendix 8.3 and the authors' code).

    Attributes:
        title: the paper's name for the data set.
        dataset: spec of the data set at the scales smoke and small, and at full.
        models: the attacked and trained network: a narrow one at scale smoke, and the paper's.
        sizes: the sizes at each scale; full is the paper's.
        defences: specs with the paper's settings, by the paper's names; noise and pruning act on every local step,
            Soteria estimates its Jacobians.
        lr: learning rate of the clients' SGD (momentum 0.9), multiplied by 0.99 after each round.
        weight_decay: weight decay of the clients' SGD.
        side: side length that images are resized to, or 0 to keep their size.
    """

    title: str
    dataset: tuple[str, str]
    models: tuple[str, str]
    sizes: Mapping[str, Size]
    defences: Mapping[str, str]
    lr: float = 0.01
    weight_decay: float = 0.0
    side: int = 0

    def model(self, lab: Lab) -> str:
        """Return the spec of the network at the lab's scale."""
        return self.models[lab.scale != "smoke"]


def _defences(std: float, fraction: float, features: float, dcs2: str) -> dict[str, str]:
    return {
        "None": "none",
        "DP-Gaussian": f"gaussian:std={std:g},where=gradient",
        "Prune": f"prune:fraction={fraction:g},where=gradient",
        "Soteria": f"soteria:prune={features:g},probes=64",
        "DCS2": dcs2,
    }


def _sizes(smoke: Size, small: Size, full: Size) -> dict[str, Size]:
    return {"smoke": smoke, "small": small, "full": full}


_DEEP = (Size(1, 3, 2, 8, 1), Size(2, 150, 100, 64, 4, 5))
"""Sizes for the ConvNet, whose searches take a hundred times as long as LeNet's."""

TASKS = {
    "mnist": Dcs2Task(
        "MNIST", ("mnist-5k", "mnist"), ("lenet-dlg", "lenet-dlg"),
        _sizes(Size(2, 30, 10, 20, 2), Size(8, 2000, 1000, 200, 20, 60), Size(64, 10_000, 1000, 200, 200, 1000)),
        _defences(1e-2, 0.7, 0.2, "dcs2"),
    ),
    "cifar10": Dcs2Task(
        "CIFAR10", ("cifar10", "cifar10"), ("convnet:width=4", "convnet:width=32"),
        _sizes(*_DEEP, Size(64, 10_000, 1000, 2000, 200, 1000)),
        _defences(1e-3, 0.9, 0.5, "dcs2:far=500"), weight_decay=1e-3,
    ),
    "faces": Dcs2Task(
        "LFW faces for CelebA", ("faces-lfw.npz", "faces-lfw.npz"), ("convnet:width=4", "convnet:width=32"),
        _sizes(*_DEEP, Size(64, 10_000, 1000, 500, 100, 1000)),
        _defences(1e-3, 0.7, 0.7, "dcs2:lambda_z=0.1"), lr=1e-3, side=32,
    ),
    "tiny": Dcs2Task(
        "TinyImageNet", ("tiny-imagenet-1600.npz", "tiny-imagenet-1600.npz"),
        ("resnet18:stem=7x7,width=8", "resnet18:stem=7x7"),
        _sizes(Size(1, 0, 2), Size(4, 0, 60), Size(64, 0, 1000, 2000, 100, 1000)),
        _defences(0.5, 0.7, 0.9, "dcs2:lambda_x=0.001,far=400"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Images:
    """The images of a task.

    Attributes:
        data: the clients' training images, and the test images.
        public: images of the same kind that belong to no client (the authors' proxy split); attackers know them.
        starts: public images that concealed samples start from; None uses ``public``.
    """

    data: Dataset
    public: Dataset
    starts: Dataset | None = None

    @property
    def aux(self) -> Dataset:
        """The public images on the clients' devices."""
        return self.starts or self.public


def load_images(lab: Lab, task: Dcs2Task) -> Images:
    """Split the training images into clients' and public ones, and keep only some test images below full scale."""
    name = task.dataset[lab.scale == "full"]
    named = str(lab.data_root / name) if name.endswith(".npz") and lab.data_root is not None else name
    whole = resized(load_dataset(named, lab.data_root), task.side)
    order = np.random.default_rng(derive_seed(lab.seed, "dcs2", "proxy")).permutation(len(whole.train))
    free = min(lab.pick(64, 500, 5000), len(order) // 4)
    tested = thinned(whole.test, lab.pick(100, 1000, len(whole.test)))
    data = replace(whole, train=chosen(whole.train, order[free:]), test=tested)
    return Images(data, replace(whole, train=chosen(whole.train, order[:free])))


def chosen(split: Split, places: np.ndarray) -> Split:
    """Return the images at the given places."""
    return Split(split.images[places], split.labels[places])


def resized(data: Dataset, side: int, *, grey: bool = False) -> Dataset:
    """Resize the images to ``side`` pixels (0 keeps their size), and convert them to grey if asked."""
    if side in (0, data.shape[1]) and not grey:
        return data
    constants = ((statistics.fmean(data.mean),), (statistics.fmean(data.std),)) if grey else (data.mean, data.std)
    train, test = (_smaller(split, side or data.shape[1], grey) for split in (data.train, data.test))
    return replace(data, train=train, test=test, mean=constants[0], std=constants[1])


def _smaller(split: Split, side: int, grey: bool) -> Split:
    pixels = torch.from_numpy(split.images).float()
    small = F.interpolate(
        pixels.mean(1, keepdim=True) if grey else pixels, (side, side), mode="bilinear", antialias=True
    )
    if split.images.dtype == np.uint8:
        small = small.round().clamp(0, 255).to(torch.uint8)
    return Split(small.numpy(), split.labels)


def images_each(lab: Lab, task: Dcs2Task, images: Images) -> int:
    """Return the number of images per client: that of the scale, or fewer if the data set is too small."""
    return min(task.sizes[lab.scale].images or 10, len(images.data.train) // CLIENTS)


def partition_of(lab: Lab, task: Dcs2Task, images: Images, *, by_class: bool = False) -> str:
    """Return the partition: images dealt at random, or two classes per client."""
    count = images_each(lab, task, images)
    return f"by-class:classes=2,per_class={count // 2}" if by_class else f"iid:images={count}"


def training(
    lab: Lab, task: Dcs2Task, images: Images, defence: str, *, everyone: bool = False, by_class: bool = False
) -> TrainSettings:
    """Return settings in which one client, whose images are all sensitive, or every client defends."""
    size, count = task.sizes[lab.scale], images_each(lab, task, images)
    return TrainSettings(
        dataset=images.data.name, model=task.model(lab), defence=with_steps(defence, size.training_steps),
        clients=CLIENTS, rounds=size.rounds, defended=() if everyone else (DEFENDED,),
        partition=partition_of(lab, task, images, by_class=by_class),
        sensitive="1.0" if everyone else f"{DEFENDED}:{'/'.join(map(str, range(count)))}",
        batch_size=64, lr=task.lr, lr_decay=0.99, weight_decay=task.weight_decay, eval_every=max(size.rounds, 1),
        seed=lab.seed,
    )  # fmt: skip


def with_steps(defence: str, steps: int) -> str:
    """Set the number of concealing steps in each dcs2 part of a defence spec.

    Example:
        >>> with_steps("dcs2:far=500+prune", 20), with_steps("dcs2", 1000)
        ('dcs2:far=500,steps=20+prune', 'dcs2')
    """
    pieces = [f"{p}{',' if ':' in p else ':'}steps={steps}" if p.startswith("dcs2") else p for p in defence.split("+")]
    return defence if steps == Dcs2.steps else "+".join(pieces)


@dataclass(frozen=True)
class Accuracy:
    """Accuracy after the last round on test and on sensitive images, or None if the training diverged."""

    test: float | None
    sensitive: float | None


def train(lab: Lab, settings: TrainSettings, images: Images, progress: Callable[[float], None]) -> Accuracy:
    """Train, and return the accuracies after the last round."""
    aux = images.aux if build_defence(settings.defence).uses_aux else None
    found = trained(lab, settings, progress, dataset=images.data, aux=aux)
    return Accuracy(found.last("accuracy"), found.last("accuracy_sensitive"))
