"""Held-out images are training images that no candidate trains on, and no test image."""

import numpy as np
import pytest

from gradveil.data.held_out import hold_out
from gradveil.errors import ConfigError
from tests.engines.test_simulation import small_set


def keys(images):
    return {image.tobytes() for image in images}


def test_held_out_images_are_neither_trained_on_nor_test_images():
    whole = small_set()
    held = hold_out(whole, 0.25, seed=3)
    kept, out = keys(held.train.images), keys(held.test.images)
    assert len(held.test) == round(0.25 * len(whole.train))
    assert kept | out == keys(whole.train.images)
    assert not kept & out
    assert not out & keys(whole.test.images)
    labels = {image.tobytes(): label for image, label in zip(whole.train.images, whole.train.labels, strict=True)}
    assert all(
        labels[image.tobytes()] == label for image, label in zip(held.test.images, held.test.labels, strict=True)
    )


def test_the_part_depends_on_the_seed_alone():
    whole = small_set()
    assert np.array_equal(hold_out(whole, 0.25, 1).test.labels, hold_out(whole, 0.25, 1).test.labels)
    assert not np.array_equal(hold_out(whole, 0.25, 1).test.images, hold_out(whole, 0.25, 2).test.images)


def test_too_few_images_to_compare_by_are_refused():
    with pytest.raises(ConfigError, match="At least 10 training images must be held out"):
        hold_out(small_set(), 0.01, 0)
