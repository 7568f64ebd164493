import gzip
import io
import os
import pickle
import struct
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from scipy.io import savemat

from gradveil.data.formats import read_cifar_binary, read_cifar_python, read_idx, read_idx_pair, read_svhn
from gradveil.data.own import every_fifth, read_folder, read_npz
from gradveil.data.pictures import list_pictures, read_pictures
from gradveil.errors import DataError, MissingDataError


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def naive_idx(content):
    """Read one byte at a time, as the format is specified."""
    count, height, width = struct.unpack(">III", content[4:16])
    image, position = [], 16
    for _ in range(count):
        rows = []
        for _ in range(height):
            rows.append([struct.unpack("B", content[position + i : position + i + 1])[0] for i in range(width)])
            position += width
        image.append(rows)
    return image


class TestIdx:
    @given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=3, max_dims=3, max_side=5)), st.booleans())
    def test_equals_the_naive_loop(self, tmp_path_factory, array, zipped):
        path = tmp_path_factory.mktemp("idx") / "images"
        content = idx_bytes(array)
        path.write_bytes(gzip.compress(content) if zipped else content)
        assert read_idx(path, 3).tolist() == naive_idx(content)

    def test_pair_has_a_channel_and_wide_labels(self, tmp_path, rng):
        images, labels = rng.integers(0, 256, (4, 5, 6), np.uint8), np.array([3, 1, 0, 9], np.uint8)
        (tmp_path / "i").write_bytes(idx_bytes(images))
        (tmp_path / "l").write_bytes(idx_bytes(labels))
        got_images, got_labels = read_idx_pair(tmp_path / "i", tmp_path / "l")
        assert np.array_equal(got_images[:, 0], images)
        assert got_images.flags.writeable
        assert got_labels.dtype == np.int64
        assert got_labels.tolist() == [3, 1, 0, 9]

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\0\0",
            idx_bytes(np.zeros(4, np.uint8)),
            idx_bytes(np.zeros((2, 3, 3), np.uint8))[:-1],
            idx_bytes(np.zeros((2, 3, 3), np.uint8)) + b"x",
            gzip.compress(idx_bytes(np.zeros((2, 3, 3), np.uint8)))[:-9],
            gzip.compress(b"hello")[:12] + b"\xff" * 20,
            b"\0\0\x08\x03" + b"\xff" * 12,
            b"<html>not found</html>",
        ],
        ids=[
            "empty",
            "short",
            "labels",
            "cut",
            "long",
            "cut-gzip",
            "broken-gzip",
            "huge",
            "html",
        ],  # gzip files contain a timestamp
    )
    def test_a_broken_file_is_named(self, tmp_path, content):
        path = tmp_path / "train-images"
        path.write_bytes(content)
        with pytest.raises(DataError, match="train-images must be"):
            read_idx(path, 3)

    def test_a_missing_file_and_a_folder(self, tmp_path):
        with pytest.raises(MissingDataError, match="nowhere"):
            read_idx(tmp_path / "nowhere", 3)
        with pytest.raises(DataError, match="must be a file that can be read"):
            read_idx(tmp_path, 3)

    def test_unequal_counts(self, tmp_path):
        (tmp_path / "i").write_bytes(idx_bytes(np.zeros((2, 3, 3), np.uint8)))
        (tmp_path / "l").write_bytes(idx_bytes(np.zeros(3, np.uint8)))
        with pytest.raises(DataError, match="3 labels for 2 images"):
            read_idx_pair(tmp_path / "i", tmp_path / "l")


class TestCifarBinary:
    @pytest.mark.parametrize(("num_classes", "num_labels"), [(10, 1), (100, 2)])
    def test_equals_the_naive_loop(self, tmp_path, rng, num_classes, num_labels):
        size = num_labels + 3072
        content = rng.integers(0, 10, 3 * size, np.uint8).tobytes()
        (tmp_path / "b.bin").write_bytes(content)
        images, labels = read_cifar_binary(tmp_path / "b.bin", num_classes)
        for record in range(3):
            start = record * size
            assert labels[record] == content[start + num_labels - 1]
            for channel, row, column in [(0, 0, 0), (1, 2, 3), (2, 31, 31)]:
                at = start + num_labels + channel * 1024 + row * 32 + column
                assert images[record, channel, row, column] == content[at]
        assert images.flags.writeable

    @pytest.mark.parametrize("content", [b"", b"\0" * 3072, b"\0" * (2 * 3073 - 1)])
    def test_wrong_length(self, tmp_path, content):
        (tmp_path / "b.bin").write_bytes(content)
        with pytest.raises(DataError, match=r"b\.bin must be CIFAR-10 records of 3,073 bytes"):
            read_cifar_binary(tmp_path / "b.bin", 10)

    def test_wrong_label(self, tmp_path):
        (tmp_path / "b.bin").write_bytes(b"\0" * 3073 + b"\x0a" + b"\0" * 3072)
        with pytest.raises(DataError, match="image 1 has label 10"):
            read_cifar_binary(tmp_path / "b.bin", 10)


