"""Records of Flower are read value by value; nothing in them is believed."""

import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from gradveil.engines.messages import finite, listed, read_arrays, read_config, whole
from gradveil.errors import MessageError

LIKE = {"w": torch.zeros(2, 3)}


def message(array):
    return RecordDict({"tensors": ArrayRecord({"w": array})})


@given(data=st.binary(max_size=300), cut=st.integers(0, 200))
def test_no_bytes_raise_a_foreign_error(data, cut):
    honest = Array(np.ones((2, 3), np.float32)).data
    for content in (data, honest[:cut] + data, data + honest[cut:]):
        array = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=content)
        for like in (LIKE, None):
            try:
                found = read_arrays(message(array), "tensors", like, 100)
            except MessageError:
                continue
            assert sum(tensor.numel() for tensor in found.values()) <= 100


@pytest.mark.parametrize("dtype", ["complex64", "U3", "datetime64[s]", ">f4", "V8"])
def test_other_types_are_refused(dtype):
    with pytest.raises(MessageError, match="got another type"):
        read_arrays(message(Array(np.zeros((2, 3), dtype))), "tensors", None, 100)


def test_an_array_is_read_as_it_was_sent():
    sent = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    found = read_arrays(message(Array(sent)), "tensors", LIKE, 0)
    assert torch.equal(found["w"], torch.arange(6.0).view(2, 3))


def test_axes_of_length_zero_are_not_for_free():
    empty = message(Array(np.zeros((0, 1000), np.float32)))
    assert read_arrays(empty, "tensors", None, 1000)["w"].shape == (0, 1000)
    with pytest.raises(MessageError, match="at most 999 entries"):
        read_arrays(empty, "tensors", None, 999)


def test_missing_records_are_named():
    for read in (lambda: read_config(RecordDict(), "facts"), lambda: read_arrays(RecordDict(), "facts", None, 1)):
        with pytest.raises(MessageError, match="'facts', got none"):
            read()
    assert read_config(RecordDict({"facts": ConfigRecord({"a": 1})}), "facts") == {"a": 1}


@pytest.mark.parametrize("value", [None, True, 1.0, math.nan, "1", [1], -1, 10, b"1"])
def test_a_whole_number_is_nothing_else(value):
    with pytest.raises(MessageError, match="round must be a whole number from 0 to 9"):
        whole({"round": value}, "round", 0, 9)


@pytest.mark.parametrize("value", [None, True, math.nan, math.inf, "1", [1.0]])
def test_a_finite_number_is_nothing_else(value):
    with pytest.raises(MessageError, match="lr must be a finite number"):
        finite({"lr": value}, "lr")


@pytest.mark.parametrize("value", [None, "ab", [1, 2, 3], ["a"], [True], [1.0]])
def test_a_list_is_nothing_else(value):
    with pytest.raises(MessageError, match="a must be a list"):
        listed({"a": value}, "a", int, 2)
