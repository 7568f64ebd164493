"""Secret streams: what is drawn has its distribution, the seed and the names decide, and it is AES in counter mode."""

import hashlib
import math

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gradveil.errors import ConfigError
from gradveil.randomness import SECRET, block_key, global_stream
from gradveil.secret_stream import SecretStream, attackers_stream, layer_stream

MANY = 100_000
DRAWS = {
    "words": lambda rng: rng.words(64),
    "uniform": lambda rng: rng.uniform((64,)),
    "bernoulli": lambda rng: rng.bernoulli(0.5, (64,)),
    "integers": lambda rng: rng.integers(0, 1000, (64,)),
    "permutation": lambda rng: rng.permutation(64),
    "exponential": lambda rng: rng.exponential((64,)),
    "laplace": lambda rng: rng.laplace((64,)),
    "normal": lambda rng: rng.normal((64,)),
    "seed": lambda rng: torch.tensor([rng.seed() >> 200]),
    "fork": lambda rng: rng.fork("a").words(64),
}


def test_words_are_the_key_stream_of_aes():
    key = hashlib.sha256(repr(("gradveil", 7, "client", 3)).encode()).digest()
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305 - one block at a time, to compare
    blocks = b"".join(cipher.update(number.to_bytes(16, "big")) for number in range(5))
    rng = SecretStream(7, "client", 3)
    found = torch.cat([rng.words(count) for count in (1, 0, 2, 7)])  # draws go on where the last one ended
    assert found.numpy().tobytes() == blocks


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_seed_and_names_decide_every_kind_of_draw(draw):
    one, same, seed, name, whole = (
        draw(rng)
        for rng in (SecretStream(5, "a", 1), SecretStream(5, "a", 1), SecretStream(6, "a", 1), SecretStream(5, "a", 2),
                    SecretStream(5 + 2**200, "a", 1))
    )  # fmt: skip
    assert torch.equal(one, same)
    assert not any(torch.equal(one, other) for other in (seed, name, whole))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_torchs_global_generator_is_untouched(draw):
    before = torch.get_rng_state()
    draw(SecretStream(0))
    assert torch.equal(before, torch.get_rng_state())


def test_streams_of_other_names_are_unrelated():
    streams = [SecretStream(0, "a"), SecretStream(0, "b"), SecretStream(0, "a").fork("b"), SecretStream(0).fork("a")]
    bits = torch.stack([rng.uniform((MANY,), torch.float64) for rng in streams])
    assert (torch.corrcoef(bits) - torch.eye(4)).abs().max() < 5 / math.sqrt(MANY)
    shared = [set(SecretStream(0, name).words(MANY).tolist()) for name in ("a", "b")]
    assert not shared[0] & shared[1]


