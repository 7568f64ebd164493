"""Checks of settings: they accept exactly what their rule allows, and otherwise state the rule and the value."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.validate import in_range, one_of

NUMBERS = st.one_of(st.floats(), st.integers(-(10**6), 10**6))
BOUNDS = st.tuples(st.integers(-50, 50), st.integers(0, 100)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def passes(*args, **kwargs):
    try:
        in_range(*args, **kwargs)
    except ConfigError:
        return False
    return True


@given(NUMBERS, BOUNDS, st.booleans(), st.booleans())
@example(math.nan, (0, 1), False, False)
@example(0, (0, 1), True, False)
@example(1, (0, 1), False, True)
def test_a_range_accepts_exactly_the_values_in_it(value, bounds, open_low, open_high):
    low, high = bounds
    inside = (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
    assert passes("x", value, low, high, open_low=open_low, open_high=open_high) == inside


@given(NUMBERS)
def test_without_bounds_only_finite_numbers_pass(value):
    assert passes("x", value) == math.isfinite(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, False, None, "1", [1], 1j])
def test_anything_but_a_finite_number_is_refused(value):
    for bounds in [(), (0,), (0, 5), (-math.inf, 5)]:
        with pytest.raises(ConfigError, match=r"^x must be .*, got "):
            in_range("x", value, *bounds)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((-1, 0), {}, "x must be at least 0, got -1."),
        ((0, 0), {"open_low": True}, "x must be more than 0, got 0."),
        ((2, -math.inf, 1), {}, "x must be at most 1, got 2."),
        ((1, -math.inf, 1), {"open_high": True}, "x must be less than 1, got 1."),
        ((1, 0, 1), {"open_high": True}, "x must be in [0, 1), got 1."),
        ((0, 0, 1), {"open_low": True}, "x must be in (0, 1], got 0."),
        ((math.nan,), {}, "x must be a finite number, got nan."),
    ],
)
def test_the_message_has_the_rule_and_the_value(arguments, keywords, message):
    with pytest.raises(ConfigError) as caught:
        in_range("x", *arguments, **keywords)
    assert str(caught.value) == message


def test_an_integer_beyond_all_floats_is_compared_like_any_other():
    with pytest.raises(ConfigError, match="must be in"):
        in_range("seed", 10**400, 0, 2**63 - 1)
    with pytest.raises(ConfigError, match="must be at least 0"):
        in_range("seed", -(10**400), 0)


@given(st.text(max_size=5), st.lists(st.text(max_size=5), max_size=5))
def test_a_choice_is_one_of_the_choices(value, choices):
    if value in choices:
        assert one_of("x", value, iter(choices)) is None
    else:
        with pytest.raises(UnknownNameError, match=r"^Unknown x "):
            one_of("x", value, iter(choices))
