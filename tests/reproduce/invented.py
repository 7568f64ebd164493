"""Random images that stand in for data sets."""

import numpy as np

from gradveil.data import Dataset, Split


def invented(name="mnist-5k", shape=(1, 28, 28), each=12):
    """Return a data set of random images, ``each`` per class in ten classes."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), each)
    splits = [Split(rng.integers(0, 256, (10 * each, *shape), dtype=np.uint8), labels) for _ in range(2)]
    return Dataset(name, *splits, 10, (0.5,) * shape[0], (0.25,) * shape[0])
