import shutil

import pytest
import torch

from gradveil.attacks.dlg import Dlg
from gradveil.attacks.parts.local_training import replay_of
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.search import Priors, Search
from gradveil.attacks.parts.search_layout import DECOY_LABELS, DECOYS, IMAGES, LABELS, output_of
from gradveil.attacks.parts.search_step import SearchStep
from gradveil.attacks.parts.search_task import SearchTask
from gradveil.defences.countermove import Countermove
from gradveil.networks.grads import example_gradients
from tests.attacks.scene import scene


def step_of(seen, priors=None, restarts=1):
    """A step on the squared distance with these priors."""
    how = Search(Objective("l2"), priors or Priors())
    return SearchStep(how, restarts, seen, replay_of(seen, "unroll", torch.Generator()))


def loss_of(step, task, guess):
    return step.closure(task)(guess)[0]


def test_the_loss_is_the_distance_of_the_guesss_gradient_and_its_gradient_is_right():
    truth, labels, seen = scene(targets=2)
    step, task = step_of(seen), SearchTask(seen.mean_gradients, {}, labels)
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
    task, guess = SearchTask(seen.mean_gradients, {}, labels), torch.rand(2, 64)
    plain = loss_of(step_of(seen), task, guess)
    square = loss_of(step_of(seen, Priors(l2=3.0)), task, guess) - plain
    torch.testing.assert_close(square, 3 * guess.square().mean(1), rtol=1e-3, atol=1e-3)
    images = guess.view(2, 8, 8)
    variation = images.diff(dim=1).abs().mean((1, 2)) + images.diff(dim=2).abs().mean((1, 2))
    found = loss_of(step_of(seen, Priors(tv=2.0)), task, guess) - plain
    torch.testing.assert_close(found, 2 * variation, rtol=1e-3, atol=1e-3)


def test_the_group_draws_the_restarts_of_each_target_to_their_own_mean():
    _, labels, seen = scene(targets=2)
    rows = torch.tensor([0, 0, 0, 1, 1, 1])
    task, guess = SearchTask(seen.mean_gradients, {}, labels).of(rows), torch.rand(6, 64)
    plain, held = step_of(seen, restarts=3), step_of(seen, Priors(group=5.0), restarts=3)
    extra = loss_of(held, task, guess) - loss_of(plain, task, guess)
    groups = guess.view(2, 3, 64)
    by_hand = 5 * (groups - groups.mean(1, keepdim=True)).square().mean(2).flatten()
    torch.testing.assert_close(extra, by_hand, rtol=1e-3, atol=1e-3)
    pull = held.closure(task)(guess)[1] - plain.closure(task)(guess)[1]
    torch.testing.assert_close(
        pull.view(2, 3, 64), 10 * (groups - groups.mean(1, keepdim=True)) / 64, rtol=0.05, atol=1e-3
    )


def test_a_task_of_some_rows_takes_everything_along():
    task = SearchTask(
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
    step = SearchStep(Dlg().search(seen), 1, seen, replay_of(seen, "unroll", rng))
    task = SearchTask(seen.mean_gradients, {}, None)
    guess = step.begin("normal", task, rng)
    plain = step.closure(task)(guess)
    step.compile_for(task, must=True)
    fast = step.closure(task)(guess)
    for ours, theirs in zip(fast, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


def test_every_variable_of_a_row_has_one_name():
    _, labels, seen = scene(targets=2, size=2)
    move = Countermove(decoys=1, unknowns={"fc": lambda rows, rng: torch.full((rows, 4), 7.0)})
    step = SearchStep(Search(Objective("l2"), move=move), 1, seen, replay_of(seen, "unroll", torch.Generator()))
    searched, fixed = (SearchTask(seen.mean_gradients, {}, known) for known in (None, labels))
    layout = step.layout(searched)
    assert layout.sizes == {IMAGES: 128, LABELS: 8, DECOYS: 128, DECOY_LABELS: 8, output_of("fc"): 4}
    assert list(step.layout(fixed).sizes) == [IMAGES, DECOYS, DECOY_LABELS, output_of("fc")]
    flat = step.begin("grey", searched, torch.Generator().manual_seed(0))
    assert flat.shape == (2, layout.size)
    assert torch.equal(torch.cat([layout.part(flat, name) for name in layout.sizes], 1), flat)
    assert torch.equal(step.outputs(flat, searched)["fc"], torch.full((2, 4), 7.0))
    assert torch.equal(step.pictures(flat, searched), torch.full((2, 2, 1, 8, 8), 0.5))
    assert torch.equal(step.targets(flat, searched), layout.part(flat, LABELS).reshape(4, 4).softmax(1))


def test_only_pixels_are_put_into_the_box():
    _, _, seen = scene(targets=1)
    step, task = step_of(seen), SearchTask(seen.mean_gradients, {}, None)
    boxed = step.boxed(torch.full((1, 68), 3.0), task)
    assert boxed[:, :64].max() <= 1
    assert torch.equal(boxed[:, 64:], torch.full((1, 4), 3.0))
