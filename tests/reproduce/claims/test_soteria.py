"""Soteria's claims, judged on rows made by hand."""

import pytest

from gradveil.reproduce.claims import Contradicted, TooLittle, claims_of, judge

CLAIMS = {claim.id: claim for claim in claims_of("soteria")}


def line(defence, mse, accuracy, adaptive=False):
    return {"dataset": "mnist", "defence": defence, "attack": "gs", "adaptive": adaptive, "mse": mse,
            "accuracy": accuracy}  # fmt: skip


NONE = line("none", 0.001, 0.95)


def test_as_in_the_paper_soteria_hides_without_loss_and_noise_does_not():
    rows = [NONE, line("soteria:prune=0.4", 0.3, 0.95), line("gaussian:std=0.1", 0.2, 0.85),
            line("gaussian:std=0.01", 0.01, 0.95)]  # fmt: skip
    assert CLAIMS["5-hidden"].measure(rows) == pytest.approx(0)
    assert CLAIMS["5-baselines"].measure(rows) == pytest.approx(0.1)
    assert CLAIMS["5-times"].measure(rows) == pytest.approx(30)


def test_the_most_successful_attack_decides_whether_images_are_hidden():
    rows = [NONE, line("soteria:prune=0.4", 0.3, 0.95), line("soteria:prune=0.4", 0.01, 0.95)]
    with pytest.raises(Contradicted, match="no setting of soteria hides"):
        CLAIMS["5-hidden"].measure(rows)


def test_attackers_who_know_the_defence_are_judged_apart():
    rows = [NONE, line("soteria:prune=0.4", 0.3, 0.95), line("soteria:prune=0.4", 0.001, 0.95, adaptive=True)]
    seeds = [{"scale": "small", "seed": seed, "rows": rows} for seed in range(3)]
    assert judge("soteria", CLAIMS["5-hidden"], seeds).verdict == "holds"
    assert judge("soteria", CLAIMS["5-hidden-known"], seeds).verdict == "fails"


def test_a_training_that_learned_nothing_decides_nothing():
    with pytest.raises(TooLittle, match=r"reaches 0\.2 only"):
        CLAIMS["5-times"].measure([line("none", 0.1, 0.2), line("soteria:prune=0.4", 0.3, 0.2)])


def test_rates_are_compared_one_by_one():
    rows = [{"defence": name, "adaptive": False, "mse": mse, "recognisable": seen} for name, mse, seen in (
        ("none", 0.001, "8 of 8"),
        ("soteria:prune=0.5", 0.4, "0 of 8"), ("prune:fraction=0.5", 0.2, "8 of 8"),
        ("soteria:prune=0.8", 0.3, "1 of 8"), ("prune:fraction=0.8", 0.6, "7 of 8"),
    )]  # fmt: skip
    assert CLAIMS["6-rate"].measure(rows) == pytest.approx(0.5)
    assert CLAIMS["6-soteria"].measure(rows) == 0
    assert CLAIMS["6-prune"].measure(rows) == pytest.approx(7 / 8)


def test_an_attack_that_fails_without_defence_decides_nothing():
    weak = {"defence": "none", "adaptive": False, "mse": 0.06, "recognisable": "0 of 8"}
    rows = [weak, {**weak, "defence": "soteria:prune=0.5"}, {**weak, "defence": "prune:fraction=0.5"}]
    for name in ("6-rate", "6-soteria"):
        with pytest.raises(TooLittle, match="without defence the attack reaches"):
            CLAIMS[name].measure(rows)


def test_the_correlations_of_table_1():
    names = ("E=1, B=32", "E=5, B=32", "E=10, B=32", "E=1, B=8", "E=1, B=16", "E=1, B=32 (IID)")
    values = (
        "0.9 / 0.99 / 0.99",
        "0.8 / 0.9 / 0.9",
        "0.7 / 0.85 / 0.8",
        "0.9 / 0.9 / 1",
        "0.9 / 0.9 / 0.9",
        "0 / 0 / 0",
    )
    rows = [{"training": name, "elements": value, "elements_other_class": "0.5 / 0.9 / 0.9", "classes_exact": "98%"}
            for name, value in zip(names, values, strict=True)]  # fmt: skip
    assert CLAIMS["1-1"].measure(rows) == pytest.approx(0.08)
    assert CLAIMS["1-epochs"].measure(rows) == pytest.approx(0.05)
    assert CLAIMS["1-batches"].measure(rows) == pytest.approx(-0.01)
    assert CLAIMS["1-iid"].measure(rows) == pytest.approx(0.9)
    assert CLAIMS["1-high"].measure(rows) == pytest.approx(12 / 15)
    assert CLAIMS["1-specific"].measure(rows) == pytest.approx(0.4)
    assert CLAIMS["1-classes"].measure(rows) == pytest.approx(0.98)
