import pytest

from gradveil.metrics.roc import FALSE_RATES
from gradveil.report.audit_folder import clean
from gradveil.report.headline import headline
from gradveil.report.membership import membership_figure, membership_section
from gradveil.report.summary import membership, summarise
from tests.report.folders import privacy_row, utility_row


def row(defence="none", **more):
    return clean(
        {
            "kind": "membership", "defence": defence, "attack": "boundary", "seed": 0, "round": 5, "client": 3,
            "auc": 0.55, "tpr_at_1_fpr": 0.02, "advantage": 0.1, "auc_loss": 0.57, "auc_confidence": 0.56,
            "members": 400, "non_members": 400, "queries": 1000, "accuracy_members": 0.99,
            "accuracy_non_members": 0.96, "knows": [], "seconds": 60.0, "why": "", "failed": False, "cell": "m",
        }
        | more
    )  # fmt: skip


def test_a_line_has_means_over_rounds_the_worst_and_the_gap():
    lines = membership([row(), row(round=10, auc=0.65), row(failed=True, auc=None), row("prune"), privacy_row()])
    assert [line["defence"] for line in lines] == ["none", "prune"]
    assert (lines[0]["n"], lines[0]["failed"]) == (2, 1)
    assert lines[0]["auc"] == pytest.approx(0.6)
    assert lines[0]["auc_worst"] == 0.65
    assert lines[0]["gap"] == pytest.approx(0.03)


def test_membership_rows_are_separate_from_image_rows():
    assert summarise([row()]) == []


def test_the_headline_mentions_membership_only_if_it_was_tried():
    said = "Members are told from others with an AUC of 0.550 undefended, 0.510 under prune, where 0.5 is guessing."
    assert headline([row(), row("prune", auc=0.51)]) == said
    assert headline([privacy_row(), row(), row("prune", auc=0.51)]).endswith(said)
    assert "AUC" not in headline([privacy_row()])
    assert headline([row(failed=True, auc=None)]) == "No attack has finished yet."


def test_of_many_defences_the_headline_names_the_best_and_the_worst():
    rows = [row(), *(row(name, auc=0.5 + 0.01 * number) for number, name in enumerate("abcde"))]
    text = headline(rows)
    assert "0.550 undefended, 0.500 under a, 0.540 under e (of 5 defences the best and the worst)" in text


def test_the_section_escapes_texts_and_shows_missing_values_as_dashes():
    page = membership_section([row("<b>", auc=None, accuracy_members=None)])
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "<td>–</td>" in page
    assert membership_section([privacy_row()]) == ""


def test_the_section_states_the_price_and_whether_there_was_a_second_run():
    rows = [row(), clean(utility_row(accuracy=0.912, overhead=1.25))]
    page = membership_section(rows)
    assert "<td>91.2 %</td><td>1.25×</td>" in page
    assert "no second run" not in page
    assert "no second run" in membership_section(rows, adaptive=True)


def test_the_figure_has_a_line_for_each_defence():
    low, high = ([rate * step for rate in FALSE_RATES] for step in (0.5, 1.0))
    rows = [row(roc=low), row(round=10, roc=high), row("prune"), privacy_row()]
    curves, areas = membership_figure(rows).axes
    assert [line.get_label() for line in areas.lines[1:]] == ["none, boundary", "prune, boundary"]
    (roc,) = curves.lines[1:]  # prune has none
    assert roc.get_ydata() == pytest.approx([0.75 * rate for rate in FALSE_RATES[1:]])


def test_long_names_are_shortened_in_the_figure():
    rows = [row("+".join(["prune:fraction=0.123"] * 30), attack="folder/" * 40 + "mine.py:Mine")]
    membership_figure(rows).canvas.draw()  # matplotlib warns, which is an error here, if the axes have no room


@pytest.mark.parametrize("roc", [None, "text", [0.5], [None] * len(FALSE_RATES)])
def test_invalid_curves_are_ignored(roc):
    assert row(roc=roc)["roc"] is None
