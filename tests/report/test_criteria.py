"""Criteria: one parser and one judgement for verdicts, exit codes and privacy cards."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.errors import ConfigError, UnknownNameError
from gradveil.metrics import schema_of
from gradveil.report.criteria import fields_of, judge_rows, judged, parse_criteria

KNOWN = {"identified", "blind_identified", "psnr", "blind_psnr", "accuracy", "epsilon"}
OPERATORS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@given(
    st.sampled_from(list(OPERATORS)),
    st.floats(0, 100).map(lambda number: round(number, 3)),
    st.floats(-10, 110).map(lambda number: round(number, 3)),
)
def test_a_criterion_compares_as_it_is_written(sign, number, value):
    (criterion,) = parse_criteria(f"psnr {sign} {number}", KNOWN)
    assert criterion.met_by({"psnr": value}) == OPERATORS[sign](value, number)


@pytest.mark.parametrize(
    ("text", "line", "met"),
    [
        ("psnr>blind+1", {"psnr": 17.0, "blind_psnr": 15.5}, True),
        ("psnr > blind + 2", {"psnr": 17.0, "blind_psnr": 15.5}, False),
        ("psnr>blind-1", {"psnr": 15.0, "blind_psnr": 15.5}, True),
        ("identified>blind", {"identified": 0.02, "blind_identified": 0.01}, True),
        ("psnr>blind+1", {"psnr": 17.0, "blind_psnr": None}, None),
        ("epsilon>1e1", {"epsilon": 10.5}, True),
        ("epsilon>8", {"epsilon": None}, None),
        ("psnr<20", {"psnr": float("nan")}, None),
        ("PSNR>20", {"psnr": 21.0}, True),
    ],
)
def test_the_blind_guess_and_missing_values(text, line, met):
    (criterion,) = parse_criteria(text, KNOWN)
    assert criterion.met_by(line) is met


@pytest.mark.parametrize(
    "text",
    ["psnr", "psnr>", ">3", "psnr=3", "psnr>3 dB", "psnr>1.2.3", "", "psnr>3,,", "psnr>blnd+1", "psnr>blind 1",
     "psnr>blind20", "psnr>1e999", "identified>1%", "epsilon>blind+1"],
)  # fmt: skip
def test_what_is_no_criterion_is_refused(text):
    with pytest.raises(ConfigError, match="A criterion must"):
        parse_criteria(text, KNOWN)


def test_an_unknown_field_is_refused_with_a_suggestion():
    with pytest.raises(UnknownNameError, match="Did you mean 'identified'"):
        parse_criteria("identifed>0.01", KNOWN)


def test_the_fields_are_those_of_the_lines():
    fields = fields_of(schema_of())
    assert {"identified", "psnr", "ssim", "recognisable", "epsilon", "accuracy", "points_lost", "auc"} <= set(fields)
    assert "knows" not in fields
    assert "attacker_loss" in fields_of(schema_of(), ("attack",))


def line(defence, **values):
    return {"defence": defence, "attack": "gs", "adaptive": False, **values}


def test_undefended_lines_count_only_alone():
    (criterion,) = parse_criteria("identified>0.01", KNOWN)
    none, defended = line("none", identified=1.0), line("prune", identified=0.0)
    (alone,) = judged([criterion], {"summary": [none]}, schema_of())
    (both,) = judged([criterion], {"summary": [none, defended]}, schema_of())
    assert (alone.met, both.met) == (True, False)
    assert both.sentence == "identified>0.01 is not met: 0 under prune, gs."


def test_the_worst_line_decides_and_gaps_are_told():
    (criterion,) = parse_criteria("psnr>20", KNOWN)
    lines = [line("prune", psnr=10.0), line("prune", psnr=30.0) | {"adaptive": True}, line("prune", psnr=None)]
    (verdict,) = judged([criterion], {"summary": lines}, schema_of())
    assert verdict.met
    assert verdict.reason == "30 under prune, gs with knowledge of the defence; 1 lines have no value"
    (nothing,) = judged([criterion], {"summary": lines[2:]}, schema_of())
    assert nothing.met is None
    assert "not measured" in nothing.sentence


def test_a_defence_without_any_value_is_not_passed_over():
    (criterion,) = parse_criteria("epsilon>8", fields_of(schema_of()))
    costs = [{"defence": "none", "epsilon": None}, {"defence": "dp-sgd", "epsilon": 2.0}]
    without = {"defence": "prune", "epsilon": None}
    (private,) = judged([criterion], {"summary": [], "costs": costs}, schema_of())
    (mixed,) = judged([criterion], {"costs": [*costs, without]}, schema_of())
    (leaking,) = judged([criterion], {"costs": [{"defence": "dp-sgd", "epsilon": 9.0}, without]}, schema_of())
    assert (private.met, mixed.met, leaking.met) == (False, None, True)
    assert mixed.reason == "no line under prune has epsilon"


def test_a_criterion_of_files_has_no_blind_guess():
    fields = fields_of(schema_of(), ("attack",))
    with pytest.raises(ConfigError, match="Compare with a number"):
        parse_criteria("psnr>blind+1", fields)


def test_costs_are_judged_by_their_own_lines():
    (criterion,) = parse_criteria("accuracy<0.9", fields_of(schema_of()))
    costs = [{"defence": "none", "accuracy": 0.5}, {"defence": "prune", "accuracy": 0.95}]
    (verdict,) = judged([criterion], {"summary": [line("prune", psnr=1.0)], "costs": costs}, schema_of())
    assert (verdict.met, verdict.reason) == (False, "0.95 under prune")


def test_rows_of_an_attack_are_judged_one_by_one():
    (criterion,) = parse_criteria("psnr>20", KNOWN)
    (verdict,) = judge_rows([criterion], [line("unknown", psnr=19.0), line("unknown", psnr=21.0)])
    assert verdict.met
