"""The folder of a run: one run and one process at a time; an interrupted run is resumed or refused with a reason."""

import json
import shutil
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gradveil.config import TrainSettings, make_train_settings, read_settings
from gradveil.engines.run_folder import RunFolder, to_lines
from gradveil.errors import DataError, GradveilError, RunFolderError

SETTINGS = TrainSettings(rounds=5)
MODEL = {"w": torch.arange(3.0), "b": torch.ones(1)}
quick = hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def row(number):
    return {"kind": "round", "round": number, "accuracy": 0.5, "loss": 1.0, "seconds": 0.1}


LAST = {key: value for key, value in row(3).items() if key != "seconds"}
"""The newest row as the checkpoint has it."""


def fill(path, rounds=3, settings=SETTINGS):
    with RunFolder(path) as folder:
        assert folder.begin(settings, "data", resume=False) is None
        for number in range(1, rounds + 1):
            folder.commit(number, row(number), {"w": MODEL["w"] * number, "b": MODEL["b"]}, {"s": torch.tensor([7.0])})


def begin(path, settings=SETTINGS, fingerprint="data", resume=True):
    with RunFolder(path) as folder:
        return folder.begin(settings, fingerprint, resume=resume)


def begin_quietly(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return begin(path)


def content(path):
    return {p.relative_to(path): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_run_resumes_from_its_last_committed_round(tmp_path):
    fill(tmp_path / "run")
    found = begin(tmp_path / "run")
    assert found.round == 3
    assert torch.equal(found.model["w"], MODEL["w"] * 3)
    assert found.model.keys() == MODEL.keys()
    assert torch.equal(found.server_state["s"], torch.tensor([7.0]))
    assert found.rows == [row(1), row(2), row(3)]
    assert make_train_settings(read_settings(tmp_path / "run" / "settings.toml")) == SETTINGS


def test_a_new_folder_has_settings_and_no_rows(tmp_path):
    path = tmp_path / "a" / "b"
    assert begin(path, resume=False) is None
    assert (path / "rows.jsonl").read_bytes() == b""
    assert begin(path, resume=True) is None


def test_a_folder_that_holds_a_run_is_never_taken_by_another(tmp_path):
    fill(tmp_path)
    before = content(tmp_path)
    with pytest.raises(RunFolderError, match=r"holds a run. Add --resume"):
        begin(tmp_path, resume=False)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "rest", ["settings.toml", "rows.jsonl", "checkpoint.safetensors", "clients/0/private/data.safetensors"]
)
def test_any_leftover_file_of_a_run_counts_as_a_run(tmp_path, rest):
    """Otherwise private files of another run would be mistaken for this run's."""
    path = tmp_path / rest
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    with pytest.raises(RunFolderError, match="holds a run"):
        begin(tmp_path, resume=False)
    assert path.read_bytes() == b""


def test_other_files_in_the_folder_are_not_changed(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    fill(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.9),
        ("seed", 1),
        ("model", "mlp"),
        ("clients", 11),
        ("defence", "none+none"),
        ("nesterov", True),
    ],
)
def test_a_changed_setting_is_named_and_nothing_changes(tmp_path, field, value):
    fill(tmp_path)
    before = content(tmp_path)
    with pytest.raises(RunFolderError) as caught:
        begin(tmp_path, replace(SETTINGS, **{field: value}))
    assert f"{field} = {value!r} (was {getattr(SETTINGS, field)!r})" in str(caught.value)
    assert content(tmp_path) == before


def test_rounds_may_increase_but_not_below_the_finished_ones(tmp_path):
    fill(tmp_path)
    assert begin(tmp_path, replace(SETTINGS, rounds=9)).round == 3
    assert read_settings(tmp_path / "settings.toml")["rounds"] == 9
    before = content(tmp_path)
    with pytest.raises(RunFolderError, match=r"rounds must be at least .* got 2"):
        begin(tmp_path, replace(SETTINGS, rounds=2))
    assert content(tmp_path) == before


def test_the_tripwire_may_change(tmp_path):
    fill(tmp_path, settings=replace(SETTINGS, tripwire="refuse"))
    assert begin(tmp_path, replace(SETTINGS, tripwire="warn")).round == 3
    assert read_settings(tmp_path / "settings.toml")["tripwire"] == "warn"


def test_other_data_are_refused(tmp_path):
    fill(tmp_path)
    before = content(tmp_path)
    with pytest.raises(RunFolderError, match="must have the data, weights and own files it began with"):
        begin(tmp_path, fingerprint="other")
    assert content(tmp_path) == before


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    fill(tmp_path / "a")
    fill(tmp_path / "b", settings=replace(SETTINGS, lr=0.9))
    shutil.copy(tmp_path / "b" / "checkpoint.safetensors", tmp_path / "a" / "checkpoint.safetensors")
    with pytest.raises(GradveilError, match="checkpoint"):
        begin(tmp_path / "a")


def test_a_checkpoint_whose_settings_are_gone_is_refused_for_other_settings(tmp_path):
    fill(tmp_path)
    (tmp_path / "settings.toml").unlink()
    before = content(tmp_path)
    with pytest.raises(GradveilError, match=r"checkpoint|settings"):
        begin(tmp_path, replace(SETTINGS, lr=0.9))
    assert content(tmp_path) == before


