import shutil

import pytest
import torch

from gradveil.attacks.dlg import Dlg
from gradveil.attacks.parts import search
from gradveil.attacks.parts.local_training import replay_of
from gradveil.attacks.parts.objectives import Objective
from gradveil.errors import ConfigError
from gradveil.networks.grads import example_gradients
from tests.attacks.scene import scene


def step_of(seen, priors=None, restarts=1):
    """A step on the squared distance with these priors."""
    how = search.Search(Objective("l2"), priors or search.Priors())
    return search.SearchStep(how, restarts, seen, replay_of(seen, "unroll", torch.Generator()))


def loss_of(step, task, guess):
    return step.closure(task)(guess)[0]


def test_the_loss_is_the_distance_of_the_guesss_gradient_and_its_gradient_is_right():
    truth, labels, seen = scene(targets=2)
    step, task = step_of(seen), search.SearchTask(seen.mean_gradients, {}, labels)
    assert loss_of(step, task, truth.flatten(1)).max() < 1e-9
    guess = torch.rand(2, 64)
    found = example_gradients(seen.network, guess.view(2, 1, 8, 8), labels.flatten())
    by_hand = sum((found[n] - t).flatten(1).square().sum(1) for n, t in seen.gradients.items())
    loss, gradient = step.closure(task)(guess)
    torch.testing.assert_close(loss, by_hand, rtol=1e-4, atol=1e-6)
    direction = torch.randn_like(guess)
    ahead, behind = (loss_of(step, task, guess + sign * 1e-2 * direction) for sign in (1, -1))
    torch.testing.assert_close((gradient * direction).sum(1), (ahead - behind) / 2e-2, rtol=0.02, atol=0.02)


def test_priors_add_their_penalties():
    _, labels, seen = scene(targets=2)
    task, guess = search.SearchTask(seen.mean_gradients, {}, labels), torch.rand(2, 64)
    plain = loss_of(step_of(seen), task, guess)
    square = loss_of(step_of(seen, search.Priors(l2=3.0)), task, guess) - plain
    torch.testing.assert_close(square, 3 * guess.square().mean(1), rtol=1e-3, atol=1e-3)
    images = guess.view(2, 8, 8)
    variation = images.diff(dim=1).abs().mean((1, 2)) + images.diff(dim=2).abs().mean((1, 2))
    found = loss_of(step_of(seen, search.Priors(tv=2.0)), task, guess) - plain
    torch.testing.assert_close(found, 2 * variation, rtol=1e-3, atol=1e-3)


def test_the_group_draws_the_restarts_of_each_target_to_their_own_mean():
    _, labels, seen = scene(targets=2)
    rows = torch.tensor([0, 0, 0, 1, 1, 1])
    task, guess = search.SearchTask(seen.mean_gradients, {}, labels).of(rows), torch.rand(6, 64)
    plain, held = step_of(seen, restarts=3), step_of(seen, search.Priors(group=5.0), restarts=3)
    extra = loss_of(held, task, guess) - loss_of(plain, task, guess)
    groups = guess.view(2, 3, 64)
    by_hand = 5 * (groups - groups.mean(1, keepdim=True)).square().mean(2).flatten()
    torch.testing.assert_close(extra, by_hand, rtol=1e-3, atol=1e-3)
    pull = held.closure(task)(guess)[1] - plain.closure(task)(guess)[1]
    torch.testing.assert_close(
        pull.view(2, 3, 64), 10 * (groups - groups.mean(1, keepdim=True)) / 64, rtol=0.05, atol=1e-3
    )


def test_a_task_of_some_rows_takes_everything_along():
    task = search.SearchTask(
        {"w": torch.arange(6.0).view(3, 2)}, {"bn": (torch.zeros(3, 1), torch.ones(3, 1))}, torch.ones(3, 1)
    )
    some = task.of(torch.tensor([2, 0]))
    assert some.rows == 2
    assert some.wanted["w"].tolist() == [[4, 5], [0, 1]]
    assert [len(tensor) for tensor in some.tensors] == [2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_step_with_soft_labels_is_the_same_step():
    _, _, seen = scene(targets=3)
    rng = torch.Generator().manual_seed(0)
    step = search.SearchStep(Dlg().search(seen), 1, seen, replay_of(seen, "unroll", rng))
    task = search.SearchTask(seen.mean_gradients, {}, None)
    guess = step.begin("normal", task, rng)
    plain = step.closure(task)(guess)
    step.compile_for(task, must=True)
    fast = step.closure(task)(guess)
    for ours, theirs in zip(fast, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


def test_a_restricted_search_keeps_weights_in_every_phase_and_leaves_out_what_was_left_out():
    _, _, seen = scene(targets=1)
    weighted = search.Search(Objective("l2", weights={"fc.weight": 0.0, "fc.bias": 2.0}), first=search.Search())
    found = search.restricted(weighted, "linear", seen.network, seen.updates)
    assert {name: w for name, w in found.objective.weights.items() if w} == {"fc.bias": 2.0}
    assert {name for name, w in found.phases[0].objective.weights.items() if w} == {"fc.weight", "fc.bias"}
    assert search.restricted(weighted, "all", seen.network, seen.updates) is weighted
    nothing = search.Search(Objective("l2", weights={"fc.weight": 0.0, "fc.bias": 0.0}))
    with pytest.raises(ConfigError, match="parts=linear"):
        search.restricted(nothing, "linear", seen.network, seen.updates)


def test_parts_leave_what_is_beside_the_tensors_out():
    _, _, seen = scene()
    whole = search.Search(Objective("cosine", weights={"keep/fc.weight": 0.0, "fc.bias": 2.0}))
    weights = search.restricted(whole, "linear", seen.network, seen.updates).objective.weights
    assert weights["keep/fc.weight"] == 0
    assert (weights["fc.weight"], weights["fc.bias"], weights["conv1.weight"]) == (1, 2, 0)
