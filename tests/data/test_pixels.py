"""One scaling of pixels: bytes and floats give the same images, and bytes come back."""

import numpy as np
import pytest
import torch

from gradveil.data.pixels import to_batch, to_bytes, to_unit

ALL_BYTES = np.arange(256, dtype=np.uint8)


def test_bytes_are_divided_by_255_to_the_nearest_float():
    exact = ALL_BYTES.astype(np.float64) / 255
    assert np.array_equal(to_unit(ALL_BYTES, torch.float64).numpy(), exact)
    assert np.array_equal(to_unit(ALL_BYTES).numpy(), exact.astype(np.float32))
    assert np.array_equal(to_unit(torch.from_numpy(ALL_BYTES)).numpy(), exact.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_byte_comes_back(dtype):
    assert np.array_equal(to_bytes(to_unit(ALL_BYTES, dtype)).numpy(), ALL_BYTES)
    assert np.array_equal(to_bytes(ALL_BYTES).numpy(), ALL_BYTES)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_stay_as_they_are(dtype):
    images = np.linspace(0, 1, 7, dtype=dtype)
    found = to_unit(images)
    assert np.array_equal(found.numpy(), images)
    assert found.numpy().dtype == dtype


def test_bytes_are_clamped_and_nan_is_grey():
    assert to_bytes(torch.tensor([-1.0, 2.0, float("inf"), float("nan")])).tolist() == [0, 255, 255, 128]


def test_read_only_arrays_are_copied_and_nothing_is_edited():
    images = np.full((2, 1, 1, 1), 51, np.uint8)
    images.flags.writeable = False
    batch = to_batch(images[::-1], np.array([3, 4])[::-1])
    assert batch.images.flatten().tolist() == pytest.approx([0.2, 0.2])
    assert batch.labels.tolist() == [4, 3]
    assert images.max() == 51


def test_a_batch_marks_nothing_unless_told():
    images, labels = np.zeros((2, 1, 1, 1), np.uint8), np.array([0, 1])
    assert to_batch(images, labels).sensitive.tolist() == [False, False]
    assert to_batch(images, labels, np.array([True, False])).sensitive.tolist() == [True, False]
