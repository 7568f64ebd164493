"""A matrix of rank two follows from a part of its entries."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.attacks.parts.matrix_completion import completed


def test_a_missing_entry_follows_from_the_others():
    """By hand: rows (1, 0, 1, 2), (0, 1, 1, 3); the third is their sum, the fourth the first plus twice the second."""
    whole = torch.tensor([[1.0, 0, 1, 2], [0, 1, 1, 3], [1, 1, 2, 5], [1, 2, 3, 8]], dtype=torch.float64)
    known = torch.ones(4, 4, dtype=torch.bool)
    known[2, 0] = known[0, 1] = False  # 1 and 0, of the smallest
    found = completed(whole * known, known)
    assert found.values[2, 0].item() == pytest.approx(1, abs=1e-5)
    assert found.values[0, 1].item() == pytest.approx(0, abs=1e-5)


@given(st.integers(4, 9), st.integers(30, 60), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_largest_entries_give_the_others(rows, columns, seed):
    """Half of the entries are pruned by their size, as a defence does."""
    rng = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, 2, generator=rng, dtype=torch.float64) for size in (rows, columns))
    whole = left @ right.T
    known = whole.abs() >= whole.abs().median()
    found = completed(whole * known, known)
    if found is not None and found.misfit < 1e-7 and known[found.rows][:, found.columns].double().mean() > 0.6:
        truth = whole[found.rows][:, found.columns]
        assert float((found.values - truth).norm() / truth.norm()) < 1e-3


def test_rows_and_columns_with_too_few_entries_are_left_out():
    whole = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ torch.randn(
        2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    known = torch.ones(6, 8, dtype=torch.bool)
    known[2, 1:] = False  # a row with one entry
    known[1:, 5] = False  # a column with one
    found = completed(whole * known, known)
    assert found.rows.tolist() == [0, 1, 3, 4, 5]
    assert found.columns.tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert torch.allclose(found.values, whole[found.rows][:, found.columns])


def test_nothing_follows_from_too_little():
    matrix = torch.ones(4, 4)
    assert completed(matrix, torch.eye(4) > 0) is None
    assert completed(matrix, torch.zeros(4, 4) > 0) is None