def python2_batch(images, labels, key=b"labels"):
    """Write what Python 2's cPickle and an old numpy wrote: protocol 2, byte strings, numpy.core.multiarray."""

    def short(text):
        return b"U" + bytes([len(text)]) + text

    def number(value):
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + short(b"u1") + b"K\0K\x01\x87R" + b"(K\x03" + short(b"|") + b"NNN"
    dtype += number(-1) * 2 + b"K\0tb"
    raw = images.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + short(b"b") + b"\x87R"
    shape = number(images.shape[0]) + number(images.shape[1]) + b"\x86"
    array += b"(K\x01" + shape + dtype + b"\x89" + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(key) + listed + short(b"batch_label") + short(b"x") + b"u."


class Evil:
    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.system, (f"touch {self.witness}",)


class TestCifarPython:
    @pytest.mark.parametrize(("key", "num_classes"), [(b"labels", 10), (b"fine_labels", 100)])
    def test_python2_batch(self, tmp_path, rng, key, num_classes):
        images = rng.integers(0, 256, (3, 3072), np.uint8)
        (tmp_path / "b").write_bytes(python2_batch(images, [4, 0, 9], key))
        got, labels = read_cifar_python(tmp_path / "b", num_classes)
        assert np.array_equal(got, images.reshape(3, 3, 32, 32))
        assert got.flags.writeable
        assert labels.tolist() == [4, 0, 9]
        assert labels.dtype == np.int64

    def test_the_hand_written_pickle_is_what_numpy_reads(self, rng):
        images = rng.integers(0, 256, (3, 3072), np.uint8)
        content = python2_batch(images, [1, 2, 3])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some versions of numpy warn about old pickles
            theirs = pickle.loads(content, encoding="bytes")
        assert np.array_equal(theirs[b"data"], images)

    @pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
    @pytest.mark.parametrize("column_major", [False, True])
    def test_batches_saved_again_by_python3(self, tmp_path, rng, protocol, column_major):
        images = rng.integers(0, 256, (3, 3072), np.uint8)
        batch = {"data": np.asfortranarray(images) if column_major else images, "labels": np.array([4, 0, 9], ">i4")}
        (tmp_path / "b").write_bytes(pickle.dumps(batch, protocol=protocol))
        got, labels = read_cifar_python(tmp_path / "b", 10)
        assert np.array_equal(got, images.reshape(3, 3, 32, 32))
        assert labels.tolist() == [4, 0, 9]

    @pytest.mark.parametrize("protocol", [0, 2, 4])
    def test_an_evil_pickle_is_refused_and_not_run(self, tmp_path, protocol):
        witness = tmp_path / "witness"
        (tmp_path / "b").write_bytes(pickle.dumps({b"data": Evil(witness)}, protocol=protocol))
        with pytest.raises(DataError, match=r"b must be .* asks Python to load \w+\.system"):
            read_cifar_python(tmp_path / "b", 10)
        assert not witness.exists()

    @pytest.mark.parametrize(
        "name", [b"builtins\neval", b"numpy\nload", b"numpy.core.multiarray\nfromstring", b"os\nx"]
    )
    def test_any_other_global_is_refused(self, tmp_path, name):
        (tmp_path / "b").write_bytes(b"\x80\x02c" + name + b"\n.")
        with pytest.raises(DataError, match="asks Python to load"):
            read_cifar_python(tmp_path / "b", 10)

    @pytest.mark.parametrize(
        "batch",
        [
            [1, 2],
            {"labels": [0]},
            {"data": np.zeros((1, 3072), np.uint8)},
            {"data": np.array([[None] * 3072]), "labels": [0]},
            {"data": np.zeros((1, 3072), np.float32), "labels": [0]},
            {"data": np.zeros((1, 3072), np.int16), "labels": [0]},
            {"data": np.zeros((1, 3071), np.uint8), "labels": [0]},
            {"data": np.zeros((), np.uint8), "labels": [0]},
            {"data": np.zeros((1, 3072), np.uint8), "labels": [0, 1]},
            {"data": np.zeros((1, 3072), np.uint8), "labels": ["cat"]},
            {"data": np.zeros((1, 3072), np.uint8), "labels": [10]},
            {"data": np.zeros((1, 3072), np.uint8), "labels": [-1]},
            {"data": np.zeros((1, 3072), np.uint8), "labels": [10**30]},
            {"data": "text", "labels": [0]},
        ],
    )
    def test_other_content(self, tmp_path, batch):
        (tmp_path / "batch_7").write_bytes(pickle.dumps(batch, protocol=2))
        with pytest.raises(DataError, match="batch_7 must be"):
            read_cifar_python(tmp_path / "batch_7", 10)

    @given(st.data())
    def test_damage_is_a_data_error_or_harmless(self, tmp_path_factory, data):
        content = bytearray(python2_batch(np.zeros((1, 3072), np.uint8), [1]))
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, 150))] = data.draw(st.integers(0, 255))
        path = tmp_path_factory.mktemp("cifar") / "b"
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        try:
            images, _ = read_cifar_python(path, 10)
        except DataError:
            return
        assert images.shape[1:] == (3, 32, 32)


