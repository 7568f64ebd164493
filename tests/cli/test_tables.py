"""The tables of an audit: at most 100 characters wide and 8 columns, with every value whole."""

import io
import re

import pytest
from rich.console import Console

from gradveil.cli.tables import MOST, WIDTH, audit_table, membership_table
from gradveil.metrics import schema_of
from gradveil.report.summary import membership, summarise, utility, with_costs
from tests.report.folders import privacy_row, utility_row

DEFENCES = ["none", "prune:fraction=0.9,scope=global+dp-sgd:noise_multiplier=1.1,clip_norm=0.5", "soteria:prune=0.6"]
ATTACKS = ["gs:iterations=4000,tv=1e-4,restarts=8", "gs:iterations=100", "dlg"]


def rows():
    for defence in DEFENCES:
        yield utility_row(defence, 0.9691, epsilon=12.3456, delta=1e-5, overhead=12.5)
        for attack in ATTACKS:
            for adaptive in (False, True):
                figures = {"psnr": 100.0, "ssim": 0.93, "guessed": 0.25, "epsilon": 1.0, "delta": 1e-5}
                yield privacy_row(defence, attack, adaptive=adaptive, converged=False, **figures)
        yield {"kind": "membership", "defence": defence, "attack": "boundary:queries=1000", "auc": 0.98765,
               "tpr_at_1_fpr": 0.25, "auc_loss": 0.51, "accuracy_members": 1.0,
               "accuracy_non_members": 0.9}  # fmt: skip


def printed(table):
    stream = io.StringIO()
    for column in table.columns:
        column.overflow = "fold"
    Console(file=stream, width=WIDTH, markup=False).print(table)
    return stream.getvalue()


def texts(output):
    """Return the text of each column, all lines of it joined without blanks."""
    lines = [re.split("[┃│]", line)[1:-1] for line in output.splitlines() if line[:1] in ("┃", "│")]
    return ["".join(cell.replace(" ", "") for cell in column) for column in zip(*lines, strict=True)]


@pytest.fixture(params=["attacks", "membership"])
def made(request):
    found, schema = list(rows()), schema_of()
    if request.param == "membership":
        lines = membership(found, schema)
        return membership_table("lenet-dlg on mnist-5k: membership", lines, schema), lines
    lines = with_costs(summarise(found, schema), utility(found, schema), schema)
    return audit_table("lenet-dlg on mnist-5k", lines, schema), lines


def test_a_table_fits_and_nothing_is_cut(made):
    table, lines = made
    output = printed(table)
    assert 6 <= len(table.columns) <= MOST
    assert max(map(len, output.splitlines())) <= WIDTH
    assert all(line[-1] in "┓┃┩│┘" for line in output.splitlines()[1:] if line)
    assert "…" not in output
    defences, attacks, *_ = texts(output)
    assert defences == "Defence" + "".join(line["defence"] for line in lines)
    assert attacks.startswith("Attack")


def test_figures_are_not_broken_into_lines(made):
    table, _ = made
    for column in table.columns[2:]:
        for cell in column.cells:
            assert cell in printed(table)


def test_the_table_of_attacks_names_what_matters():
    found, schema = list(rows()), schema_of()
    lines = with_costs(summarise(found, schema), utility(found, schema), schema)
    heads = [column.header for column in audit_table("", lines, schema).columns]
    assert heads == ["Defence", "Attack", "Attacker", "Recognisable", "PSNR, dB", "Guessed",
                     "Attack did not converge", "Accuracy"]  # fmt: skip
    whole = [line | {"guessed": 1.0} for line in lines]
    assert audit_table("", whole, schema).columns[-1].header == "ε of the training"


def test_settings_of_an_attack_are_shown_only_if_two_attacks_have_the_same_name():
    lines = with_costs(summarise(rows()), utility(rows()), schema_of())
    attacks = [cell.replace("\n", "") for cell in audit_table("", lines, schema_of()).columns[1].cells]
    assert attacks[0::2][:3] == [ATTACKS[0], ATTACKS[1], "dlg"]
