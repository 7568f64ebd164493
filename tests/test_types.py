import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.types import Batch, Update

floats = st.floats(-1e3, 1e3)


def update(*values):
    return Update({"w": torch.tensor(values[:2]).double(), "s": torch.tensor(values[2]).double()}, 3)


@given(st.tuples(floats, floats, floats), st.tuples(floats, floats, floats), floats)
def test_updates_form_a_vector_space(a, b, factor):
    one, other = update(*a), update(*b)
    for name in one.tensors:
        assert torch.equal((one + other).tensors[name], one.tensors[name] + other.tensors[name])
        assert torch.equal((one * factor).tensors[name], one.tensors[name] * factor)
        assert torch.allclose(((one + other) - other).tensors[name], one.tensors[name], atol=1e-9)
    assert torch.isclose((one * factor).norm(), abs(factor) * one.norm(), rtol=1e-9)


def test_norm_counts_scalars_and_survives_zero_and_nothing():
    assert update(3.0, 4.0, 12.0).norm() == 13
    assert update(0.0, 0.0, 0.0).norm() == 0
    assert Update({}, 0).norm() == 0


def test_map_changes_neither_buffers_nor_the_original():
    one = Update({"w": torch.ones(2)}, 1, {"mean": torch.ones(2)})
    doubled = one.map(lambda tensor: tensor * 2)
    assert torch.equal(doubled.tensors["w"], torch.full((2,), 2.0))
    assert torch.equal(doubled.buffers["mean"], torch.ones(2))
    assert torch.equal(one.tensors["w"], torch.ones(2))


def test_slicing_a_batch_slices_all_its_tensors():
    batch = Batch(torch.rand(4, 1, 2, 2), torch.arange(4), torch.tensor([True, False, True, False]))
    part = batch[torch.tensor([2, 0])]
    assert len(part) == 2
    assert part.labels.tolist() == [2, 0]
    assert part.sensitive.tolist() == [True, True]
    assert torch.equal(part.images[0], batch.images[2])
