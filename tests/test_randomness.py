"""Named random streams: equal names give equal draws, others unrelated ones, and nothing global is touched."""

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.randomness import derive_seed, stream

PURPOSES = st.lists(st.one_of(st.text(max_size=8), st.integers(-(2**70), 2**70)), max_size=4).map(tuple)


def test_the_seeds_never_change():
    """Anyone's old run must come out the same: these values are fixed for ever."""
    assert derive_seed(0) == 7210762507766007076
    assert derive_seed(7, "client", 3, "round", 12) == 2223586750924859984
    assert torch.rand(1, generator=stream(0, "sampling", 1)).item() == 0.010928690433502197


@given(st.integers(0, 2**63 - 1), PURPOSES)
def test_a_seed_has_63_bits_and_is_repeatable(seed, purpose):
    derived = derive_seed(seed, *purpose)
    assert 0 <= derived < 2**63
    assert derived == derive_seed(seed, *purpose)
    torch.Generator().manual_seed(derived)


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), PURPOSES), min_size=2, max_size=20, unique=True))
def test_other_names_give_other_seeds(names):
    assert len({derive_seed(seed, *purpose) for seed, purpose in names}) == len(names)


def test_the_seed_and_the_boundaries_of_the_name_count():
    seeds = [derive_seed(1, "ab", "c"), derive_seed(1, "a", "bc"), derive_seed(1, "abc"), derive_seed(1, "ab", "c", "")]
    seeds += [derive_seed(1, 2, 3), derive_seed(12, 3), derive_seed(1, "2", 3), derive_seed(1, "2, 3")]
    assert len(set(seeds)) == len(seeds)


def test_all_bits_are_used():
    ones = np.array([[derive_seed(0, n) >> bit & 1 for bit in range(63)] for n in range(2000)]).mean(0)
    assert abs(ones - 0.5).max() < 0.06


def test_streams_are_alike_by_name_and_apart_otherwise():
    draw = torch.rand(50, generator=stream(3, "client", 1))
    assert torch.equal(draw, torch.rand(50, generator=stream(3, "client", 1)))
    assert not torch.equal(draw, torch.rand(50, generator=stream(3, "client", 2)))
    assert not torch.equal(draw, torch.rand(50, generator=stream(4, "client", 1)))


def test_global_generators_are_left_alone():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002 - it is the point
    torch.rand(9, generator=stream(0, "x"))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])  # noqa: NPY002
