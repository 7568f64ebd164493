"""Budgets of differential privacy, for every defence that has one."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradveil.audits.utility import weakest_budget
from gradveil.defences import Defence, build_defence
from gradveil.federated.protocol import LocalSettings
from gradveil.registry import names

VARIANTS = {
    "dp-sgd": ("dp-sgd", "dp-sgd:noise=0.7,sampling=shuffle", "dp-sgd:noise=4,accountant=prv"),
    "chain": ("clip+dp-sgd", "pogz+prune"),
    "ca-fl": ("ca-fl", "ca-fl:per=update"),
}
"""Defences with several ways of accounting."""


def with_budget():
    """Return the texts of all defences that state a budget."""
    own = [name for name in names(Defence.kind) if name == "chain" or build_defence(name).overrides("budget")]
    return [text for name in own for text in VARIANTS.get(name, (name,))]


HOW = st.builds(
    LocalSettings,
    algorithm=st.sampled_from(["fedavg", "fedsgd"]),
    epochs=st.integers(1, 3),
    batch_size=st.sampled_from([0, 1, 8, 32]),
)


def test_all_defences_with_a_budget_are_found():
    assert {"dp-sgd", "pogz", "ca-fl", "clip+dp-sgd"} <= set(with_budget())


@pytest.mark.parametrize("text", with_budget())
@given(how=HOW, sizes=st.lists(st.sampled_from([1, 7, 40, 400]), min_size=1, max_size=3), rounds=st.integers(1, 50))
@example(how=LocalSettings("fedsgd", batch_size=1), sizes=[400], rounds=2)
@settings(max_examples=25, deadline=None)
def test_one_update_never_costs_more_than_the_training_that_contains_it(text, how, sizes, rounds):
    defence = build_defence(text)
    one, whole = (weakest_budget(defence, how, sizes, count, entries=1000) for count in (1, rounds))
    assert one is not None
    assert whole is not None
    assert 0 < one.epsilon <= whole.epsilon
    assert one.delta == whole.delta