def test_a_fork_does_not_depend_on_what_was_drawn():
    fresh, used = SecretStream(3, "a"), SecretStream(3, "a")
    used.words(99)
    assert torch.equal(fresh.fork("x").words(9), used.fork("x").words(9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_numbers_fill_the_unit_interval_and_never_reach_one(dtype):
    drawn = SecretStream(1).uniform((MANY,), dtype)
    assert drawn.dtype == dtype
    assert 0 <= drawn.min() <= drawn.max() < 1
    digits = round(-math.log2(torch.finfo(dtype).eps)) + 1
    steps = drawn.double() * 2**digits
    assert torch.equal(steps, steps.round())
    assert stats.kstest((steps + 0.5).div(2**digits), "uniform").pvalue > 1e-3 or digits < 12


@pytest.mark.parametrize(
    ("name", "law", "moments"),
    [
        ("normal", stats.norm, {1: 0, 2: 1, 4: 3, 8: 105}),
        ("laplace", stats.laplace, {1: 0, 2: 2, 4: 24, 8: 40320}),
        ("exponential", stats.expon, {1: 1, 2: 2, 4: 24, 8: 40320}),
    ],
)
def test_draws_have_their_distribution(name, law, moments):
    drawn = getattr(SecretStream(2), name)((MANY, 2), torch.float64)
    assert drawn.shape == (MANY, 2)
    assert stats.kstest(drawn.flatten(), law.cdf).pvalue > 1e-3
    assert abs(torch.corrcoef(drawn.T)[0, 1]) < 5 / math.sqrt(MANY)
    for moment in (1, 2, 4):
        spread = math.sqrt(moments[2 * moment] - moments[moment] ** 2)
        assert abs(drawn.pow(moment).mean() - moments[moment]) < 5 * spread / math.sqrt(2 * MANY)


def test_both_halves_of_a_pair_of_normal_draws_are_unrelated_in_their_squares_too():
    drawn = SecretStream(3).normal((2, MANY), torch.float64)
    assert abs(torch.corrcoef(drawn.square())[0, 1]) < 5 / math.sqrt(MANY)


def test_extreme_words_give_finite_draws(monkeypatch):
    for word in (0, -1, 2**63 - 1, -(2**63)):
        rng = SecretStream(0)
        monkeypatch.setattr(rng, "words", lambda count, word=word: torch.full((count,), word))
        for draw in (rng.normal, rng.laplace, rng.exponential, rng.uniform):
            assert draw((6,), torch.float64).isfinite().all()
    rng = SecretStream(0)
    monkeypatch.setattr(rng, "words", lambda count: torch.zeros(count, dtype=torch.int64))
    assert rng.exponential((1,), torch.float64).item() == pytest.approx(127 * math.log(2))


@given(st.integers(-(2**60), 2**60), st.integers(1, 2**62))
def test_integers_lie_in_their_range(low, span):
    drawn = SecretStream(0).integers(low, low + span, (20,))
    assert low <= int(drawn.min()) <= int(drawn.max()) < low + span


def test_integers_are_all_equally_likely():
    counts = torch.bincount(SecretStream(4).integers(0, 5, (MANY,)))
    assert stats.chisquare(counts).pvalue > 1e-3
    high = SecretStream(4).integers(0, 3 * 2**60, (MANY,))  # a remainder of 64-bit words would favour the first third
    assert stats.chisquare(torch.bincount(high >> 60)).pvalue > 1e-3
    with pytest.raises(ConfigError, match="above low"):
        SecretStream(0).integers(3, 3, ())


def test_permutations_are_all_equally_likely():
    rng = SecretStream(5)
    orders = [tuple(rng.permutation(4).tolist()) for _ in range(12_000)]
    counts = [orders.count(order) for order in sorted(set(orders))]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3
    assert sorted(rng.permutation(1000).tolist()) == list(range(1000))
    assert rng.permutation(0).tolist() == []


def test_a_permutation_with_equal_keys_is_drawn_again(monkeypatch):
    rng, answers = SecretStream(0), iter([torch.tensor([5, 5, 1]), torch.tensor([7, 2, 9])])
    monkeypatch.setattr(rng, "words", lambda count: next(answers))
    assert rng.permutation(3).tolist() == [1, 0, 2]


@pytest.mark.parametrize("probability", [0.0, 0.03, 0.5, 1.0])
def test_bernoulli_draws_have_their_probability(probability):
    drawn = SecretStream(6).bernoulli(probability, (MANY,)).double().mean()
    assert abs(drawn - probability) <= 5 * math.sqrt(probability * (1 - probability) / MANY)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (3, 5)])
def test_every_shape(shape):
    rng = SecretStream(0)
    for draw in (rng.uniform, rng.normal, rng.laplace, rng.exponential):
        assert draw(shape).shape == shape
    assert rng.integers(0, 9, shape).shape == rng.bernoulli(0.5, shape).shape == shape


def test_seeds_are_secret_and_fill_the_state_of_torchs_generator():
    rng = SecretStream(0)
    one, other = rng.seed(), rng.seed()
    assert min(one, other) >= SECRET
    assert bin(one ^ other).count("1") > 80
    drawn = []
    for seed in (one, one, other):
        with global_stream(seed, "dropout"):
            drawn.append(torch.rand(9))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_attackers_and_layers_are_keyed_by_torchs_generators():
    one, same, other = (attackers_stream(torch.Generator().manual_seed(seed)).words(9) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    with global_stream(0, "layers"):
        first, second = layer_stream().words(9), layer_stream().words(9)
    with global_stream(0, "layers"):
        assert torch.equal(first, layer_stream().words(9))
    assert not torch.equal(first, second)


def test_whoever_knows_the_global_generator_does_not_know_a_layers_draws():
    """Masks of Dropout may show all of the generator's state; a layer's noise must stay secret."""

    def drawn(seed):
        with global_stream(seed, "layers"):
            torch.default_generator.manual_seed(7)  # the state that somebody computed from masks
            return layer_stream().words(9).tolist()

    assert drawn(SECRET + 1) == drawn(SECRET + 1)
    assert len({tuple(draws) for draws in map(drawn, (0, SECRET + 1, SECRET + 2))}) == 3
    torch.manual_seed(7)
    assert layer_stream().words(9).tolist() == drawn(0) == drawn(1)


def test_the_key_of_a_block_ends_with_it():
    with global_stream(SECRET + 1, "a"):
        outer = block_key()
        with global_stream(SECRET + 1, "b"):
            assert outer != block_key() != 0
        with global_stream(1, "c"):
            assert block_key() == 0
        assert block_key() == outer
    assert block_key() == 0
