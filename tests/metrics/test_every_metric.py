"""Laws that every metric must keep."""

import copy
import dataclasses
import importlib
import inspect
import math
import pickle
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import gradveil.metrics
from gradveil.errors import ConfigError, MissingDataError
from gradveil.metrics import Metric, MetricUnavailable

HELPERS = {
    "base",
    "columns",
    "labels",
    "lpips",
    "matching",
    "roc",
    "scores",
    "identification",
    "recognition",
    "epsilon_hat",
}


def found():
    for info in pkgutil.iter_modules(gradveil.metrics.__path__):
        module = importlib.import_module(f"gradveil.metrics.{info.name}")
        for item in vars(module).values():
            own = inspect.isclass(item) and issubclass(item, Metric) and item.__module__ == module.__name__
            if own and not inspect.isabstract(item):
                yield info.name, item


METRICS = dict(found())
SHAPES = [(1, 16, 16), (3, 16, 16), (3, 5, 9), (1, 1, 1), (3, 33, 40)]


def images(count, shape=(3, 16, 16), seed=0):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


def noisy(truth, scale, seed=1):
    return truth + scale * torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed))


def test_every_file_has_its_metric():
    files = {info.name for info in pkgutil.iter_modules(gradveil.metrics.__path__)}
    assert set(METRICS) == files - HELPERS
    assert {"mse", "rmse", "psnr", "ssim", "lpips_alex", "lpips_vgg"} <= set(METRICS)


def test_the_exports_are_sorted_and_exist():
    assert gradveil.metrics.__all__ == sorted(gradveil.metrics.__all__)
    assert all(hasattr(gradveil.metrics, name) for name in gradveil.metrics.__all__)


