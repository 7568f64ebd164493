from gradveil.audits.plan import SLICE, plan
from gradveil.audits.settings import AuditSettings


def test_the_cells_are_all_combinations_in_the_order_of_the_rows():
    settings = AuditSettings(defences=("prune",), attacks=("gs", "dlg"), adaptive=True, seeds=2, targets=3)
    cells = plan(settings)
    assert [(c.seed, c.defence, c.attack, c.adaptive) for c in cells[:7]] == [
        (0, "none", "", False),
        (0, "none", "gs", False),  # there is nothing to know of `none`
        (0, "none", "dlg", False),
        (0, "prune", "", False),
        (0, "prune", "gs", False),
        (0, "prune", "gs", True),
        (0, "prune", "dlg", False),
    ]
    assert len(cells) == 2 * 8
    assert len({cell.name for cell in cells}) == len(cells)
    assert {(cell.first, cell.last) for cell in cells if cell.kind == "privacy"} == {(0, 3)}


def test_many_targets_are_cut_into_slices_without_gap():
    cells = plan(AuditSettings(targets=2 * SLICE + 5, rounds=0))
    assert [(cell.first, cell.last) for cell in cells] == [(0, 16), (16, 32), (32, 37)]


def test_without_adaptive_or_rounds_there_are_only_plain_attacks():
    cells = plan(AuditSettings(defences=("prune",), rounds=0))
    assert {(cell.kind, cell.adaptive) for cell in cells} == {("privacy", False)}


def test_an_attack_that_can_not_adapt_is_run_once():
    cells = plan(AuditSettings(defences=("prune",), attacks=("representations",), adaptive=True, rounds=0))
    assert [cell.adaptive for cell in cells] == [False, False]
