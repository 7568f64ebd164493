"""A ledger makes a site remember: damage must never let it answer a round anew, and nobody else may change it."""

import os
import random

import pytest

from gradveil.engines.site_ledger import Ledger, RunRecord, open_ledger
from gradveil.errors import RunFolderError
from gradveil.federated.client import Score
from tests.security.sites import OneSite, code, update_of


def test_every_flipped_bit_of_a_ledger_is_found(tmp_path):
    path = tmp_path / "ledger-0.json"
    record = RunRecord(2, "q", 2, ("a", "b"), "c", {"k": Score(1, 0.5, 2, (1, 0), (1, 1))})
    with open_ledger(path) as book:
        book.write(Ledger(epsilon=0.25).with_run("run", record))
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(RunFolderError, match="damaged"), open_ledger(path):
            pass


def test_a_damaged_ledger_is_an_error_and_never_a_new_answer(tmp_path):
    site, path, rng = OneSite(tmp_path), tmp_path / "ledger-0.json", random.Random(1)
    first = update_of(site.train(1))
    whole = path.read_bytes()
    for _ in range(10):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        assert code(site.train(1)) == "state"
    path.write_bytes(whole)
    assert update_of(site.train(1)) == first


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_others_can_neither_write_to_the_folders_of_a_ledger_nor_open_its_own(tmp_path):
    before = os.umask(0)
    try:
        assert code(OneSite(tmp_path / "x" / "y" / "private").train(1)) == ""
    finally:
        os.umask(before)
    made = [path for path in (tmp_path / "x").rglob("*") if path.is_dir()] + [tmp_path / "x"]
    assert [path for path in made if path.stat().st_mode & 0o022] == []
    assert (tmp_path / "x" / "y" / "private").stat().st_mode & 0o777 == 0o700