class TestSvhn:
    def test_axes_and_zero(self, tmp_path, rng):
        x = rng.integers(0, 256, (32, 32, 3, 4), np.uint8)
        savemat(tmp_path / "s.mat", {"X": x, "y": np.array([[1], [10], [9], [2]], np.uint8)}, do_compression=True)
        images, labels = read_svhn(tmp_path / "s.mat")
        assert labels.tolist() == [1, 0, 9, 2]
        for image in range(4):
            for channel in range(3):
                assert np.array_equal(images[image, channel], x[:, :, channel, image])

    @pytest.mark.parametrize(
        "content",
        [
            {"X": np.zeros((32, 32, 3, 2), np.uint8)},
            {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [1, 2, 3]},
            {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [1, 11]},
            {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [1, np.nan]},
            {"X": np.zeros((2, 32, 32, 3), np.uint8), "y": [1, 2]},
            {"X": np.zeros((32, 32, 3, 2)), "y": [1, 2]},
        ],
    )
    def test_other_content(self, tmp_path, content):
        savemat(tmp_path / "s.mat", content)
        with pytest.raises(DataError, match=r"s\.mat must be SVHN"):
            read_svhn(tmp_path / "s.mat")

    def test_truncated_or_no_mat_file(self, tmp_path, rng):
        x = rng.integers(0, 256, (32, 32, 3, 4), np.uint8)
        savemat(tmp_path / "s.mat", {"X": x, "y": [1, 2, 3, 4]}, do_compression=True)
        whole = (tmp_path / "s.mat").read_bytes()
        for content in (whole[:5000], whole[:140], b"", b"hello" * 50):
            (tmp_path / "s.mat").write_bytes(content)
            with pytest.raises(DataError, match=r"s\.mat must be"):
                read_svhn(tmp_path / "s.mat")
        with pytest.raises(MissingDataError):
            read_svhn(tmp_path / "none.mat")


def arrays(**changes):
    base = {
        "x_train": np.full((4, 8, 6, 3), 7, np.uint8),
        "y_train": np.array([0, 1, 2, 1]),
        "x_test": np.full((2, 8, 6, 3), 9, np.uint8),
        "y_test": np.array([0, 4]),
    }
    return base | changes


