"""Readers of files from elsewhere: no small file can fill the memory, end the process, or raise a foreign error."""

import gzip
import io
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from scipy.io import loadmat, savemat

from gradveil.config import read_settings
from gradveil.data import load_dataset
from gradveil.data.formats import read_cifar_python, read_idx, read_svhn
from gradveil.data.matlab import read_matlab
from gradveil.data.own import read_npz
from gradveil.data.pictures import read_pictures
from gradveil.errors import ConfigError, DataError
from gradveil.limits import LONGEST_SETTINGS, LONGEST_TEXT, MOST_VALUES, parse_json, parse_toml, read_lines
from gradveil.runs.inputs import read_tensors
from gradveil.runs.update_spec import read_spec
from gradveil.storage import load_tensors, read_metadata

MOST = 400 << 20
"""Bytes that a reader may take for a file of a few bytes."""


@pytest.fixture
def peak():
    """Return a function that calls another and returns what it raised, after checking the memory that it took."""

    def call(function, *arguments):
        tracemalloc.start()
        try:
            with pytest.raises((DataError, ConfigError)) as caught:
                function(*arguments)
            assert tracemalloc.get_traced_memory()[1] < MOST
        finally:
            tracemalloc.stop()
        return str(caught.value)

    return call


BIG = (1 << 31) - 1
PICKLES = {
    "nine bytes that keep a value at a high place": b"\x80\x02Nr" + struct.pack("<I", BIG) + b".",
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 33) + b".",
    "long byte array": b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b".",
    "long text": b"\x80\x02X" + struct.pack("<I", BIG) + b".",
    "long frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 33) + b".",
    "one text encoded a thousand times": b"\x80\x02X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"q\x00"
    + b"(c_codecs\nencode\nh\x00\x85R" * 1000 + b".",
    "nested tuples as a key": b"\x80\x02}" + b"(" * 100_000 + b"t" * 100_000 + b"Ns.",
    "doubled tuples as a key": b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"Ns.",
    "a number of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "a list in a list in a list": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
}  # fmt: skip


@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES)
def test_a_small_pickle_takes_little_memory(tmp_path, peak, content):
    (tmp_path / "b").write_bytes(content)
    assert "must be a pickled dictionary" in peak(read_cifar_python, tmp_path / "b", 10) or b"\x96" in content


def test_arrays_that_share_their_bytes_are_refused(tmp_path, peak):
    """Pickle writes the shared bytes once; reading them once for each array would take a thousand times the file."""
    raw = np.zeros((100, 3072), np.uint8)
    content = pickle.dumps({f"data{n}": raw.view() for n in range(50)}, protocol=2)
    once = pickle.dumps(raw.tobytes().decode("latin1"), protocol=2)
    assert len(content) > len(once)
    small = io.BytesIO()
    pickler = pickle.Pickler(small, protocol=2)
    state = raw.__reduce__()
    shared = [_Shared(state) for _ in range(50)]
    pickler.dump({f"data{n}": one for n, one in enumerate(shared)})
    (tmp_path / "b").write_bytes(small.getvalue())
    assert "share bytes" in peak(read_cifar_python, tmp_path / "b", 10)


class _Shared:
    """An array that pickles as the very bytes of another."""

    def __init__(self, reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def test_a_gzipped_idx_file_is_judged_by_its_header(tmp_path, peak):
    header = struct.pack(">4B3I", 0, 0, 8, 3, 1000, 1000, 1000)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(header + bytes(1000)))
    assert "must unpack to at most" in peak(read_idx, tmp_path / "bomb.gz", 3)
    long = gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 2, 3, 3) + bytes(600 << 20), 1)
    (tmp_path / "long.gz").write_bytes(long)
    assert "promises 18 bytes, it holds 19" in peak(read_idx, tmp_path / "long.gz", 3)


def npz(path, arrays, **how):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **how) as archive:
        for name, (header, body) in arrays.items():
            text = repr(header).encode()
            text += b" " * (-(len(text) + 11) % 64) + b"\n"
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
                for _ in range(body >> 20):
                    file.write(bytes(1 << 20))
                file.write(bytes(body & ((1 << 20) - 1)))


def header(*shape, kind="|u1"):
    return {"descr": kind, "fortran_order": False, "shape": shape}


