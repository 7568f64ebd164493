from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.attacks.parts.optimisers import BatchedAdam, BatchedLbfgs, BatchedRmsprop, LearningRate, decay, signed
from gradveil.errors import UnknownNameError


def problems(count, size, seed):
    """Return independent smooth problems of different curvature, one of them solved at the start."""
    rng = torch.Generator().manual_seed(seed)
    matrices = torch.randn(count, size, size, generator=rng, dtype=torch.float64)
    offsets = torch.randn(count, size, generator=rng, dtype=torch.float64)
    starts = torch.randn(count, size, generator=rng, dtype=torch.float64)

    def loss(x, rows):
        residual = torch.einsum("tij,tj->ti", matrices[rows], x) - offsets[rows]
        return residual.square().sum(1) + 0.1 * x.pow(4).sum(1) + x.sin().sum(1)

    return loss, starts


@settings(deadline=None, max_examples=15)
@given(
    count=st.integers(1, 4), history=st.sampled_from([2, 5, 100]), lr=st.sampled_from([0.05, 0.3, 1.0]),
    seed=st.integers(0, 99), steps=st.integers(1, 2),
)  # fmt: skip
def test_equals_torch_lbfgs_on_every_target(count, history, lr, seed, steps):
    """Of 20 iterations a step; after some 60 the last bits grow to what can be seen, as problems are not convex."""
    loss, starts = problems(count, 6, seed)

    def closure(x):
        leaf = x.detach().requires_grad_()
        values = loss(leaf, slice(None))
        return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]

    ours = BatchedLbfgs(starts, lr=lr, history=history)
    firsts = torch.stack([ours.step(closure) for _ in range(steps)])
    for target in range(count):
        x = starts[target].clone().requires_grad_()
        theirs = torch.optim.LBFGS([x], lr=lr, history_size=history)

        def alone(x=x, theirs=theirs, target=target):
            theirs.zero_grad()
            value = loss(x[None], slice(target, target + 1)).sum()
            value.backward()
            return value

        for step in range(steps):
            first = theirs.step(alone).detach()
            if not first.isfinite() or first > 1e12:
                break  # both diverge, and differ in the last bits
            assert torch.allclose(first, firsts[step, target], rtol=1e-6), (target, step)
        else:
            assert torch.allclose(x.detach(), ours.variables[target], rtol=1e-4, atol=1e-4)


def test_a_solved_target_stays_where_it_is_while_others_move():
    def closure(x):
        return (x - torch.tensor([[1.0], [0.0]])).square().sum(1), 2 * (x - torch.tensor([[1.0], [0.0]]))

    lbfgs = BatchedLbfgs(torch.tensor([[1.0], [5.0]]))
    lbfgs.step(closure)
    assert lbfgs.variables[0].item() == 1.0
    assert abs(lbfgs.variables[1].item()) < 1e-4


@pytest.mark.parametrize("schedule", ["constant", "steps"])
def test_equals_torch_adam_on_every_target(schedule):
    loss, starts = problems(3, 6, 1)

    def closure(x):
        leaf = x.detach().requires_grad_()
        values = loss(leaf, slice(None))
        return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]

    ours = BatchedAdam(starts, LearningRate(0.1, 20, schedule))
    theirs = starts.clone().requires_grad_()
    adam = torch.optim.Adam([theirs], lr=0.1)
    for step in range(20):
        adam.param_groups[0]["lr"] = 0.1 * decay(schedule, step, 20)
        theirs.grad = closure(theirs)[1]
        adam.step()
        ours.step(closure)
    assert torch.allclose(ours.variables, theirs.detach())


@pytest.mark.parametrize("kind", [BatchedLbfgs, lambda x: BatchedAdam(x, LearningRate(0.1, 9), sign="soft")])
def test_remaining_targets_continue_as_if_none_had_left(kind):
    loss, starts = problems(4, 5, 3)

    def closure_of(rows):
        def closure(x):
            leaf = x.detach().requires_grad_()
            values = loss(leaf, rows)
            return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]

        return closure

    everyone, some = kind(starts), kind(starts)
    staying = torch.tensor([True, False, True, True])
    for _ in range(2):
        everyone.step(closure_of(slice(None)))
        some.step(closure_of(slice(None)))
    some.keep(staying)
    for _ in range(2):
        everyone.step(closure_of(slice(None)))
        some.step(closure_of(staying))
    assert torch.allclose(everyone.variables[staying], some.variables)