class TestNpz:
    @pytest.mark.parametrize(
        ("shape", "expected"),
        [
            ((8, 6), (1, 8, 6)),
            ((8, 6, 1), (1, 8, 6)),
            ((8, 6, 3), (3, 8, 6)),
            ((3, 8, 6), (3, 8, 6)),
            ((1, 8, 6), (1, 8, 6)),
            ((3, 8, 3), (3, 3, 8)),
        ],
    )
    def test_the_channel_axis(self, tmp_path, rng, shape, expected):
        x = rng.integers(0, 256, (4, *shape), np.uint8)
        np.savez(tmp_path / "o.npz", **arrays(x_train=x, x_test=x[:2]))
        own = read_npz(tmp_path / "o.npz")
        assert own.x_train.shape == (4, *expected)
        assert own.x_train.flags.c_contiguous
        last = len(shape) == 3 and shape[-1] in (1, 3)
        assert np.array_equal(own.x_train.transpose(0, 2, 3, 1).ravel() if last else own.x_train.ravel(), x.ravel())
        assert own.num_classes == 5

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_floats_become_float32(self, tmp_path, dtype):
        x = np.linspace(0, 1, 16, dtype=dtype).reshape(4, 2, 2)
        np.savez(
            tmp_path / "o.npz", **arrays(x_train=x, x_test=x[:2], y_train=np.array([[0], [1], [2], [3]], np.uint64))
        )
        own = read_npz(tmp_path / "o.npz")
        assert own.x_train.dtype == np.float32
        assert np.array_equal(own.x_train[:, 0], x.astype(np.float32))
        assert own.y_train.tolist() == [0, 1, 2, 3]
        assert own.y_train.dtype == np.int64

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"x_train": np.full((4, 8, 6), 1.5)}, r"x_train must be in \[0, 1\].*got 1.5 to 1.5"),
            ({"x_test": np.full((2, 8, 6), -0.1)}, r"x_test must be in \[0, 1\]"),
            ({"x_train": np.full((4, 8, 6), np.nan)}, r"x_train must be in \[0, 1\].*nan"),
            ({"x_train": np.full((4, 8, 6), np.inf)}, r"x_train must be in \[0, 1\].*inf"),
            ({"x_train": np.zeros((4, 8, 6), np.int64)}, "x_train must be of type uint8"),
            ({"x_train": np.zeros((4, 8, 6, 2), np.uint8)}, "images of one shape"),
            ({"x_train": np.zeros((4, 8), np.uint8)}, "x_train must have the shape"),
            ({"x_train": np.zeros((0, 8, 6), np.uint8), "y_train": np.zeros(0, int)}, "x_train must hold at least one"),
            ({"y_train": np.array([0.0, 1, 2, 1])}, "y_train must be integers"),
            ({"y_train": np.array(list("abcd"))}, "y_train must be integers"),
            ({"y_test": np.array([0, -2])}, "y_test must be class indices.*got -2"),
            ({"y_test": np.array([0, 10**12])}, "y_test must be class indices.*got 10000"),
            ({"y_test": np.eye(2, dtype=int)}, r"y_test must have the shape \(N,\)"),
            ({"y_test": np.array(3)}, r"y_test must have the shape \(N,\)"),
            ({"y_train": np.array([0, 1])}, "x_train has 4 images and y_train has 2 labels"),
            ({"x_test": np.zeros((2, 9, 6, 3), np.uint8)}, "one shape"),
            ({"x_test": np.zeros((2, 8, 6, 3))}, "one shape"),
            ({"x_train": np.array([None] * 4)}, "must be an .npz file of plain arrays"),
        ],
    )
    def test_bad_arrays_are_named(self, tmp_path, changes, message):
        np.savez(tmp_path / "o.npz", **arrays(**changes))
        with pytest.raises(DataError, match=message) as caught:
            read_npz(tmp_path / "o.npz")
        assert "o.npz" in str(caught.value)

    def test_bad_files(self, tmp_path):
        np.savez(tmp_path / "o.npz", x_train=np.zeros(2))
        with pytest.raises(DataError, match="y_train, x_test, y_test is missing, it has x_train"):
            read_npz(tmp_path / "o.npz")
        np.savez_compressed(tmp_path / "o.npz", **arrays())
        whole = (tmp_path / "o.npz").read_bytes()
        buffer = io.BytesIO()
        np.save(buffer, np.zeros(3))
        evil = pickle.dumps(Evil(tmp_path / "witness"))
        for content in (whole[:300], b"", buffer.getvalue(), evil, whole[:80] + b"\xff" * 20 + whole[100:]):
            (tmp_path / "o.npz").write_bytes(content)
            with pytest.raises(DataError, match=r"o\.npz must be an \.npz file"):
                read_npz(tmp_path / "o.npz")
        assert not (tmp_path / "witness").exists()
        with pytest.raises(MissingDataError):
            read_npz(tmp_path / "none.npz")


