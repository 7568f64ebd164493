import pytest

from gradveil.audits.plan import SLICE, plan
from gradveil.audits.privacy import attack_cell
from gradveil.audits.settings import AuditSettings
from gradveil.data import load_dataset


def test_the_cells_are_all_combinations_in_the_order_of_the_rows():
    settings = AuditSettings(defences=("prune",), attacks=("gs", "dlg"), adaptive=True, seeds=2, targets=3, tap=(2,))
    cells = plan(settings)
    assert [(c.seed, c.defence, c.attack, c.adaptive) for c in cells[:7]] == [
        (0, "none", "", False),
        (0, "none", "gs", False),  # `none` has no countermove
        (0, "none", "dlg", False),
        (0, "prune", "", False),
        (0, "prune", "gs", False),
        (0, "prune", "gs", True),
        (0, "prune", "dlg", False),
    ]
    assert len(cells) == 2 * 8
    assert len({cell.name for cell in cells}) == len(cells)
    assert {(cell.first, cell.last, cell.round) for cell in cells if cell.kind == "privacy"} == {(0, 3, 2)}


def test_attacks_come_after_the_training_whose_updates_they_need_one_cell_per_tapped_round():
    cells = plan(AuditSettings(defences=("prune",), seeds=2, rounds=9, tap=(1, 9)))
    trainings = {cell.name: (cell.defence, cell.seed) for cell in cells if cell.kind == "utility"}
    attacks = [cell for cell in cells if cell.kind == "privacy"]
    assert [cell.round for cell in attacks] == [1, 9] * 4
    assert all(trainings[cell.needs] == (cell.defence, cell.seed) for cell in attacks)
    assert {cell.needs for cell in plan(AuditSettings(rounds=0))} == {""}


def test_many_targets_are_cut_into_slices_without_gap():
    cells = plan(AuditSettings(targets=2 * SLICE + 5, rounds=0))
    assert [(cell.first, cell.last) for cell in cells] == [(0, 16), (16, 32), (32, 37)]


def test_without_adaptive_or_rounds_there_are_only_plain_attacks():
    cells = plan(AuditSettings(defences=("prune",), rounds=0))
    assert {(cell.kind, cell.adaptive) for cell in cells} == {("privacy", False)}


def test_an_attack_that_cannot_adapt_runs_once():
    cells = plan(AuditSettings(defences=("prune",), attacks=("representations",), adaptive=True, rounds=0))
    assert [cell.adaptive for cell in cells] == [False, False]


OWN = """
from dataclasses import dataclass

import torch

from gradveil.attacks import Attack
from gradveil.threat import Knowledge, Reconstruction


@dataclass(frozen=True)
class Mine(Attack):
    {how}

    def run(self, seen, rng):
        known = float(seen.knows(Knowledge.DEFENCE))
        zeros = torch.zeros(seen.num_targets)
        labels = torch.zeros(seen.num_targets, 1, dtype=torch.long)
        return Reconstruction(torch.full((seen.num_targets, 1, *seen.shape), known), labels, zeros, zeros == 0)
"""


@pytest.mark.parametrize(
    ("how", "ways"), [("adapts = True", {False, True}), ("adapt: str = ''", {False, True}), ("pass", {False})]
)
def test_a_users_attack_that_adapts_gets_adaptive_rows(how, ways, small, tmp_path):
    (tmp_path / "mine.py").write_text(OWN.format(how=how))
    spec = f"{tmp_path}/mine.py:Mine"
    settings = small(defences="prune", attacks=spec, adaptive=True, rounds=0, targets=1)
    cells = [cell for cell in plan(settings) if cell.defence == "prune"]
    rows = [row for cell in cells for row in attack_cell(cell, settings, load_dataset(settings.dataset))[0]]
    found = {row["adaptive"]: row["psnr"] for row in rows}
    assert found.keys() == ways
    assert len(set(found.values())) == len(ways)
