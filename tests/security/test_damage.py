"""Damage is found or survived: single flipped bits, truncated rows, and folders of trainings that were changed."""

import json
import random
import shutil
import warnings

import pytest
import torch
from safetensors.torch import save_file

from gradveil.config import TrainSettings, to_toml
from gradveil.engines.run_folder import RunFolder
from gradveil.errors import DataError, GradveilError
from gradveil.report.audit import write_report
from gradveil.report.training import rewrite_page
from gradveil.storage import PrivateFolder, load_tensors, save_tensors
from gradveil.threat.tap import load_tapped

FLIPS = 300
PIECES = [b"null", b"[]", b"{}", b"1e999", b"-1", b'"', b"\n", b"9" * 500, b"[" * 99]


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    tensors = {"model.w": torch.randn(20, 10), "model.b": torch.zeros(10), "server.s": torch.arange(5)}
    save_tensors(path, tensors, {"round": "3", "data": "ab" * 16, "row": json.dumps({"round": 3, "loss": 0.5})})
    return path


def test_every_flipped_bit_of_a_checkpoint_is_found(checkpoint):
    whole, rng = checkpoint.read_bytes(), random.Random(0)
    header = 8 * (8 + int.from_bytes(whole[:8], "little"))
    bits = [rng.randrange(header) for _ in range(FLIPS)] + [rng.randrange(8 * len(whole)) for _ in range(FLIPS)]
    for bit in bits:
        checkpoint.write_bytes(flipped(whole, bit))
        with pytest.raises(DataError, match="must be a whole safetensors file"):
            load_tensors(checkpoint)
    checkpoint.write_bytes(whole)
    load_tensors(checkpoint)


def test_every_flipped_bit_of_a_private_state_is_found(tmp_path):
    folder = PrivateFolder(tmp_path / "clients" / "0" / "private")
    folder.save_state(1, {"key": torch.randn(64), "count": torch.arange(9)})
    (path,) = folder.path.glob("state-*.safetensors")
    whole, rng = path.read_bytes(), random.Random(1)
    for bit in [rng.randrange(8 * len(whole)) for _ in range(FLIPS)]:
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(DataError, match=r"It is damaged. Restore it from a copy"):
            folder.load_state(2)


def test_files_without_a_digest_still_load(tmp_path):
    """Those of earlier versions and of other programs: their structure is checked, as it was."""
    save_file({"w": torch.ones(3)}, tmp_path / "old.safetensors", {"round": "1"})
    assert torch.equal(load_tensors(tmp_path / "old.safetensors")["w"], torch.ones(3))


def test_half_a_seal_is_no_earlier_version(tmp_path):
    for facts in ({"gradveil-format": "1"}, {"blake2b": "00"}):
        save_file({"w": torch.ones(3)}, tmp_path / "t.safetensors", facts)
        with pytest.raises(DataError, match="does not fit its digest"):
            load_tensors(tmp_path / "t.safetensors")


def row(number):
    figures = {"accuracy": 0.1 * number, "accuracy_sensitive": None, "loss": 2.0 / number}
    return {"kind": "round", "round": number, **figures, "lr": 0.05, "clients": 4, "seconds": 0.1}


@pytest.fixture
def training(tmp_path):
    path, settings = tmp_path / "run", TrainSettings(rounds=4, lr=0.1, save_rounds=(1,))
    with RunFolder(path) as folder:
        folder.begin(settings, "data", resume=False)
        for number in range(1, 5):
            folder.commit(number, row(number), {"w": torch.ones(2)}, {})
    clients = [{"client": n, "images": 20, "accuracy_own": n / 4, "accuracy_test": 0.5} for n in range(4)]
    (path / "clients.jsonl").write_text("".join(json.dumps(client) + "\n" for client in clients))
    return path, settings