def test_noise_and_projection_of_adam():
    def flat(x):
        return torch.zeros(len(x)), torch.zeros_like(x)

    start = torch.zeros(50, 40)
    noisy = BatchedAdam(start, LearningRate(0.5, 1), noise=0.2, rng=torch.Generator().manual_seed(0))
    noisy.step(flat)
    assert noisy.variables.std().item() == pytest.approx(0.1, rel=0.1)
    boxed = BatchedAdam(start + 3, LearningRate(0.5, 1), project=lambda x: x.clamp(0, 1))
    boxed.step(flat)
    assert boxed.variables.max() == 1


def test_schedules_by_hand():
    assert [decay("steps", step, 800) for step in (0, 299, 300, 500, 700)] == [1, 1, 0.1, 0.01, 0.001]
    assert decay("constant", 7, 8) == 1
    assert decay("cosine", 0, 1000) == pytest.approx(1 / 50)
    assert decay("cosine", 500, 1000) == pytest.approx(0.5)
    with pytest.raises(UnknownNameError, match="steps"):
        decay("step", 0, 1)


def test_signs():
    gradient = torch.tensor([[3.0, -0.1], [0.0, 2.0]])
    assert torch.equal(signed(gradient, "hard", 0), gradient.sign())
    assert torch.equal(signed(gradient, "none", 0), gradient)
    soft = signed(gradient, "soft", 0.5)
    assert torch.equal(soft.sign(), gradient.sign())
    assert soft.abs().max() < 1
    assert (signed(gradient, "soft", 1.0).abs() >= signed(gradient, "soft", 0.0).abs()).all()
    with pytest.raises(UnknownNameError, match="hard"):
        signed(gradient, "heard", 0)


@settings(deadline=None, max_examples=10)
@given(count=st.integers(1, 4), momentum=st.sampled_from([0.0, 0.5, 0.99]), seed=st.integers(0, 99))
def test_equals_torch_rmsprop_on_every_target_and_variable(count, momentum, seed):
    loss, starts = problems(count, 6, seed)
    rates = torch.tensor([1.0, 1.0, 1.0, 5.0, 5.0, 0.5], dtype=torch.float64)

    def closure(x):
        leaf = x.detach().requires_grad_()
        values = loss(leaf, slice(None))
        return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]

    ours = BatchedRmsprop(starts, LearningRate(1e-3, 5), factors=rates, momentum=momentum)
    for _ in range(5):
        ours.step(closure)
    for target in range(count):
        pieces = [piece.clone().requires_grad_() for piece in starts[target].split([3, 2, 1])]
        groups = [{"params": [piece], "lr": lr} for piece, lr in zip(pieces, (1e-3, 5e-3, 5e-4), strict=True)]
        theirs = torch.optim.RMSprop(groups, lr=1e-3, alpha=0.99, momentum=momentum)
        for _ in range(5):
            theirs.zero_grad()
            loss(torch.cat(pieces)[None], slice(target, target + 1)).sum().backward()
            theirs.step()
        assert torch.allclose(torch.cat(pieces), ours.variables[target], rtol=1e-6)


def test_targets_can_leave_rmsprop():
    aims = torch.tensor([[1.0], [2.0], [3.0]])

    def closure(x, aims=aims):
        return (x - aims).square().sum(1), 2 * (x - aims)

    whole, part = (BatchedRmsprop(torch.zeros(3, 1), LearningRate(1e-2, 2), factors=torch.ones(1)) for _ in range(2))
    for optimiser in (whole, part):
        optimiser.step(closure)
    staying = torch.tensor([True, False, True])
    part.keep(staying)
    whole.step(closure)
    part.step(lambda x: closure(x, aims[staying]))
    assert torch.equal(part.variables, whole.variables[staying])


def test_rmsprop_slows_down_by_its_schedule():
    def closure(x):
        return x.sum(1), torch.ones_like(x)

    steps = {}
    for schedule in ("constant", "steps"):
        optimiser = BatchedRmsprop(
            torch.zeros(1, 1), LearningRate(1.0, 8, schedule), factors=torch.ones(1), kept=0.0, momentum=0.0
        )
        places = [float(optimiser.variables)]
        for _ in range(8):
            optimiser.step(closure)
            places.append(float(optimiser.variables))
        steps[schedule] = [a - b for a, b in pairwise(places)]
    assert steps["constant"] == pytest.approx([1.0] * 8, abs=1e-5)
    assert steps["steps"] == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001], abs=1e-5)