@pytest.mark.parametrize("read", [read_npz, read_tensors])
def test_a_packed_npz_is_judged_by_its_headers(tmp_path, peak, read):
    names = ("x_train", "y_train", "x_test", "y_test")
    size = 700 << 20
    npz(tmp_path / "bomb.npz", {name: (header(size), size) for name in names}, compresslevel=1)
    assert "must unpack to at most" in peak(read, tmp_path / "bomb.npz")
    npz(tmp_path / "lie.npz", dict.fromkeys(names, (header(1 << 40), 100)))
    assert "holds 100 bytes" in peak(read, tmp_path / "lie.npz")
    npz(tmp_path / "negative.npz", dict.fromkeys(names, (header(-1, -100), 100)))
    assert "whole numbers" in peak(read, tmp_path / "negative.npz")
    npz(tmp_path / "more.npz", dict.fromkeys(names, (header(10), 600 << 20)), compresslevel=1)
    assert "holds" in peak(read, tmp_path / "more.npz")


def test_small_numbers_that_become_large_ones_are_counted_as_large(tmp_path, peak):
    """An update's bytes become numbers of eight bytes each."""
    npz(tmp_path / "u.npz", {"w": (header(60 << 20, kind="|i1"), 60 << 20)})
    assert "must unpack to at most" in peak(read_tensors, tmp_path / "u.npz")