def save(path, colour=(10, 20, 30), size=(8, 6), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


class TestFolder:
    def test_every_fifth_of_each_class_is_test(self, tmp_path):
        for index in range(11):
            save(tmp_path / "cats" / f"{index:02}.png", (index, 0, 0))
        for index in range(5):
            save(tmp_path / "ants" / f"{index}.png", (100 + index, 0, 0))
        (tmp_path / "cats" / "Thumbs.db").write_bytes(b"x")
        (tmp_path / ".hidden").mkdir()
        own = read_folder(tmp_path)
        assert own.x_test[:, 0, 0, 0].tolist() == [104, 4, 9]
        assert own.y_test.tolist() == [0, 1, 1]
        assert own.x_train[:, 0, 0, 0].tolist() == [100, 101, 102, 103, 0, 1, 2, 3, 5, 6, 7, 8, 10]
        assert own.x_train.shape[1:] == (3, 6, 8)
        assert own.num_classes == 2

    def test_train_and_test_folders(self, tmp_path):
        for part, value in (("train", 1), ("test", 2)):
            save(tmp_path / part / "a" / "x.png", (value, 0, 0))
        save(tmp_path / "train" / "b" / "x.bmp", (3, 0, 0))
        own = read_folder(tmp_path)
        assert own.x_train[:, 0, 0, 0].tolist() == [1, 3]
        assert own.x_test[:, 0, 0, 0].tolist() == [2]
        assert own.num_classes == 2
        save(tmp_path / "test" / "c" / "x.png")
        with pytest.raises(DataError, match="has 'c' besides"):
            read_folder(tmp_path)

    @pytest.mark.parametrize("ending", ["png", "jpg", "jpeg", "bmp", "webp", "gif", "PNG"])
    def test_kinds_of_pictures(self, tmp_path, ending):
        save(tmp_path / f"p.{ending}", (200, 100, 0))
        images = read_pictures(list_pictures(tmp_path))
        assert images.shape == (1, 3, 6, 8)
        assert abs(images[0, :, 3, 3].astype(int) - [200, 100, 0]).max() < 12

    def test_grey_stays_grey_until_one_has_colour(self, tmp_path):
        save(tmp_path / "a.png", 50, mode="L")
        save(tmp_path / "b.gif", 70, mode="L")
        assert read_pictures(list_pictures(tmp_path))[:, :, 0, 0].tolist() == [[50], [70]]
        save(tmp_path / "c.png", (1, 2, 3, 128), mode="RGBA")
        assert read_pictures(list_pictures(tmp_path))[:, :, 0, 0].tolist() == [[50] * 3, [70] * 3, [1, 2, 3]]

    def test_mixed_sizes_name_two_images_and_the_option_to_use(self, tmp_path):
        for index in range(5):
            save(tmp_path / "a" / f"{index}.png")
        save(tmp_path / "b" / "big.png", (9, 9, 9), size=(20, 10))
        with pytest.raises(DataError, match=r"0\.png has 8x6 and .*big\.png has 20x10.*size="):
            read_folder(tmp_path)
        own = read_folder(tmp_path, size=4)
        assert own.x_train.shape == (5, 3, 4, 4)
        assert own.x_train[4].max() == 9

    def test_resizing_averages(self, tmp_path):
        pixels = np.zeros((8, 8), np.uint8)
        pixels[:, 4:] = 200
        Image.fromarray(pixels).save(tmp_path / "p.png")
        small = read_pictures([tmp_path / "p.png"], size=1)
        assert small.tolist() == [[[[100]]]]

    def test_bad_pictures_and_folders(self, tmp_path):
        for index in range(5):
            save(tmp_path / "a" / f"{index}.png")
        noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / "a" / "3.png")
        whole = (tmp_path / "a" / "3.png").read_bytes()
        for content in (b"", b"text", whole[:100]):
            (tmp_path / "a" / "3.png").write_bytes(content)
            with pytest.raises(DataError, match=r"3\.png must be a picture that can be read"):
                read_folder(tmp_path)
        Image.fromarray(np.full((6, 8), 40_000, np.uint16)).save(tmp_path / "a" / "3.png")
        with pytest.raises(DataError, match=r"3\.png must have 8 bits per channel"):
            read_folder(tmp_path)
        (tmp_path / "a" / "3.png").unlink()
        with pytest.raises(DataError, match=r"at least 5 pictures in some class.*got 4"):
            read_folder(tmp_path)
        (tmp_path / "b").mkdir()
        with pytest.raises(DataError, match="b must hold pictures"):
            read_folder(tmp_path)
        with pytest.raises(DataError, match="must hold class subfolders"):
            read_folder(tmp_path / "b")
        with pytest.raises(MissingDataError, match="no such folder"):
            read_folder(tmp_path / "z")

    def test_half_a_split(self, tmp_path):
        save(tmp_path / "train" / "a" / "x.png")
        with pytest.raises(DataError, match="has no test/"):
            read_folder(tmp_path)

    def test_a_class_may_be_called_train(self, tmp_path):
        for index in range(5):
            save(tmp_path / "train" / f"{index}.png")
        assert len(read_folder(tmp_path).x_train) == 4

    def test_bomb_is_refused(self, tmp_path, monkeypatch):
        save(tmp_path / "p.png", size=(40, 40))
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        with pytest.raises(DataError, match="Bomb"):
            read_pictures([tmp_path / "p.png"])


@given(st.lists(st.integers(0, 3), max_size=60))
def test_every_fifth_against_counting(labels):
    seen, expected = {}, []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        expected.append(seen[label] % 5 == 0)
    assert every_fifth(np.array(labels, int)).tolist() == expected
