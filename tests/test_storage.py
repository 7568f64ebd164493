"""Files are complete or absent, whatever fails in between; only their owner can read private folders."""

import errno
import os
import stat

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gradveil.errors import DataError, RunFolderError
from gradveil.storage import PrivateFolder, load_tensors, read_metadata, save_tensors, write_atomic

STEPS = ["open", "fsync", "replace"]


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def failing(step, error):
    def fail(*args, **kwargs):
        raise error

    return {"open": (os, "open", fail), "fsync": (os, "fsync", fail), "replace": (os, "replace", fail)}[step]


@given(old=st.none() | st.binary(max_size=50), new=st.binary(max_size=50), step=st.sampled_from([None, *STEPS]))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path, old, new, step):
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    if old is not None:
        path.write_bytes(old)
    if step is None:
        write_atomic(path, new)
        assert path.read_bytes() == new
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*failing(step, OSError(errno.ENOSPC, "No space left on device")))
            with pytest.raises(RunFolderError, match=r"could not be written: No space left on device.*--resume"):
                write_atomic(path, new)
        assert (path.read_bytes() if path.exists() else None) == old
    assert files(tmp_path) == (["file"] if path.exists() else [])


class Killed(BaseException):
    """An exception that simulates kill -9: no ordinary handler catches it."""


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_write_leaves_the_old_content(tmp_path, monkeypatch, step):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(*failing(step, Killed()))
    with pytest.raises(Killed):
        write_atomic(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_the_content_is_synced_before_it_replaces_the_old(tmp_path, monkeypatch):
    path, calls = tmp_path / "file", []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: (calls.append(("fsync", os.fstat(f).st_size)), fsync(f)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(("replace", str(b))), replace(a, b)))
    write_atomic(path, b"12345")
    assert calls[:2] == [("fsync", 5), ("replace", str(path))]


def test_missing_folders_are_created_and_a_file_in_their_place_is_an_error(tmp_path):
    write_atomic(tmp_path / "a" / "b" / "file", b"x")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"x"
    with pytest.raises(RunFolderError, match="could not be written"):
        write_atomic(tmp_path / "a" / "b" / "file" / "c", b"x")
    with pytest.raises(RunFolderError, match="could not be written"):
        write_atomic(tmp_path / "a", b"x")
    with pytest.raises(RunFolderError, match="could not be written"):
        write_atomic(tmp_path / ("x" * 300), b"x")
    assert files(tmp_path) == ["file"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_mode_is_kept_whatever_was_there(tmp_path, mode):
    old = os.umask(0o022)
    try:
        path = tmp_path / "file"
        write_atomic(path, b"x", mode=mode)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        path.chmod(0o666)
        write_atomic(path, b"y", mode=mode)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(old)


def test_tensors_are_restored_with_their_metadata(tmp_path):
    path = tmp_path / "t.safetensors"
    wide = torch.arange(12.0)
    tensors = {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "half": torch.ones(2).half(),
        "int": torch.tensor([1, 2]),
        "turned": wide.view(3, 4).T,
        "view": wide[2:5],
        "grad": torch.ones(2, requires_grad=True),
    }
    save_tensors(path, tensors, {"round": "3", "ä": "ö"})
    loaded = load_tensors(path)
    assert loaded.keys() == tensors.keys()
    assert all(
        torch.equal(loaded[key], tensor) and loaded[key].dtype == tensor.dtype for key, tensor in tensors.items()
    )
    assert read_metadata(path) == {"round": "3", "ä": "ö"}
    save_tensors(path, {})
    assert load_tensors(path) == read_metadata(path) == {}


def test_one_tensor_may_be_saved_under_two_names(tmp_path):
    """A defence may keep the same tensor twice in its state; overlapping views too."""
    tensor = torch.arange(4.0)
    save_tensors(tmp_path / "t", {"a": tensor, "b": tensor, "part": tensor[1:3]})
    loaded = load_tensors(tmp_path / "t")
    assert torch.equal(loaded["a"], tensor)
    assert torch.equal(loaded["b"], tensor)
    assert torch.equal(loaded["part"], tensor[1:3])


def test_equal_tensors_and_metadata_give_equal_bytes(tmp_path):
    texts = {key: key * 2 for key in ("round", "model", "defence", "lr", "epochs", "data")}
    for number in range(8):
        save_tensors(tmp_path / str(number), {"b": torch.ones(2), "a": torch.zeros(3)}, texts)
    assert len({(tmp_path / str(number)).read_bytes() for number in range(8)}) == 1


@given(cut=st.integers(0, 10**6))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
def test_a_truncated_file_is_refused(tmp_path, cut):
    path = tmp_path / "t.safetensors"
    save_tensors(path, {"a": torch.arange(9.0), "b": torch.ones(2)}, {"round": "1"})
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % len(whole)])
    for read in (load_tensors, read_metadata):
        with pytest.raises(DataError, match=r"t.safetensors must be a whole safetensors file, got: "):
            read(path)


def test_no_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        for read in (load_tensors, read_metadata):
            with pytest.raises(DataError, match="must be a whole safetensors file"):
                read(path)


def number(state):
    return None if state is None else int(state["n"])


