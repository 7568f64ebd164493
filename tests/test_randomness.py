"""Named random streams: equal names give equal draws, other names unrelated ones; global generators do not change."""

import hashlib
import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.randomness import SECRET, derive_seed, global_stream, stream

PURPOSES = st.lists(st.one_of(st.text(max_size=8), st.integers(-(2**70), 2**70)), max_size=4).map(tuple)


def test_the_seeds_never_change():
    """Old runs must stay reproducible: these values are fixed forever."""
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


def test_streams_of_equal_names_are_equal_and_others_differ():
    draw = torch.rand(50, generator=stream(3, "client", 1))
    assert torch.equal(draw, torch.rand(50, generator=stream(3, "client", 1)))
    assert not torch.equal(draw, torch.rand(50, generator=stream(3, "client", 2)))
    assert not torch.equal(draw, torch.rand(50, generator=stream(4, "client", 1)))


def test_global_generators_do_not_change():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002 - it is the point
    torch.rand(9, generator=stream(0, "x"))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])  # noqa: NPY002


# --- secret seeds ----------------------------------------------------------------------------------------------------


def same_draws(one, other):
    return torch.equal(torch.rand(50, generator=one), torch.rand(50, generator=other))


def test_all_bits_of_a_secret_seed_count():
    seed = SECRET + 5
    assert same_draws(stream(seed, "key", 1), stream(seed, "key", 1))
    others = [stream(5, "key", 1), stream(seed, "key", 2), *(stream(seed + 2**bit, "key", 1) for bit in (32, 64, 255))]
    assert not any(same_draws(stream(seed, "key", 1), other) for other in others)


def test_a_secret_stream_is_not_among_those_of_32_bits():
    seed = derive_seed(SECRET, "key")
    assert same_draws(torch.Generator().manual_seed(derive_seed(7, "key")), stream(7, "key"))
    assert not same_draws(torch.Generator().manual_seed(seed), stream(SECRET, "key"))


def test_a_secret_stream_is_numpys_mersenne_twister_with_the_hash_as_its_state():
    digest = hashlib.shake_256(repr((SECRET, "key")).encode()).digest(4 * 624)
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": np.frombuffer(digest, "<u4"), "pos": 624}}
    drawn = torch.randint(2**24, (2000,), generator=stream(SECRET, "key"))
    assert np.array_equal(drawn.numpy(), twister.random_raw(2000) % 2**24)


def test_secret_streams_are_uniform_and_normal():
    rng = stream(SECRET + 2**200, "noise")
    uniform, normal = torch.rand(100_000, generator=rng), torch.randn(100_000, generator=rng)
    assert abs(uniform.mean() - 0.5) < 0.005
    assert abs(uniform.var() - 1 / 12) < 0.002
    assert abs(normal.mean()) < 0.02
    assert abs(normal.var() - 1) < 0.03
    assert abs(torch.corrcoef(uniform.view(2, -1))[0, 1]) < 0.03


def test_layers_draw_from_secret_streams_too():
    before = torch.get_rng_state()
    drawn = []
    for seed in (SECRET, SECRET, SECRET + 2**64):
        with global_stream(seed, "layers"):
            drawn.append(torch.randn(9))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(before, torch.get_rng_state())