@pytest.mark.usefixtures("with_weights")
@pytest.mark.parametrize("file", METRICS)
class TestEveryMetric:
    def test_class_file_and_spec_names_agree(self, file):
        metric = METRICS[file]()
        assert (metric.kind, metric.name, metric.spec) == ("metrics", file.replace("_", "-"), file.replace("_", "-"))
        assert isinstance(metric.higher_is_leakier, bool)
        assert (Path(__file__).parent / f"test_{file}.py").is_file()

    def test_the_docstring_is_complete(self, file):
        text = inspect.getdoc(METRICS[file])
        for part in (".. math::", "Range:", "leakier", "Edge cases:", "Reference:", "Differs from the paper:", ">>>"):
            assert part in text, f"{file} lacks {part!r}"
        for field in dataclasses.fields(METRICS[file]):
            assert re.search(rf"^\s+{field.name}: ", text, re.MULTILINE), f"{file} does not explain {field.name}"

    @pytest.mark.parametrize("shape", SHAPES)
    def test_one_value_for_each_example_and_the_identity_is_the_leakiest(self, file, shape):
        metric, truth = METRICS[file](), images(3, shape)
        exact, near, far = metric(truth, truth), metric(truth, noisy(truth, 0.05)), metric(truth, 1 - truth)
        for values in (exact, near, far):
            assert (values.shape, values.dtype, values.device.type) == ((3,), torch.float64, "cpu")
            assert values.isfinite().all()
        sign = 1 if metric.higher_is_leakier else -1
        assert (sign * exact > sign * near).all()
        assert (exact == exact[0]).all()

    def test_more_noise_is_less_leaky_on_average(self, file):
        metric, truth = METRICS[file](), images(6).clamp(0.2, 0.8)
        means = [metric(truth, noisy(truth, scale)).mean().item() for scale in (0.01, 0.05, 0.2, 1.0)]
        assert means == sorted(means, reverse=metric.higher_is_leakier)
        assert len(set(means)) == 4

    def test_a_batch_is_measured_as_its_images_one_by_one(self, file):
        metric, truth = METRICS[file](), images(4)
        guess = noisy(truth, 0.3)
        alone = torch.cat([metric(truth[i : i + 1], guess[i : i + 1]) for i in range(4)])
        torch.testing.assert_close(metric(truth, guess), alone, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(metric(truth.flip(0), guess.flip(0)), alone.flip(0), rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_non_finite_guess_gives_nan_and_affects_no_other(self, file, bad):
        metric, truth = METRICS[file](), images(3)
        guess = noisy(truth, 0.3)
        broken = guess.clone()
        broken[1, 0, 2, 3] = bad
        values = metric(truth, broken)
        assert values.isnan().tolist() == [False, True, False]
        torch.testing.assert_close(values[[0, 2]], metric(truth, guess)[[0, 2]], rtol=1e-5, atol=1e-7)
        assert metric(truth, torch.full_like(truth, bad)).isnan().all()

    def test_an_empty_batch_gives_no_values(self, file):
        values = METRICS[file]()(torch.zeros(0, 3, 16, 16), torch.zeros(0, 3, 16, 16))
        assert (values.shape, values.dtype) == ((0,), torch.float64)

    def test_truth_and_guess_are_clamped(self, file):
        metric, truth = METRICS[file](), images(2)
        guess = noisy(truth, 1.0)
        assert torch.equal(metric(truth, guess), metric(truth, guess.clamp(0, 1)))
        assert torch.equal(metric(truth * 3 - 1, guess), metric((truth * 3 - 1).clamp(0, 1), guess))

    def test_it_edits_no_input_draws_no_random_numbers_and_is_deterministic(self, file):
        metric, truth = METRICS[file](), images(2)
        guess = noisy(truth, 0.5).requires_grad_()
        kept, before = copy.deepcopy((truth, guess.detach())), torch.get_rng_state()
        first, again = metric(truth, guess), metric(truth, guess)
        assert torch.equal(first, again)
        assert not first.requires_grad
        assert torch.equal(kept[0], truth)
        assert torch.equal(kept[1], guess)
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_any_floating_point_type_is_taken(self, file, dtype):
        metric, truth = METRICS[file](), images(2)
        values = metric(truth, noisy(truth, 0.3).to(dtype))
        assert values.dtype == torch.float64
        torch.testing.assert_close(values, metric(truth, noisy(truth, 0.3)), rtol=0.02, atol=1e-3)

    @pytest.mark.parametrize(
        ("one", "other"),
        [((2, 3, 8, 8), (2, 1, 8, 8)), ((2, 3, 8, 8), (3, 3, 8, 8)), ((3, 8, 8), (3, 8, 8)), ((2, 3, 8, 8), (2,)),
         ((2, 3, 0, 8), (2, 3, 0, 8)), ((0, 3, 8, 8), (1, 3, 8, 8))],
    )  # fmt: skip
    def test_shapes_that_do_not_fit_are_both_named(self, file, one, other):
        with pytest.raises(ConfigError, match=re.escape(f"got {one} and {other}")):
            METRICS[file]()(torch.zeros(one), torch.zeros(other))

    def test_bytes_and_a_broken_truth_are_refused(self, file):
        metric, truth = METRICS[file](), images(2)
        with pytest.raises(ConfigError, match=r"floating point in \[0, 1\], got torch.uint8 and torch.float32"):
            metric((truth * 255).byte(), truth)
        with pytest.raises(ConfigError, match="truth must be finite"):
            metric(torch.full_like(truth, math.nan), truth)

    def test_it_can_be_pickled(self, file):
        metric = METRICS[file]()
        assert pickle.loads(pickle.dumps(metric)) == metric


@dataclasses.dataclass(frozen=True)
class Mean(Metric):
    """A wrong metric: one value for the batch."""

    higher_is_leakier = False

    def measure(self, truth, guess):
        return (truth - guess).mean()


def test_a_metric_of_the_whole_batch_is_refused():
    with pytest.raises(ConfigError, match=r"'mean' must return one value per example, got shape \(\) for 2"):
        Mean()(images(2), images(2))


def test_missing_weights_raise_a_missing_data_error():
    assert issubclass(MetricUnavailable, MissingDataError)
