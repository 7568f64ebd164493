import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.data import Partition, mark_sensitive
from gradveil.data.partition import ByClass, Dirichlet, Iid, LabelParts
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.registry import build, components

seeds = st.integers(0, 2**32)


def labels_of(counts):
    return np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))


def deal(partition, labels, num_clients, seed=0, num_classes=10):
    parts = partition.split(labels, num_clients, num_classes, np.random.default_rng(seed))
    together = np.concatenate(parts)
    assert len(parts) == num_clients
    assert len(np.unique(together)) == len(together), "an image has two owners"
    assert all(np.array_equal(part, np.sort(part)) for part in parts)
    assert len(together) == 0 or (together.min() >= 0 and together.max() < len(labels))
    return parts


@pytest.mark.parametrize("partition", [Iid(), ByClass(per_class=3), LabelParts(), Dirichlet()])
def test_equal_seeds_give_equal_parts_and_other_seeds_differ(partition):
    labels = labels_of([50] * 10)
    first, again, other = (deal(partition, labels, 7, seed) for seed in (1, 1, 2))
    assert all(map(np.array_equal, first, again))
    assert not all(len(a) == len(b) and np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("partition", [Iid(), ByClass(classes=1, per_class=1), LabelParts(), Dirichlet()])
def test_more_clients_than_images_is_refused_with_both_numbers(partition):
    with pytest.raises(ConfigError, match=r"12 clients .* has 10;"):
        partition.split(np.arange(10), 12, 10, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="num_clients must be at least 1, got 0"):
        partition.split(np.arange(10), 0, 10, np.random.default_rng(0))


class TestIid:
    @given(st.integers(1, 40), st.integers(0, 100), seeds)
    def test_all_images_sizes_within_one(self, num_clients, extra, seed):
        parts = deal(Iid(), np.zeros(num_clients + extra, int), num_clients, seed)
        sizes = [len(part) for part in parts]
        assert sum(sizes) == num_clients + extra
        assert max(sizes) - min(sizes) <= 1

    def test_classes_are_mixed(self):
        labels = np.repeat(np.arange(10), 1000)
        for part in deal(Iid(), labels, 10):
            assert np.bincount(labels[part], minlength=10).min() > 60  # 100 expected, standard deviation 9

    def test_fixed_size(self):
        assert [len(part) for part in deal(Iid(images=6), np.zeros(100, int), 16)] == [6] * 16
        with pytest.raises(ConfigError, match="16 clients x 7 images = 112 needed, the set has 100; lower images to 6"):
            Iid(images=7).split(np.zeros(100, int), 16, 1, np.random.default_rng(0))
        with pytest.raises(ConfigError, match="images must be at least 1"):
            Iid(images=0)


class TestByClass:
    @given(st.integers(1, 30), st.integers(1, 5), seeds)
    def test_exact_classes_and_counts_dealt_evenly(self, num_clients, classes, seed):
        labels = labels_of([200] * 5)
        parts = deal(ByClass(classes=classes, per_class=3), labels, num_clients, seed, num_classes=5)
        takers = np.zeros(5, int)
        for part in parts:
            held, counts = np.unique(labels[part], return_counts=True)
            assert len(held) == classes
            assert set(counts) == {3}
            takers[held] += 1
        assert takers.max() - takers.min() <= 1

    def test_soteria(self):
        labels = labels_of([5000] * 10)
        parts = deal(ByClass(), labels, 100)
        assert {len(part) for part in parts} == {200}
        assert {len(np.unique(labels[part])) for part in parts} == {2}

    def test_pairs_of_classes_vary(self):
        labels = labels_of([500] * 10)
        pairs = {tuple(np.unique(labels[part])) for part in deal(ByClass(per_class=5), labels, 100)}
        assert len(pairs) > 20

    def test_share_all(self):
        labels = labels_of([50, 51, 52, 53, 54])
        parts = deal(ByClass(classes=2, per_class=None), labels, 10, num_classes=5)
        assert sum(map(len, parts)) == len(labels)
        for part in parts:
            _, counts = np.unique(labels[part], return_counts=True)
            assert all(12 <= count <= 14 for count in counts)

    def test_absent_classes_take_no_part(self):
        labels = np.repeat([1, 7], 20)
        assert all(set(labels[part]) == {1, 7} for part in deal(ByClass(per_class=5), labels, 4))
        with pytest.raises(ConfigError, match="at most 2, since the set has 10 classes, 2 of them with images, got 3"):
            ByClass(classes=3).split(labels, 4, 10, np.random.default_rng(0))

    def test_a_class_too_small(self):
        labels = labels_of([3000] * 5 + [1937] + [3000] * 4)
        with pytest.raises(
            ConfigError,
            match=r"class 5 has 1,937 images, 20 clients x 100 = 2,000 needed; lower per_class to 96 or less",
        ):
            ByClass().split(labels, 100, 10, np.random.default_rng(0))
        deal(ByClass(per_class=96), labels, 100)
        with pytest.raises(ConfigError, match="take fewer clients"):
            ByClass(per_class=None).split(labels_of([1, 100]), 10, 2, np.random.default_rng(0))

    @pytest.mark.parametrize("settings", [{"classes": 0}, {"per_class": 0}, {"per_class": -1}])
    def test_bad_settings(self, settings):
        with pytest.raises(ConfigError, match="must be at least 1"):
            ByClass(**settings)
        with pytest.raises(ConfigError, match="at most 10, since the set has 10 classes, got 11"):
            ByClass(classes=11).split(labels_of([9] * 10), 2, 10, np.random.default_rng(0))


class TestLabelParts:
    @given(st.integers(1, 10), seeds)
    def test_groups_are_disjoint_in_labels_and_complete(self, num_clients, seed):
        labels = labels_of([7] * 10)
        parts = deal(LabelParts(), labels, num_clients, seed)
        groups = [set(labels[part]) for part in parts]
        assert sum(map(len, groups)) == 10
        assert set().union(*groups) == set(range(10))
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        assert sum(map(len, parts)) == 70

    @given(st.integers(11, 70), seeds)
    def test_more_clients_than_classes(self, num_clients, seed):
        labels = labels_of([7] * 10)
        parts = deal(LabelParts(), labels, num_clients, seed)
        assert all(len(set(labels[part])) == 1 for part in parts)
        takers = np.bincount([labels[part[0]] for part in parts], minlength=10)
        assert takers.max() - takers.min() <= 1
        assert sum(map(len, parts)) == 70

    def test_a_class_too_small(self):
        with pytest.raises(ConfigError, match="class 0 has 2 images, too few for the 5 clients"):
            LabelParts().split(labels_of([2, 50]), 10, 2, np.random.default_rng(0))


class TestDirichlet:
    @given(st.integers(1, 20), st.floats(0.05, 50), seeds)
    def test_every_image_dealt_and_nobody_empty(self, num_clients, alpha, seed):
        labels = labels_of([60] * 10)
        parts = deal(Dirichlet(alpha=alpha), labels, num_clients, seed)
        assert sum(map(len, parts)) == 600
        assert min(map(len, parts)) >= 1

    def test_alpha_sets_the_variance(self):
        """Var(p) = (1/K)(1 - 1/K) / (K alpha + 1) for a symmetric Dirichlet of K parts."""
        labels = labels_of([5000] * 10)
        for alpha in (0.3, 5.0):
            shares = [
                np.bincount(labels[part], minlength=10) / 5000
                for seed in range(40)
                for part in deal(Dirichlet(alpha=alpha), labels, 4, seed)
            ]
            assert np.var(shares) == pytest.approx(0.25 * 0.75 / (4 * alpha + 1), rel=0.15)

    def test_min_images(self):
        labels = labels_of([100] * 10)
        assert min(map(len, deal(Dirichlet(alpha=0.3, min_images=30), labels, 10))) >= 30
        with pytest.raises(
            ConfigError, match=r"could not give each of 30 clients at least 30 of 1,000 images with alpha=0.1"
        ):
            Dirichlet(alpha=0.1, min_images=30).split(labels, 30, 10, np.random.default_rng(0))
        with pytest.raises(ConfigError, match="11 clients need 100 images each"):
            Dirichlet(min_images=100).split(labels, 11, 10, np.random.default_rng(0))

    @pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf")])
    def test_bad_alpha(self, alpha):
        with pytest.raises(ConfigError, match="alpha must be more than 0"):
            Dirichlet(alpha=alpha)

    def test_an_alpha_too_large_for_floats_is_refused(self):
        with pytest.raises(ConfigError, match="alpha must be a moderate number"):
            Dirichlet(alpha=1e308).split(labels_of([20] * 3), 3, 3, np.random.default_rng(0))


def test_ten_thousand_clients_are_fast():
    labels = labels_of([6000] * 10)
    start = time.perf_counter()
    for partition in (Iid(images=6), ByClass(per_class=1), LabelParts(), Dirichlet(alpha=100.0)):
        deal(partition, labels, 10_000 if not isinstance(partition, Dirichlet) else 2_000)
    assert time.perf_counter() - start < 10


def test_names_and_settings():
    assert set(components("partitions")) == {"iid", "by-class", "label-parts", "dirichlet"}
    assert build(Partition, "by-class:classes=3,per_class=none") == ByClass(3, None)
    assert build(Partition, "dirichlet:alpha=0.1").spec == "dirichlet:alpha=0.1"
    with pytest.raises(UnknownNameError, match="Did you mean 'dirichlet'"):
        build(Partition, "dirichlett")


class TestSensitive:
    parts = (np.arange(4), np.arange(10), np.arange(0))

    def marks(self, spec, seed=0):
        return mark_sensitive(spec, self.parts, np.random.default_rng(seed))

    def where(self, spec, parts=None):
        masks = mark_sensitive(spec, parts or self.parts, np.random.default_rng(0))
        assert all(mask.dtype == bool for mask in masks)
        return [np.flatnonzero(mask).tolist() for mask in masks]

    def test_none(self):
        assert self.where(None) == self.where("none") == [[], [], []]
        assert [len(mask) for mask in self.marks(None)] == [4, 10, 0]

    @pytest.mark.parametrize(
        ("spec", "counts"),
        [("0.25", [1, 3, 0]), ("1.0", [4, 10, 0]), ("0.0", [0, 0, 0]), ("1e-1", [0, 1, 0]), (".5", [2, 5, 0])],
    )
    def test_fraction(self, spec, counts):
        assert [mask.sum() for mask in self.marks(spec)] == counts

    def test_fraction_is_drawn(self):
        chosen = np.sum([self.marks("0.5", seed)[1] for seed in range(200)], axis=0)
        assert chosen.min() > 60
        assert chosen.max() < 140
        assert np.array_equal(self.marks("0.5", 3)[1], self.marks("0.5", 3)[1])

    def test_positions(self):
        assert self.where("0/2/3", self.parts[:2]) == [[0, 2, 3], [0, 2, 3]]
        assert self.where("3", self.parts[:2]) == [[3], [3]]
        assert self.where("1:0/5/7") == [[], [0, 5, 7], []]
        assert self.where("1:0/5; 0:1;1:9") == [[1], [0, 5, 9], []]

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("", "must be a fraction"),
            ("all", "must be a fraction"),
            ("0/x", "must be a fraction"),
            ("1:", "must be a fraction"),
            (":1", "must be a fraction"),
            ("1:0/5;", "must be a fraction"),
            ("1:0.5", "must be a fraction"),
            ("-1/2", "must be a fraction"),
            ("0", "could be a fraction or a position"),
            ("1", "could be a fraction or a position"),
            ("1.5", r"in \[0, 1\], got 1.5"),
            ("-0.1", r"in \[0, 1\]"),
            ("nan", r"in \[0, 1\], got nan"),
            ("inf", r"in \[0, 1\], got inf"),
            ("0/4", "got 4, but client 0 has 4 images"),
            ("1:10", "got 10, but client 1 has 10 images"),
            ("2:0", "got 0, but client 2 has 0 images"),
            ("3:0", r"clients 0\.\.2, got client 3"),
        ],
    )
    def test_bad_text(self, spec, message):
        with pytest.raises(ConfigError, match=message):
            self.marks(spec)
