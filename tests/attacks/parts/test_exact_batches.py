import pytest
import torch

from gradveil.attacks.parts.exact_batches import ReluLayer, by_span, by_zeros, factors, misfit, unexplained


def made(count=5, seed=0):
    """Return a layer, inputs, the gradient that random errors cause, and hidden representations."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    layer, inputs = ReluLayer(draw(60, 20), draw(60)), draw(count, 20)
    errors = draw(60, count) * layer.active(inputs)
    gradient = errors @ torch.cat([inputs, torch.ones(count, 1)], 1)
    return layer, inputs, gradient, (inputs @ layer.weight.T + layer.bias).relu()


@pytest.mark.parametrize("count", [5, None])
def test_the_rank_is_the_number_of_images(count):
    _, _, gradient, _ = made()
    parts = factors(gradient, count)
    assert parts.rank == 5
    assert torch.allclose(parts.rows @ parts.basis, gradient)
    assert factors(torch.zeros(4, 3, dtype=torch.float64), count).rank == 0


def test_the_span_gives_every_input():
    for seed in range(5):
        layer, inputs, gradient, hidden = made(seed=seed)
        rng = torch.Generator().manual_seed(1)
        found, sure = by_span(factors(gradient, 5), layer, torch.linalg.qr(hidden.T).Q.T, 512, rng)
        assert sure.all()
        assert (torch.cdist(inputs, found).amin(1) < 1e-6).all()


def test_zeros_give_many_inputs_and_only_whole_batches_are_sure():
    """The search by zeros misses some: half of the inputs over ten batches is the least that is asked."""
    hits = 0
    for seed in range(10):
        layer, inputs, gradient, _ = made(seed=seed)
        found, sure = by_zeros(factors(gradient, 5), layer, 256, torch.Generator().manual_seed(1))
        exact = torch.cdist(inputs, found).amin(1) < 1e-6
        assert exact.all() or not sure.all()
        hits += int(exact.sum())
    assert hits >= 25


def test_the_misfit_worked_neuron_by_neuron():
    layer, inputs, gradient, _ = made()
    assert misfit(gradient, layer, inputs) < 1e-7
    known = torch.cat([inputs[1:], torch.ones(4, 1, dtype=torch.float64)], 1)
    left = 0.0
    for row, on in zip(gradient, layer.active(inputs[1:]), strict=True):
        best = torch.linalg.lstsq(known[on].T, row[:, None]).solution if on.any() else torch.zeros(0, 1).double()
        left += float((row - (known[on].T @ best)[:, 0]).square().sum())
    assert misfit(gradient, layer, inputs[1:]) == pytest.approx((left / float(gradient.square().sum())) ** 0.5)


def test_what_inputs_leave_unexplained_is_no_less_than_the_misfit():
    layer, inputs, gradient, _ = made()
    assert unexplained(gradient, layer, inputs) < 1e-7
    for some in (inputs[1:], inputs + 0.1):
        assert unexplained(gradient, layer, some) >= misfit(gradient, layer, some)
        assert unexplained(gradient, None, some) <= unexplained(gradient, layer, some)
    wanted = gradient - gradient @ torch.linalg.pinv(known := torch.cat([inputs[1:], torch.ones(4, 1)], 1)) @ known
    assert unexplained(gradient, None, inputs[1:]) == pytest.approx(float(wanted.norm() / gradient.norm()))
