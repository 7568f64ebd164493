"""The workload that all engines are timed on: 100 clients with 200 MNIST images each."""

import os
from pathlib import Path

import numpy as np

from gradveil.data import Dataset, Split, load_dataset
from gradveil.errors import DataError

CLIENTS, SAMPLED, IMAGES, BATCH, LR = 100, 10, 200, 32, 0.01


def load() -> Dataset:
    """Return a data set of exactly 100 x 200 training images, from the data root in BENCH_DATA."""
    root = os.environ.get("BENCH_DATA")
    try:
        whole = load_dataset("mnist", Path(root) if root else None)
    except DataError:
        whole = load_dataset("mnist-5k")
    chosen = np.arange(CLIENTS * IMAGES) % len(whole.train)
    train = Split(whole.train.images[chosen], whole.train.labels[chosen])
    return Dataset(whole.name, train, whole.test, 10, whole.mean, whole.std)
