"""Claims of LODA, judged on rows made by hand."""

import pytest

from gradveil.reproduce.claims import KNOWING, TooLittle, claims_of

CLAIMS = {claim.id: claim for claim in claims_of("loda")}


def test_lines_of_both_attackers_are_the_papers_own():
    assert CLAIMS["2-Mixup k=4"].attacker == KNOWING
    assert not any(claim.ours for claim in CLAIMS.values())
    assert CLAIMS["2-Mixup k=4"].paper == "29.23 dB"


def test_defences_are_compared():
    rows = [{"defence": name, "psnr": psnr, "accuracy": accuracy} for name, psnr, accuracy in (
        ("no defence", 20.0, 0.9), ("LODA_1", 6.0, 0.8), ("GradPruning p=0.9", 11.0, 0.88), ("InstaHide k=4", 9.0, 0.7),
    )]  # fmt: skip
    assert CLAIMS["1-pruning"].measure(rows) == 5
    assert CLAIMS["1-loda"].measure(rows) == 3
    assert CLAIMS["1-LODA_1"].measure(rows) == pytest.approx(0.23)
    assert CLAIMS["1-LODA_1-accuracy"].measure(rows) == pytest.approx(10)
    with pytest.raises(TooLittle):
        CLAIMS["1-LODA_1-accuracy"].measure([{**row, "accuracy": 0.2} for row in rows])


def test_the_trade_off_goes_from_the_smallest_to_the_largest_weight():
    rows = [{"c": c, "accuracy": accuracy, "psnr": psnr} for c, accuracy, psnr in ((50, 0.6, 5.0), (10, 0.9, 7.0))]
    assert CLAIMS["5-accuracy"].measure(rows) == pytest.approx(0.3)
    assert CLAIMS["5-psnr"].measure(rows) == 2
    with pytest.raises(TooLittle, match="one value of c"):
        CLAIMS["5-psnr"].measure(rows[:1])


def test_every_network_counts():
    rows = [{"data": "CIFAR10", "a": 0.9, "b": 0.8, "paper": ""}, {"data": "LODA_2", "a": 0.85, "b": 0.7, "paper": ""}]
    assert CLAIMS["7"].measure(rows) == pytest.approx(10)


def test_an_attack_that_fails_without_defence_decides_nothing():
    rows = [{"defence": name, "psnr": 9.0} for name in ("no defence", "LODA_1", "InstaHide k=4")]
    with pytest.raises(TooLittle, match="without defence the attack reaches"):
        CLAIMS["1-loda"].measure(rows)
