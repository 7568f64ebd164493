import torch
from hypothesis import given
from hypothesis import strategies as st

from gradveil.attacks.parts.label_counts import class_outputs, class_shares, rounded
from gradveil.types import Batch
from tests.attacks.scene import scene


@given(st.lists(st.integers(0, 50), min_size=3, max_size=8).filter(any))
def test_shares_are_exact_if_the_outputs_on_each_class_are(counts):
    true = torch.tensor(counts, dtype=torch.float64)
    true /= true.sum()
    rng = torch.Generator().manual_seed(0)
    outputs = (torch.randn(len(counts), len(counts), generator=rng) + 2 * torch.eye(len(counts))).softmax(1).double()
    gradient = outputs.T @ true - true
    found = class_shares(gradient, outputs, torch.full_like(true, 1 / len(true)), 0.0)
    assert torch.allclose(found, true, atol=1e-6)


def test_a_network_that_knows_every_label_leaves_the_prior():
    prior = torch.tensor([0.5, 0.3, 0.2])
    assert torch.allclose(class_shares(torch.zeros(3), torch.eye(3), prior, 0.01).float(), prior, atol=1e-4)


def test_outputs_by_class_equal_a_naive_mean():
    _, _, seen = scene(targets=2, size=3)
    rng = torch.Generator().manual_seed(2)
    public = Batch(torch.rand(9, 1, 8, 8, generator=rng), torch.arange(9) % 3, torch.zeros(9) > 0)  # none of class 3
    found = class_outputs(seen, public)
    with torch.no_grad():
        every = seen.network(public.images).softmax(1)
    naive = torch.stack([every[public.labels == label].mean(0) for label in range(3)] + [every.mean(0)])
    assert found.shape == (2, 4, 4)
    assert torch.allclose(found[0], naive, atol=1e-6)
    assert torch.equal(found[0], found[1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(lambda each: sum(each) > 0.1), st.integers(1, 300))
def test_rounded_labels_are_as_many_as_asked_and_off_by_less_than_one(shares, count):
    exact = torch.tensor(shares, dtype=torch.float64)
    exact /= exact.sum()
    labels = rounded(exact, count)
    assert len(labels) == count
    found = torch.bincount(labels, minlength=len(shares))
    assert (found - exact * count).abs().max() < 1 + 1e-9
