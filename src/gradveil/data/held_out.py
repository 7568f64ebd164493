"""Hold out a part of the training images, so that choices need no test images."""

from dataclasses import replace

import numpy as np

from gradveil.data.datasets import Dataset, Split
from gradveil.errors import ConfigError
from gradveil.randomness import derive_seed

FEWEST = 10
"""Images that must be left to compare by."""


def hold_out(dataset: Dataset, share: float, seed: int) -> Dataset:
    """Return the set with a random share of its training images in place of its test images.

    Nothing of the test images is left. Raise ConfigError if the share is too small to compare by.
    """
    count = round(share * len(dataset.train))
    if count < FEWEST or count >= len(dataset.train):
        raise ConfigError(
            f"At least {FEWEST} training images must be held out, and some be left, got {count} of "
            f"{len(dataset.train):,}. Change --held-out, or bring more images."
        )
    order = np.random.default_rng(derive_seed(seed, "held out")).permutation(len(dataset.train))
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    return replace(dataset, train=_part(dataset.train, kept), test=_part(dataset.train, held))


def _part(split: Split, chosen: np.ndarray) -> Split:
    return Split(split.images[chosen], split.labels[chosen])
