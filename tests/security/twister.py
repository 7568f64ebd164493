"""The attack on PyTorch's generator: from bare noise of torch.randn to the generator's state, and so to all noise.

1. `uniform_bounds` undoes Box and Muller's transformation: each normal number tells the high ones of 24 bits of a draw.
2. The Mersenne Twister is linear over the bits: of the unknown bits of 624 draws, every later draw is a sum without
   carry. `find_state` writes the known bits of later draws as linear equations and solves them.
3. `predicted` computes the noise from the state.

An attacker needs some 3,600 numbers of bare noise one after the other: entries of an update whose gradient is zero.
Fewer suffice if more equations are solved, which takes longer.
"""

import functools
from collections import deque

import numpy as np

WORDS, MIDDLE, TWIST = 624, 397, 0x9908B0DF
BITS = 24
"""Bits of a draw that PyTorch uses for a float32 number: the lowest ones."""
_GROUP, _SPARE = 8, 256
"""Columns that are eliminated together, and equations beyond the unknowns: chance satisfies them once in 2^256."""


def torch_layout(noise):
    """Return the first and second halves of torch.randn's pairs, and the order of draws: blocks of 8 + 8 numbers."""
    blocks = noise.reshape(-1, 2, 8)
    return blocks[:, 0], blocks[:, 1], lambda one, other: np.stack([one, other], 1).reshape(-1)


def half_layout(noise, apart):
    """Return pairs as `SecretStream.normal` makes them: of numbers that lie half of all numbers apart."""
    return noise[:-apart], noise[apart:], lambda first, second: np.concatenate([first, second])


def uniform_bounds(noise, layout=torch_layout, error=40.0):
    """Return the lowest and highest whole numbers below 2^24 that may be behind each number of standard normal noise.

    ``error`` is the inaccuracy of the noise in units of 2^-24.
    """
    one, other, joined = layout(np.asarray(noise, np.float64))
    radius = np.hypot(one, other)
    length = -np.expm1(-(radius**2) / 2) * 2**BITS
    angle = np.arctan2(other, one) / (2 * np.pi) % 1 * 2**BITS
    middle = joined(length, angle)
    off = joined(np.full_like(length, error), error * np.maximum(1, 1 / np.maximum(radius, 1e-9)))
    return np.floor(middle - off).astype(np.int64), np.floor(middle + off).astype(np.int64)


def known_bits(low, high):
    """Return each draw's known bits as a mask, and their values: the bits that all numbers between share."""
    inside = (low >= 0) & (high < 2**BITS)
    differing = np.where(inside, low ^ high, 2**BITS - 1)
    for shift in (1, 2, 4, 8, 16):
        differing |= differing >> shift
    mask = (2**BITS - 1) & ~differing
    return mask, low & mask


def tempered(word):
    """Return the draw that the generator makes of a word of its state."""
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return (word ^ (word >> 18)) & 0xFFFFFFFF


@functools.cache
def tempering():
    """Return for each bit of a draw the bits of the word that are its sum, and the other way round."""
    columns = [tempered(1 << bit) for bit in range(32)]
    forward = np.array([[column >> bit & 1 for column in columns] for bit in range(32)], np.uint8)
    both = np.concatenate([forward, np.eye(32, dtype=np.uint8)], 1)
    for column in range(32):
        pivot = column + int(both[column:, column].argmax())
        both[[column, pivot]] = both[[pivot, column]]
        for row in range(32):
            if row != column and both[row, column]:
                both[row] ^= both[column]
    return [[row.nonzero()[0] for row in matrix] for matrix in (forward, both[:, 32:])]


