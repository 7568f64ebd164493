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


MAE = '''
from dataclasses import dataclass
from gradveil.metrics import Metric

@dataclass(frozen=True)
class Mae(Metric):
    """Mean absolute error."""

    higher_is_leakier = False

    def measure(self, truth, guess):
        return (truth - guess).abs().flatten(1).mean(1)
'''


def test_ones_own_metric_comes_first_and_empty_columns_are_left_out(tmp_path):
    (tmp_path / "mae.py").write_text(MAE)
    schema = schema_of(["psnr", "rmse", "lpips-vgg", f"{tmp_path}/mae.py:Mae"])
    figures = {"psnr": 20.0, "ssim": None, "guessed": 1.0, "identified": 0.5, "converged": True}
    figures |= {"rmse": 0.1, "lpips_vgg": 0.2, "mae": 0.3}
    found = [privacy_row("none", "gs", **figures), utility_row("none", 0.9)]
    lines = with_costs(summarise(found, schema), utility(found, schema), schema)
    heads = [column.header for column in audit_table("", lines, schema).columns]
    assert heads == ["Defence", "Attack", "Attacker", "mae", "RMSE", "PSNR, dB", "Attack did not converge", "Accuracy"]
    flagged = [line | {"flags": ["a reason"]} for line in lines]
    assert list(audit_table("", flagged, schema).columns[5].cells) == ["20.00 !"]


def test_a_failed_attack_is_shown_as_failed():
    found = [privacy_row("none", "gs", psnr=20.0, ssim=0.9), privacy_row("prune", "gs", failed=True, psnr=None)]
    lines = with_costs(summarise(found), utility(found), schema_of())
    output = printed(audit_table("", lines, schema_of()))
    assert "failed" in output
    assert "0 of 0" not in output


def test_a_failed_attack_does_not_keep_a_column_that_is_empty_otherwise():
    schema = schema_of(["psnr"])
    found = [privacy_row("none", "gs", psnr=20.0, ssim=None), privacy_row("prune", "gs", failed=True, psnr=None)]
    lines = with_costs(summarise(found, schema), utility(found, schema), schema)
    columns = {column.header: list(column.cells) for column in audit_table("", lines, schema).columns}
    assert "Recognisable" not in columns
    assert columns["PSNR, dB"] == ["20.00", "failed"]
    assert "recognisable" not in [column.key for column in schema.used(lines, "summary")]


def test_ones_own_files_are_shown_without_their_folder_unless_two_have_the_same_name():
    def cells(*defences):
        found = [privacy_row(name, "gs", psnr=20.0, ssim=0.9) for name in defences]
        lines = with_costs(summarise(found), utility(found), schema_of())
        assert [line["defence"] for line in lines] == [*defences]
        return [cell.replace("\n", "") for cell in audit_table("", lines, schema_of()).columns[0].cells]

    assert cells("/a/b/top_k.py:TopK:keep=0.05+clip") == ["top_k.py:TopK:keep=0.05+clip"]
    twice = ["/a/top_k.py:TopK", "/b/top_k.py:TopK"]
    assert cells(*twice) == twice


def test_a_long_setting_is_broken_behind_its_equals_sign():
    name = "prune:where=gradient+dp-sgd:noise_multiplier=1.1,clip_norm=0.5+soteria:prune=0.6"
    found = [privacy_row(name, "gs:iterations=4000", psnr=20.0, ssim=0.9, guessed=0.5)]
    found += [privacy_row(name, "gs:iterations=100", psnr=20.0, ssim=0.9, guessed=0.5), utility_row(name, 0.9)]
    lines = with_costs(summarise(found), utility(found), schema_of())
    table = audit_table("", lines, schema_of())
    for cell in table.columns[0].cells:
        pieces = cell.split("\n")
        assert all(piece[-1] in ":,+=_" for piece in pieces[:-1])
        assert max(map(len, pieces)) <= table.columns[0].width