def test_a_damaged_settings_file_is_refused(tmp_path):
    fill(tmp_path)
    (tmp_path / "settings.toml").write_text("lr = ")
    with pytest.raises(GradveilError, match="valid TOML"):
        begin(tmp_path)


@given(share=st.floats(0, 1, exclude_max=True))
@quick
def test_a_truncated_checkpoint_is_refused_and_kept(tmp_path, share):
    path = tmp_path / "run"
    shutil.rmtree(path, ignore_errors=True)
    fill(path)
    whole = (path / "checkpoint.safetensors").read_bytes()
    (path / "checkpoint.safetensors").write_bytes(whole[: int(share * len(whole))])
    before = content(path)
    with pytest.raises(DataError, match=r"checkpoint.safetensors must be a whole safetensors file"):
        begin(path)
    assert content(path) == before


def test_a_file_of_other_tensors_is_refused_as_checkpoint(tmp_path):
    from safetensors.torch import save_file

    fill(tmp_path)
    for facts in ({}, {"round": "x"}, {"data": "data"}):
        save_file(MODEL, tmp_path / "checkpoint.safetensors", facts)
        with pytest.raises(DataError, match="must be a checkpoint of gradveil"):
            begin(tmp_path)


@given(cut=st.integers(0, 10**6), rest=st.binary(max_size=12))
@quick
def test_rows_truncated_at_any_byte_are_repaired(tmp_path, cut, rest):
    """Whole rows up to the checkpoint are kept, and the checkpoint has its own; later rows never finished."""
    path = tmp_path / "run"
    shutil.rmtree(path, ignore_errors=True)
    fill(path)
    needed = to_lines([row(1), row(2), row(3)])
    longer = needed + to_lines([row(4)])
    kept = longer[: cut % (len(longer) + 1)] + rest
    (path / "rows.jsonl").write_bytes(kept)
    whole = [row(n) for n in (1, 2, 3) if to_lines([row(n)])[:-1] in kept.splitlines()]
    whole += [] if row(3) in whole else [LAST]
    with nullcontext() if len(whole) == 3 else pytest.warns(UserWarning, match=r"rows.jsonl was damaged"):
        assert begin(path).rows == whole
    assert (path / "rows.jsonl").read_bytes() == to_lines(whole)
    assert begin_quietly(path).rows == whole


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "1",
        "null",
        '["round"]',
        '{"round": "1"}',
        '{"round": null}',
        '{"round": [1]}',
        '{"round": 7}',
        "\xff",
        "",
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_invalid_rows_are_left_out(tmp_path, text, place):
    fill(tmp_path)
    lines = [json.dumps(row(number)) for number in (1, 2, 3)]
    lines[place] = text
    (tmp_path / "rows.jsonl").write_bytes("\n".join(lines).encode("latin1"))
    whole = [row(n) for n in (1, 2, 3) if n != place + 1] + [LAST] * (place == 2)
    with nullcontext() if place == 2 else pytest.warns(UserWarning, match=rf"figures of round {place + 1} are lost"):
        assert begin(tmp_path).rows == whole
    assert (tmp_path / "rows.jsonl").read_bytes() == to_lines(whole)


def test_missing_rows_are_repaired_and_a_folder_in_their_place_is_refused(tmp_path):
    fill(tmp_path)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.warns(UserWarning, match="figures of rounds 1, 2 are lost"):
        assert begin(tmp_path).rows == [LAST]
    (tmp_path / "rows.jsonl").unlink()
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(GradveilError, match=r"rows.jsonl"):
        begin(tmp_path)


def test_rows_are_always_valid_json():
    with pytest.raises(ValueError, match="JSON"):
        to_lines([{"loss": float("nan")}])
    assert to_lines([]) == b""
    assert to_lines([{"a": 1}, {"b": None}]) == b'{"a": 1}\n{"b": null}\n'


def test_a_folder_in_use_is_refused_and_free_again_afterwards(tmp_path):
    path = tmp_path / "run"
    with RunFolder(path) as folder:
        folder.begin(SETTINGS, "data", resume=False)
        with pytest.raises(RunFolderError, match="must not be in use"), RunFolder(path):
            pass
        assert folder.holds_run()
    with RunFolder(path) as folder:
        assert folder.holds_run()


def test_an_empty_folder_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), RunFolder(tmp_path / "run"):
        raise ZeroDivisionError
    assert not (tmp_path / "run").exists()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes").write_text("x")
    with RunFolder(tmp_path / "kept"):
        pass
    assert (tmp_path / "kept" / "notes").exists()


def test_a_folder_that_vanished_does_not_hide_the_error(tmp_path):
    def use():
        with RunFolder(tmp_path / "run"):
            shutil.rmtree(tmp_path / "run")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("x")
    for path in (tmp_path / "run", tmp_path / "run" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(RunFolderError, match="must be a folder that can be written"), RunFolder(path):
            pass
    assert (tmp_path / "run").read_text() == "x"


def test_leftovers_of_killed_writes_are_deleted(tmp_path):
    """A run that is killed often must not fill the disk with partial checkpoints."""
    fill(tmp_path)
    (tmp_path / ".checkpoint.safetensors.4711.part").write_bytes(b"half")
    begin(tmp_path)
    assert not list(tmp_path.glob(".*.part"))