def test_truncated_rows_are_repaired_on_resuming(training):
    path, settings = training
    whole = (path / "rows.jsonl").read_bytes()
    (path / "rows.jsonl").write_bytes(whole[: len(whole) * 2 // 5])
    with RunFolder(path) as folder, pytest.warns(UserWarning, match="figures of rounds 2, 3 are lost"):
        found = folder.begin(settings, "data", resume=True)
    assert [line["round"] for line in found.rows] == [1, 4]
    assert [json.loads(line)["round"] for line in (path / "rows.jsonl").read_text().splitlines()] == [1, 4]


def mutated(content, rng):
    content = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place, way = rng.randrange(len(content) or 1), rng.randrange(5)
        if way == 0 and content:
            content[place] = rng.randrange(256)
        elif way == 1:
            del content[place : place + rng.randint(1, 40)]
        elif way == 2:
            content[place:place] = rng.choice(
                [b"null", b"[]", b"{}", b"1e999", b"-1", b'"', b"\n", b"9" * 500, b"[" * 99]
            )
        elif way == 3:
            content = content[:place]
        else:
            content[place:place] = content[place : place + rng.randint(1, 60)]
    return bytes(content)


@pytest.mark.parametrize("seed", range(6))
def test_the_page_of_a_changed_training_is_written_or_refused_with_a_reason(training, tmp_path, seed):
    """Before, most of such changes gave raw errors, e.g. of json or matplotlib."""
    rng, path = random.Random(seed), tmp_path / "run"
    originals = {name: (path / name).read_bytes() for name in ("settings.toml", "rows.jsonl", "clients.jsonl")}
    written = 0
    for _ in range(12):
        for name, content in originals.items():
            (path / name).write_bytes(mutated(content, rng) if rng.random() < 0.6 else content)
        try:
            written += rewrite_page(path).is_file()
        except GradveilError:
            continue
    assert written


def test_the_page_tells_what_is_broken(training):
    path, settings = training
    (path / "settings.toml").write_bytes(
        to_toml(settings).replace(b"clients = 10", b"clients = -3") + b"\nfuture = 1\n"
    )
    whole = (path / "rows.jsonl").read_text().splitlines()
    changed = whole[1].replace('"loss": 1.0', '"loss": "low", "surprise": 1')
    (path / "rows.jsonl").write_text("\n".join([whole[0], changed, "{", "[]", whole[3]]))
    (path / "clients.jsonl").unlink()
    page = rewrite_page(path).read_text()
    assert "2 broken lines of rows.jsonl" in page
    assert "does not know are not shown: surprise" in page
    assert "have their default: clients, future" in page
    assert "clients.jsonl is missing" in page
    assert "after 4 rounds" in page


def test_a_link_to_a_device_in_a_strangers_folder_is_not_read(training):
    path, settings = training
    (path / "clients.jsonl").unlink()
    (path / "clients.jsonl").symlink_to("/dev/zero")
    assert "clients.jsonl can&#x27;t be read" in rewrite_page(path).read_text()
    shutil.rmtree(path / "clients", ignore_errors=True)
    (path / "rows.jsonl").unlink()
    (path / "rows.jsonl").symlink_to("/dev/zero")
    with RunFolder(path) as folder, pytest.raises(DataError, match="is no regular file"), warnings.catch_warnings():
        folder.begin(settings, "data", resume=True)


def test_half_written_files_of_a_killed_run_are_removed_on_resuming(training):
    """Also those of private states, which hold keys; found by kill -9 in benchmarks/reliability.py."""
    path, settings = training
    private = path / "clients" / "0" / "private"
    private.mkdir(parents=True)
    (private / ".state-000001.safetensors.77.part").write_bytes(b"half a key")
    with RunFolder(path) as folder:
        folder.begin(settings, "data", resume=True)
    assert not list(path.rglob("*.part"))


def test_a_tapped_round_with_other_facts_is_refused(tmp_path):
    """Found by benchmarks/reliability.py: the digests were read outside of the check."""
    for facts in ({"digests": '{"<": "ab"}'}, {"digests": "[]"}, {"examples": "7"}, {"examples": '{"7": 1}'}):
        whole = {"round": "1", "lr": "0.1", "examples": "{}", "digests": "{}"} | facts
        save_tensors(tmp_path / "t.safetensors", {"model/w": torch.ones(1)}, whole)
        with pytest.raises(DataError, match="must be a tapped round"):
            load_tapped(tmp_path / "t.safetensors")


@pytest.mark.parametrize("name", ["plan.json", "rows.jsonl", "cells/p.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b"9" * 5000, b'{"cells": [[]]}', b'{"cells": {"a": 1}}', b"null"])
def test_the_page_of_an_audit_survives_files_that_no_reader_can_take(tmp_path, name, content):
    plan = {"cells": [{"name": "p", "kind": "privacy", "defence": "none", "attack": "gs", "seed": 0, "targets": [0]}]}
    (tmp_path / "settings.toml").write_text('kind = "audit"\n')
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "p.json").write_text("[]")
    (tmp_path / name).write_bytes(content)
    assert write_report(tmp_path).is_file()