def find_state(mask, value):
    """Return the 624 words of state behind draws of which some bits are known, or None if no state gives them."""
    there = (mask[:WORDS, None] >> np.arange(32)) & 1 == 1  # (624, 32)
    unknown = np.flatnonzero(~there)
    width = len(unknown) // 64 + 1
    constant = len(unknown)
    draws = np.zeros((WORDS * 32, width), np.uint64)  # each bit is a sum of unknown bits and a constant
    draws[unknown, np.arange(constant) // 64] = _bit(np.arange(constant))
    draws[:, constant // 64] ^= np.where(
        there & ((value[:WORDS, None] >> np.arange(32)) & 1 == 1), _bit(constant), np.uint64(0)
    ).reshape(-1)
    forward, backward = tempering()
    draws = draws.reshape(WORDS, 32, width)
    words = list(np.stack([np.bitwise_xor.reduce(draws[:, places], 1) for places in backward], 1))
    equations = deque(maxlen=constant + _SPARE)  # later draws mix more bits
    for number in range(WORDS, len(mask)):
        first, second = words[number - WORDS], words[number - WORDS + 1]
        word = words[number - WORDS + MIDDLE].copy()
        word[:30] ^= second[1:31]
        word[30] ^= first[31]
        word[[bit for bit in range(32) if TWIST >> bit & 1]] ^= second[0]
        words.append(word)
        for bit in range(BITS):
            if mask[number] >> bit & 1:
                row = np.bitwise_xor.reduce(word[forward[bit]], 0)
                if value[number] >> bit & 1:
                    row[constant // 64] ^= _bit(constant)
                equations.append(row)
    solution = solve(np.stack(equations), constant)
    if solution is None:
        return None
    bits = np.bitwise_count(np.stack(words[:WORDS]) & solution).sum(2) & 1  # (624, 32)
    return (bits.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)


def solve(rows, unknowns):
    """Solve linear equations over bits, 64 columns a word; the constant is the column after the unknowns.

    Eight columns are eliminated together: which of their pivots a row needs is a number below 256, and the 256 sums of
    pivots are made once (the method of the four Russians). Free unknowns are zero; None if there is no solution.
    """
    pivots = []
    for begin in range(0, unknowns, _GROUP):
        word, first = begin // 64, len(pivots)
        found, needs = _pivots(rows, first, range(begin, min(begin + _GROUP, unknowns)))
        pivots += found
        sums = np.zeros((1 << len(found), rows.shape[1] - word), np.uint64)
        for number in range(1, len(sums)):
            lowest = (number & -number).bit_length() - 1
            sums[number] = sums[number & (number - 1)] ^ rows[first + lowest, word:]
        rows[len(pivots) :, word:] ^= sums[needs[len(pivots) :]]
    rank = len(pivots)
    constant = _bit(unknowns)
    if (rows[rank:, unknowns // 64] & constant).any():
        return None
    solution = np.zeros(rows.shape[1], np.uint64)
    solution[unknowns // 64] = constant
    for row in range(rank - 1, -1, -1):
        if int(np.bitwise_count(rows[row] & solution).sum()) & 1:
            solution[pivots[row] // 64] |= _bit(pivots[row])
    return solution


def _pivots(rows, first, places):
    """Move pivots of these columns to the rows from ``first`` on; return their columns, and what each row needs."""
    column, needs, found = rows[:, places[0] // 64].copy(), np.zeros(len(rows), np.int64), []
    for place in places:
        rank = first + len(found)
        there = np.flatnonzero(column[rank:] & _bit(place))
        if not len(there):
            continue
        pivot = rank + there[0]
        for earlier in range(len(found)):
            if needs[pivot] >> earlier & 1:
                rows[pivot] ^= rows[first + earlier]
        needs[pivot] = 0
        for array in (rows, column, needs):
            array[[rank, pivot]] = array[[pivot, rank]]
        others = rank + 1 + np.flatnonzero(column[rank + 1 :] & _bit(place))
        column[others] ^= column[rank]
        needs[others] |= 1 << len(found)
        found.append(place)
    return found, needs


def _bit(place):
    return np.uint64(1) << np.asarray(place % 64, np.uint64)


def predicted(state, count):
    """Return ``count`` numbers of torch.randn (float32, on a CPU) from the draw on at which the state was found."""
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": state, "pos": 0}}
    uniform = (twister.random_raw(count) % 2**BITS / 2**BITS).reshape(-1, 2, 8)
    radius, angle = np.sqrt(-2 * np.log1p(-uniform[:, 0])), 2 * np.pi * uniform[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)


def remove(sent, std, bare, layout=torch_layout):
    """Return what was sent without its noise, given that the first ``bare`` entries are noise alone; None if it fails.

    Args:
        sent: (n,) numbers, each with noise of standard deviation ``std``.
        std: of the noise, which everyone knows.
        bare: how many of the first entries are looked at.
        layout: how pairs of noise lie beside each other.
    """
    state = find_state(*known_bits(*uniform_bounds(sent[:bare] / std, layout)))
    return None if state is None else sent - std * predicted(state, len(sent))