def test_a_round_starts_from_the_newest_state_before_it(tmp_path):
    folder = PrivateFolder(tmp_path / "clients" / "3" / "private")
    assert folder.load_state(1) is None
    for round_number in (1, 4, 5, 9):
        folder.save_state(round_number, {"n": torch.tensor(round_number)})
    assert number(folder.load_state(10)) == number(folder.load_state(11)) == 9
    # killed in round 9 and resumed: the state before 9 is still there
    assert number(folder.load_state(9)) == number(folder.load_state(6)) == 5
    assert files(folder.path) == ["state-000005.safetensors", "state-000009.safetensors"]


@given(rounds=st.lists(st.integers(1, 2_000_000), min_size=1, max_size=8, unique=True).map(sorted))
@hypothesis_settings(max_examples=30, deadline=None)
def test_the_last_two_states_are_always_kept(rounds, tmp_path_factory):
    folder = PrivateFolder(tmp_path_factory.mktemp("c") / "private")
    for before, now in zip([None, *rounds], rounds, strict=False):
        assert number(folder.load_state(now)) == before
        folder.save_state(now, {"n": torch.tensor(now)})
        assert number(folder.load_state(now)) == before  # saving a round must not change where it starts from
    assert len(files(folder.path)) == min(2, len(rounds))


def test_only_the_owner_can_read_private_files(tmp_path):
    folder = PrivateFolder(tmp_path / "private")
    folder.save_state(1, {"n": torch.ones(1)})
    folder.save("data", {"images": torch.ones(2)})
    assert torch.equal(folder.load("data")["images"], torch.ones(2))
    assert folder.load("other") is None
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}


def test_a_private_folder_that_can_not_be_made_is_an_error(tmp_path):
    (tmp_path / "clients").write_text("in the way")
    with pytest.raises(RunFolderError, match="could not be made"):
        PrivateFolder(tmp_path / "clients" / "0" / "private").save("data", {})


def test_a_damaged_state_is_refused_not_forgotten(tmp_path):
    folder = PrivateFolder(tmp_path / "private")
    folder.save_state(1, {"n": torch.ones(1)})
    (folder.path / "state-000001.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"state-000001.* is damaged\. Restore it .* make the empty file .*begin-anew"):
        folder.load_state(2)


def test_files_not_named_by_a_round_are_ignored(tmp_path):
    folder = PrivateFolder(tmp_path / "private")
    for round_number in (1, 2, 3):
        folder.save_state(round_number, {"n": torch.tensor(round_number)})
        (folder.path / "state-foo.safetensors").touch()
    assert number(folder.load_state(4)) == 3
    for path in folder.path.glob("state-0*"):
        path.unlink()
    with pytest.raises(RunFolderError, match="it is lost"):
        folder.load_state(4)
    assert files(folder.path) == ["state-foo.safetensors"]


def test_a_lost_state_is_refused_but_repeating_a_round_is_not(tmp_path):
    folder = PrivateFolder(tmp_path / "private")
    folder.save_state(3, {"n": torch.ones(1)})
    assert folder.load_state(3) is None
    (folder.path / "state-000003.safetensors").unlink()
    with pytest.raises(RunFolderError, match=r"it is lost.*make the empty file .*begin-anew"):
        folder.load_state(3)
    folder.save_state(4, {"n": torch.ones(1)})
    with pytest.raises(RunFolderError, match="it is lost"):  # a later state does not replace that of round 3
        folder.load_state(4)
    (tmp_path / "begin-anew").touch()
    assert folder.load_state(4) is None
    folder.save_state(4, {"n": torch.ones(1)})
    assert not folder.begins_anew
    assert set(folder.load_state(5)) == {"n"}
    assert folder.load_state(4) is None  # like a new client in round 4


def test_a_client_that_trained_must_have_its_state(tmp_path):
    folder = PrivateFolder(tmp_path / "0" / "private")
    with pytest.raises(RunFolderError, match="after round 1, got none: it is lost"):
        folder.require_state(1)
    folder.save_state(1, {"n": torch.ones(1)})
    folder.require_state(1)
    with pytest.raises(RunFolderError, match="after round 2, got none"):  # an older state is not enough
        folder.require_state(2)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "begin-anew").touch()
    PrivateFolder(tmp_path / "1" / "private").require_state(2)


def test_a_private_file_with_non_finite_numbers_is_damaged(tmp_path):
    folder = PrivateFolder(tmp_path / "private")
    folder.save_state(1, {"key": torch.tensor([1.0, torch.nan])})
    with pytest.raises(DataError, match="must hold finite numbers, got others in key"):
        folder.load_state(2)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_private_file_that_others_can_open_is_refused(tmp_path, mode):
    folder = PrivateFolder(tmp_path / "private")
    folder.save_state(1, {"n": torch.ones(1)})
    folder.save("data", {"n": torch.ones(1)})
    for path in folder.path.iterdir():
        path.chmod(mode)
    with pytest.raises(RunFolderError, match=f"must have mode 0600, got {mode:04o}.*chmod 600"):
        folder.load_state(2)
    with pytest.raises(RunFolderError, match="must have mode 0600"):
        folder.load("data")