def test_a_packed_cache_is_judged_by_its_headers(tmp_path):
    size = 5_000 * 28 * 28 * 150
    arrays = {"images": (header(5_000, 1, 28, 28 * 150), size), "labels": (header(5_000, kind="<i8"), 40_000)}
    npz(tmp_path / "mnist-5k.npz", arrays, compresslevel=1)
    tracemalloc.start()
    data = load_dataset("mnist-5k", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST
    assert data.train.images.shape == (4_000, 1, 28, 28)


def test_an_honest_large_file_is_read(tmp_path):
    images = np.zeros((6, 2000, 2000), np.uint8)
    np.savez_compressed(tmp_path / "o.npz", x_train=images, y_train=range(6), x_test=images, y_test=range(6))
    assert read_npz(tmp_path / "o.npz").x_train.shape == (6, 1, 2000, 2000)


def test_a_picture_is_judged_by_its_header(tmp_path, peak):
    Image.new("L", (20_000, 4_000)).save(tmp_path / "p.png")
    assert "it states 20000 x 4000 pixels" in peak(read_pictures, [tmp_path / "p.png"])


def test_many_empty_pictures_are_refused_together(tmp_path, peak, monkeypatch):
    monkeypatch.setattr("gradveil.limits.SMALL", 10_000_000)
    paths = [tmp_path / f"{n}.png" for n in range(20)]
    for path in paths:
        Image.new("L", (2_000, 2_000)).save(path)
    assert "must unpack to at most" in peak(read_pictures, paths)


def test_other_formats_are_never_tried(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "p.ppm")
    (tmp_path / "p.ppm").rename(tmp_path / "p.png")
    with pytest.raises(DataError, match="must be a picture that can be read"):
        read_pictures([tmp_path / "p.png"])


class TestMatlab:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("kind", ["u1", "i2", "i4", "u2", "f4", "f8", "i8", "u8"])
    def test_arrays_are_those_that_scipy_reads(self, tmp_path, packed, kind):
        rng = np.random.default_rng(0)
        content = {
            "X": rng.integers(0, 100, (3, 4, 2, 5)).astype(kind),
            "y": np.arange(6).astype(kind),
            "long_name": [1],
        }
        savemat(tmp_path / "s.mat", content, do_compression=packed)
        theirs, ours = loadmat(tmp_path / "s.mat"), read_matlab(tmp_path / "s.mat", ["X", "y"])
        assert ours.keys() == {"X", "y"}
        for name, array in ours.items():
            assert array.dtype == theirs[name].dtype
            assert np.array_equal(array, theirs[name])

    def test_a_packed_array_is_judged_by_its_tag(self, tmp_path, peak):
        savemat(tmp_path / "s.mat", {"y": [1]})
        head = (tmp_path / "s.mat").read_bytes()[:128]
        packed = zlib.compress(struct.pack("<2I", 14, 3 << 30) + bytes(4000))
        (tmp_path / "s.mat").write_bytes(head + struct.pack("<2I", 15, len(packed)) + packed)
        assert "must unpack to at most" in peak(read_svhn, tmp_path / "s.mat")

    @pytest.mark.parametrize("times", [1, 12])
    def test_small_numbers_that_become_large_ones_are_counted_as_large(self, tmp_path, peak, times):
        """Bytes of class double become numbers of eight bytes each."""
        count = (120 << 20) // times
        body = b"".join(
            struct.pack("<2I", kind, len(data)) + data + bytes(-len(data) % 8)
            for kind, data in ((6, struct.pack("<2I", 6, 0)), (5, struct.pack("<2i", count, 1)), (1, b"X"))
        )
        body += struct.pack("<2I", 2, count) + bytes(count)
        packed = zlib.compress(struct.pack("<2I", 14, len(body)) + body, 1)
        savemat(tmp_path / "s.mat", {"y": [1]})
        head = (tmp_path / "s.mat").read_bytes()[:128]
        (tmp_path / "s.mat").write_bytes(head + (struct.pack("<2I", 15, len(packed)) + packed) * times)
        assert "must unpack to at most" in peak(read_svhn, tmp_path / "s.mat")

    def test_changed_files_raise_our_error_only(self, tmp_path):
        """Of 3,000 changed files, two ended the process while scipy read them."""
        x = np.zeros((32, 32, 3, 2), np.uint8)
        rng, path = random.Random(0), tmp_path / "s.mat"
        for packed in (False, True):
            savemat(path, {"X": x, "y": [1, 2]}, do_compression=packed)
            whole = path.read_bytes()
            for _ in range(400):
                changed = bytearray(whole)
                for _ in range(rng.randint(1, 4)):
                    changed[rng.randrange(min(len(changed), 400))] = rng.randrange(256)
                path.write_bytes(changed)
                try:
                    read_svhn(path)
                except DataError:
                    continue


TOML = {
    "nested lists": b"a = " + b"[" * 5000 + b"]" * 5000,
    "a number of 5,000 digits": b"lr = " + b"9" * 5000,
    "no UTF-8": b"a = '\xff'",
    "nested tables": b"a" + b".a" * 3000 + b" = 1",
}


@pytest.mark.parametrize("content", TOML.values(), ids=TOML)
def test_settings_that_no_reader_can_take_are_refused(tmp_path, content):
    (tmp_path / "s.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"must be valid TOML|must have a name"):
        read_settings(tmp_path / "s.toml")


DEEP = b"a." * 8000 + b"b"
DEEP_KEYS = {
    "a key": DEEP + b" = 1",
    "a table": b"[" + DEEP + b"]",
    "a list of tables": b"[[ " + DEEP + b" ]]",
    "an inline table": b"x = {y = 1, " + DEEP + b" = 1}",
    "spaces": b"a \t. " * 8000 + b"b = 1",
    "quoted parts": b'"a\\"=#".\'b\'.' * 4000 + b"b = 1",
    "after a comment": b"# it's\n" + DEEP + b" = 1",
    "after a text with a quote": b'x = ["""\n\'""", {' + DEEP + b" = 1}]",
    "after a text that ends with a quote": b'x = ["""a"""", {' + DEEP + b" = 1}]",
    "after a plain text that ends with a quote": b"x = ['''\"''\"'''', {" + DEEP + b" = 1}]",
    "after an escape": b'x = ["\\\\", {' + DEEP + b" = 1}]",
    "after an escape in a long text": b'x = ["""\\""""", {' + DEEP + b" = 1}]",
}


@pytest.mark.parametrize("content", DEEP_KEYS.values(), ids=DEEP_KEYS)
def test_a_deep_key_takes_little_memory(tmp_path, peak, content):
    """Python's reader takes four times as much memory for a key of twice as many parts."""
    (tmp_path / "s.toml").write_bytes(content)
    assert "a key has more than 16 parts" in peak(read_settings, tmp_path / "s.toml")


@pytest.mark.parametrize(
    "content",
    [
        b'data = "a.b.c/d.npz" # ' + DEEP,
        b"x = '" + DEEP + b" = 1'\ny = \"" + DEEP + b'"',
        b'x = """\n[' + DEEP + b']\n"""',
        b"x = [" + b"0.5, " * 1000 + b"1.5]",
        b".".join([b"a"] * 16) + b" = 1",
    ],
)
def test_dots_elsewhere_are_no_deep_key(content):
    assert parse_toml(content)


@pytest.mark.parametrize("piece", [b'"', b"'", b'\\"', b'"""', b"'''", b'"""\\', b"a", b"a ", b"a" * 99 + b".", b"#"])
@pytest.mark.parametrize("start", [b"", b'x = "', b'x = """\\'])
def test_looking_for_deep_keys_takes_no_long_time(start, piece):
    """A search that took the square of the length would need hours for these."""
    content = start + piece * (LONGEST_SETTINGS // len(piece))
    try:
        parse_toml(content)
    except ValueError:
        return
    assert piece == b"#"


def test_a_specification_can_not_ask_for_a_larger_model_than_its_file(tmp_path, gradveil):
    save_file({"w": torch.ones(1)}, tmp_path / "m.safetensors")
    facts = {"model": '"mlp:hidden=2000000000"', "shape": "[1, 600, 600]", "num_classes": 10, "kind": '"gradient"'}
    (tmp_path / "s.toml").write_text("".join(f"{key} = {value}\n" for key, value in facts.items()))
    files = [f"--{name}={tmp_path / 'm.safetensors'}" for name in ("model-file", "update")]
    ended = gradveil("attack", *files, "--spec", tmp_path / "s.toml", "--attack", "gs", "--out", tmp_path / "out")
    assert ended.code == 2
    assert "model must be that of" in ended.last


@pytest.mark.parametrize(
    "line", ["num_classes = 1000000000000", "shape = [1, 1000000, 1000000]", "num_examples = 100000000000"]
)
def test_numbers_of_a_specification_are_bounded(tmp_path, line):
    facts = {"model": '"mlp"', "shape": "[1, 8, 8]", "num_classes": "10", "kind": '"gradient"', "num_examples": "1"}
    key, _, value = line.partition(" = ")
    (tmp_path / "s.toml").write_text("\n".join(f"{k} = {v}" for k, v in (facts | {key: value}).items()))
    with pytest.raises(ConfigError, match=f"{key} must be"):
        read_spec(tmp_path / "s.toml")


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'{"":0},', b'"ab",'])
def test_a_long_header_of_tensors_takes_little_memory(tmp_path, peak, piece):
    header = b'{"a":[' + piece * ((30 << 20) // len(piece)) + b"0]}"
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "must be a whole safetensors file" in peak(load_tensors, tmp_path / "m.safetensors")


@pytest.mark.parametrize("piece", [b"\n", b"\r", b'{"round":1}\n', b"[],", b"[0]\n"])
def test_a_long_file_of_rows_takes_little_memory(tmp_path, piece):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(piece * ((LONGEST_TEXT - 9) // len(piece)))
    tracemalloc.start()
    try:
        with pytest.raises(OSError, match=r"lines and .* values, of at most"):
            read_lines(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * LONGEST_TEXT
    finally:
        tracemalloc.stop()


def test_a_json_text_has_a_largest_number_of_values():
    fine = "[" + "0," * (MOST_VALUES - 2) + "0]"
    assert len(parse_json(fine)) == MOST_VALUES - 1
    for text in (fine.replace("[", "[0,0,"), fine.replace("[", "[0,0,").encode()):
        with pytest.raises(ValueError, match=f"of at most {MOST_VALUES:,}"):
            parse_json(text)


@pytest.mark.parametrize("read", [load_tensors, read_metadata])
def test_a_pipe_or_a_device_in_place_of_tensors_is_refused_at_once(tmp_path, read):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "endless.safetensors").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        with pytest.raises(DataError, match="no regular file"):
            read(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize("name", ["plan.json", "settings.toml"])
def test_an_endless_file_in_a_strangers_audit_is_refused_at_once(tmp_path, gradveil, name):
    (tmp_path / "settings.toml").write_text('kind = "audit"\nrounds = 0\n')
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/zero")
    ended = gradveil("audit", "--out", tmp_path, "--resume", "--workers", 0)
    assert ended.code == 2
    assert name in ended.last
    assert "no regular file" in ended.last
