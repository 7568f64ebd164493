"""Verdicts are computed from rows by a stated rule, and every claim of every paper can be judged."""

import pytest

from gradveil.reproduce import papers
from gradveil.reproduce.base import SCALES
from gradveil.reproduce.claims import (
    FAILS,
    HOLDS,
    KNOWING,
    NOT_RUN,
    PLAIN,
    UNDECIDED,
    Claim,
    Contradicted,
    TooLittle,
    against_both,
    claims_of,
    judge,
    learned,
    mean_of,
    where,
)

CLAIMS = [(name, claim) for name in papers() for claim in claims_of(name)]


def value(rows):
    return rows[0]["x"]


CLAIM = Claim("id", "Table 1", "x is about 1", "1", "1", value, "x", at_least=0.9, at_most=1.1, seeds=2)


def runs(*values, scale="small"):
    return [{"scale": scale, "seed": seed, "rows": [{"x": value}]} for seed, value in enumerate(values)]


@pytest.mark.parametrize(
    ("given", "verdict", "why"),
    [
        (runs(1.0, 0.9), HOLDS, "at least 0.9 and at most 1.1"),
        (runs(2.0, 0.1), FAILS, "at least 0.9"),
        (runs(1.0, 2.0), UNDECIDED, "seeds disagree"),
        (runs(1.0), UNDECIDED, "needs 2 seeds"),
        (runs(1.0, 1.0, scale="smoke"), UNDECIDED, "needs scale small"),
        (runs(1.0, 1.0, scale="full"), HOLDS, ""),
        (runs(9.0, 9.0, scale="smoke") + runs(1.0, 1.0), HOLDS, ""),
        ([], NOT_RUN, "gradveil reproduce soteria --table 1 --scale small"),
    ],
)
def test_a_verdict_follows_from_the_figures_of_all_seeds(given, verdict, why):
    found = judge("soteria", CLAIM, given)
    assert found.verdict == verdict
    assert why in found.why
    assert found.why


def test_rows_that_cannot_decide_give_a_reason_and_missing_things_fail():
    def raising(error):
        def measure(rows):
            raise error

        return Claim("id", "Table 1", "x", "", "1", measure, "x", at_least=0)

    found = judge("soteria", raising(TooLittle("nothing learned")), runs(1.0))
    assert (found.verdict, found.why) == (UNDECIDED, "nothing learned")
    found = judge("soteria", raising(Contradicted("no setting hides it")), runs(1.0))
    assert found.verdict == FAILS
    assert "no setting hides it" in found.why


def test_the_mean_and_the_spread_over_seeds_are_shown():
    assert judge("soteria", CLAIM, runs(1.0, 0.9)).ours == "x: 0.95 (0.9 to 1)"
    assert judge("soteria", CLAIM, runs(1.0)).ours == "x: 1"


def test_a_claim_about_attacks_is_judged_on_the_rows_of_each_attacker_apart():
    rows = [{"defence": d, "adaptive": a, "x": x} for d, a, x in (("none", 0, 1), ("s", 0, 2), ("s", 1, 3))]
    seen = []
    claim = Claim("id", "w", "s", table="1", measure=lambda rows: seen.append([row["x"] for row in rows]) or 0.0)
    plain, knowing = against_both(claim, lambda row: bool(row["adaptive"]))
    assert (plain.attacker, knowing.attacker) == (PLAIN, KNOWING)
    plain.measure(rows)
    knowing.measure(rows)
    assert seen == [[1, 2], [1, 3]]


@pytest.mark.parametrize(("paper", "claim"), CLAIMS, ids=lambda one: getattr(one, "id", one))
def test_every_claim_can_be_judged_or_says_why_not(paper, claim):
    assert claim.where
    assert claim.says
    assert claim.scale in SCALES
    if claim.measure is None:
        assert claim.why
        assert not claim.table
    else:
        assert claim.table in papers()[paper].experiments
        assert claim.figure
        assert claim.range
        assert not claim.why


def test_claims_of_a_paper_have_different_names():
    assert len({(paper, claim.id) for paper, claim in CLAIMS}) == len(CLAIMS)


def test_words_for_measures():
    rows = [{"defence": "none", "accuracy": 0.5}, {"defence": "prune:fraction=0.4", "accuracy": None}]
    assert where(rows, defence="prune") == rows[1:]
    assert learned(rows, 0.5) == 0.5
    with pytest.raises(TooLittle, match=r"reaches 0\.5 only"):
        learned(rows, 0.6)
    with pytest.raises(TooLittle, match="no accuracy of prune"):
        mean_of(rows, "accuracy", defence="prune")
