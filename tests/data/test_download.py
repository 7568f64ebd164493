import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gradveil.data import NamedSet, verify
from gradveil.data.download import RemoteFile, ensure, md5_of
from gradveil.errors import DataError, MissingDataError
from gradveil.registry import build

BODY = b"pixels" * 1000


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def server(monkeypatch):
    """A server on 127.0.0.1: ``bodies`` by path, ``hits`` counts requests, ``promise`` overrides the stated length."""
    monkeypatch.setenv("GRADVEIL_OFFLINE", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            made.hits.append(self.path)
            body = made.bodies.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Length", str(made.promise or len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *arguments):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.bodies, made.hits, made.promise = {}, [], None
    made.url = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def nothing_left(root):
    return not [path for path in root.rglob("*") if path.is_file()]


class TestFetch:
    def test_fetched_once_checked_and_in_place(self, server, tmp_path, capsys):
        server.bodies["/a.gz"] = BODY
        file = RemoteFile(f"{server.url}/a.gz", "deep/er/a.gz", md5(BODY))
        assert ensure(file, tmp_path) == tmp_path / "deep/er/a.gz"
        assert (tmp_path / "deep/er/a.gz").read_bytes() == BODY
        assert [path.name for path in (tmp_path / "deep/er").iterdir()] == ["a.gz"]
        ensure(file, tmp_path)
        assert server.hits == ["/a.gz"]
        output = capsys.readouterr()
        assert output.out == ""
        assert "a.gz" in output.err

    def test_a_file_that_is_there_is_kept(self, server, tmp_path):
        (tmp_path / "a").write_bytes(b"mine")
        ensure(RemoteFile(f"{server.url}/a", "a", md5(BODY)), tmp_path)
        assert (tmp_path / "a").read_bytes() == b"mine"
        assert server.hits == []

    def test_wrong_checksum_leaves_nothing(self, server, tmp_path):
        server.bodies["/a"] = b"other"
        with pytest.raises(MissingDataError, match=f"has md5 {md5(b'other')} and was thrown away.*md5 {md5(BODY)}"):
            ensure(RemoteFile(f"{server.url}/a", "a", md5(BODY)), tmp_path)
        assert nothing_left(tmp_path)

    def test_truncated_body_leaves_nothing(self, server, tmp_path):
        server.bodies["/a"], server.promise = BODY, len(BODY) + 500
        with pytest.raises(MissingDataError, match="could not be fetched"):
            ensure(RemoteFile(f"{server.url}/a", "a", md5(BODY)), tmp_path)
        assert nothing_left(tmp_path)

    def test_not_found(self, server, tmp_path):
        with pytest.raises(MissingDataError, match="404"):
            ensure(RemoteFile(f"{server.url}/a", "a", md5(BODY)), tmp_path)
        assert nothing_left(tmp_path)

    def test_a_refused_connection_says_how_to_get_the_file(self, server, tmp_path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        file = RemoteFile(f"http://127.0.0.1:{port}/set.gz", "x/set.gz", "0" * 32)
        with pytest.raises(MissingDataError) as caught:
            ensure(file, tmp_path)
        for part in (file.url, file.md5, str(tmp_path / "x/set.gz"), "set.gz is missing"):
            assert part in str(caught.value)

    def test_offline(self, server, tmp_path, monkeypatch):
        monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
        server.bodies["/a"] = BODY
        with pytest.raises(MissingDataError, match="GRADVEIL_OFFLINE is set, so it is not downloaded"):
            ensure(RemoteFile(f"{server.url}/a", "a", md5(BODY)), tmp_path)
        assert server.hits == []

    def test_other_addresses_and_pages(self, server, tmp_path):
        (tmp_path / "secret").write_bytes(BODY)
        with pytest.raises(MissingDataError, match="only http"):
            ensure(RemoteFile((tmp_path / "secret").as_uri(), "a", md5(BODY)), tmp_path)
        with pytest.raises(MissingDataError, match="without a direct link"):
            ensure(RemoteFile(f"{server.url}/page", "a", md5(BODY), direct=False), tmp_path)
        assert server.hits == []

    def test_an_unwritable_folder_is_named(self, server, tmp_path):
        (tmp_path / "file").write_text("in the way")
        server.bodies["/a"] = BODY
        with pytest.raises(DataError, match="must be writable"):
            ensure(RemoteFile(f"{server.url}/a", "sub/a", md5(BODY)), tmp_path / "file")


def tar_of(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return buffer.getvalue()


class TestArchives:
    @pytest.mark.parametrize("pack", [tar_of, zip_of])
    def test_fetched_and_unpacked(self, server, tmp_path, pack):
        server.bodies["/p"] = pack({"set/a.bin": b"a", "set/sub/b.bin": b"b"})
        file = RemoteFile(f"{server.url}/p", "p", md5(server.bodies["/p"]), unpacks_to="set")
        assert ensure(file, tmp_path) == tmp_path / "set"
        assert (tmp_path / "set/a.bin").read_bytes() == b"a"
        assert (tmp_path / "set/sub/b.bin").read_bytes() == b"b"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "set"]

    def test_an_archive_put_there_by_hand(self, tmp_path):
        content = zip_of({"faces/1.jpg": b"x"})
        (tmp_path / "celeba").mkdir()
        (tmp_path / "celeba/faces.zip").write_bytes(content)
        file = RemoteFile("https://page", "celeba/faces.zip", md5(content), unpacks_to="celeba/faces", direct=False)
        assert ensure(file, tmp_path) == tmp_path / "celeba/faces"
        assert (tmp_path / "celeba/faces/1.jpg").read_bytes() == b"x"

    def test_a_corrupt_archive_is_kept_and_named(self, server, tmp_path):
        (tmp_path / "p").write_bytes(b"half of it")
        with pytest.raises(DataError, match=r"p must have md5 0+, got .* Delete it") as caught:
            ensure(RemoteFile(f"{server.url}/p", "p", "0" * 32, unpacks_to="set"), tmp_path)
        assert not isinstance(caught.value, MissingDataError)
        assert (tmp_path / "p").read_bytes() == b"half of it"
        assert server.hits == []

    @pytest.mark.parametrize("pack", [tar_of, zip_of])
    @pytest.mark.parametrize("name", ["../escaped", "set/../../escaped", "/tmp/gradveil-escaped", "C:/x", "a\\..\\b"])  # noqa: S108
    def test_names_that_lead_outside(self, tmp_path, pack, name):
        content = pack({"set/a": b"a", name: b"evil"})
        root = tmp_path / "root"
        root.mkdir()
        (root / "p").write_bytes(content)
        with pytest.raises(DataError, match="would be written outside"):
            ensure(RemoteFile("https://x", "p", md5(content), unpacks_to="set"), root)
        assert [path.name for path in root.iterdir()] == ["p"]
        assert [path.name for path in tmp_path.iterdir()] == ["root"]

    def test_links_are_left_out(self, tmp_path):
        content = tar_of({"set/a": b"a", "set/link": "/etc/passwd"})
        (tmp_path / "p").write_bytes(content)
        folder = ensure(RemoteFile("https://x", "p", md5(content), unpacks_to="set"), tmp_path)
        assert [path.name for path in folder.iterdir()] == ["a"]

    @pytest.mark.parametrize(
        "content",
        [b"no archive", zip_of({"other/a": b"a"}), tar_of({"set/a": b"a" * 99999})[:90]],
        ids=["none", "other", "cut"],  # archives contain timestamps
    )
    def test_other_content(self, tmp_path, content):
        (tmp_path / "p").write_bytes(content)
        with pytest.raises(DataError, match=r"p (can't be unpacked|must hold the folder set/)"):
            ensure(RemoteFile("https://x", "p", md5(content), unpacks_to="set"), tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_md5_of(tmp_path):
    (tmp_path / "a").write_bytes(BODY)
    assert md5_of(tmp_path / "a") == md5(BODY)


class TestVerify:
    def test_nothing_there(self, tmp_path):
        for name, count in (
            ("mnist", 4),
            ("cifar10", 6),
            ("cifar100", 2),
            ("svhn", 2),
            ("celeba", 2),
            ("tiny-imagenet", 3),
        ):
            findings = verify(build(NamedSet, name), tmp_path)
            assert [finding.status for finding in findings] == ["missing"] * count

    def test_ok_and_corrupt(self, tmp_path, monkeypatch):
        named = build(NamedSet, "svhn")
        good = RemoteFile("https://x", "svhn/train_32x32.mat", md5(BODY))
        monkeypatch.setattr(type(named), "files", (good, named.files[1]))
        (tmp_path / "svhn").mkdir()
        for name in ("train", "test"):
            (tmp_path / f"svhn/{name}_32x32.mat").write_bytes(BODY)
        first, second = verify(named, tmp_path)
        assert (first.status, second.status) == ("ok", "corrupt")
        assert "delete it" in second.detail

    def test_python_batches_have_their_checksums(self, tmp_path, monkeypatch):
        named = build(NamedSet, "cifar100")
        (tmp_path / "cifar-100-python").mkdir()
        (tmp_path / "cifar-100-python/test").write_bytes(BODY)
        monkeypatch.setattr(type(named), "batches", {"train": "0" * 32, "test": md5(BODY)})
        assert [finding.status for finding in verify(named, tmp_path)] == ["missing", "ok"]

    def test_the_package_needs_no_root(self, tmp_path):
        (finding,) = verify(build(NamedSet, "mnist-5k"), tmp_path)
        assert finding.status == "unchecked"
        assert "holds 5,000" in finding.detail
        assert nothing_left(tmp_path)
