import torch

from gradveil.attacks.parts.completion import completed
from gradveil.attacks.parts.exact_batches import ReluLayer, factors


def made(count, width, error, seed=0):
    """Return a layer, inputs, the factors of a gradient, and rows P that are wrong by a relative error."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    layer, inputs = ReluLayer(draw(width, 50), draw(width)), draw(count, 50)
    known = torch.cat([inputs, torch.ones(count, 1)], 1)
    parts = factors((draw(width, count) * layer.active(inputs)) @ known, count)
    rows = known @ parts.basis.T
    return layer, inputs, parts, rows + error * rows.norm(dim=1, keepdim=True) / count**0.5 * draw(count, count)


def inputs_of(rows, parts):
    mixed = rows @ parts.basis
    return mixed[:, :-1] / mixed[:, -1:]


def keep_estimate(mixtures):
    """Separate nothing: any combinations will do."""
    return torch.eye(len(mixtures), dtype=mixtures.dtype)


def test_rough_estimates_become_exact():
    layer, inputs, parts, rows = made(12, 200, 0.2)
    assert (inputs_of(rows, parts) - inputs).abs().max() > 0.1
    better, known = completed(parts, layer, rows, keep_estimate)
    assert known.all()
    assert torch.allclose(inputs_of(better, parts), inputs, atol=1e-6)


def test_the_rest_is_separated_from_fewer_mixtures():
    layer, inputs, parts, rows = made(12, 200, 0.05)
    rows[3:5] = rows[[5, 5]] + 0.01 * rows[[6, 7]]  # three estimates of one image
    truth = torch.cat([inputs, torch.ones(12, 1)], 1)
    sizes = []

    def told(mixtures):  # the truth, for those images that these mixtures are of
        sizes.append(len(mixtures))
        rows = truth @ torch.linalg.pinv(mixtures)
        inside = (rows @ mixtures - truth).norm(dim=1) < 1e-6 * truth.norm(dim=1)
        return rows[inside]

    better, known = completed(parts, layer, rows, told)
    assert sizes == [2]
    assert known.all()
    assert (torch.cdist(inputs, inputs_of(better, parts)).amin(1) < 1e-6).all()


def test_too_few_neurons_that_are_off_change_nothing():
    layer, _, parts, rows = made(12, 20, 0.05)
    better, known = completed(parts, layer, rows, keep_estimate)
    assert not known.any()
    assert torch.allclose(inputs_of(better, parts), inputs_of(rows, parts))


def test_a_single_image_is_known():
    layer, inputs, parts, rows = made(1, 20, 0.0)
    better, known = completed(parts, layer, rows, keep_estimate)
    assert known.all()
    assert torch.allclose(inputs_of(better, parts), inputs)
