"""Claims of DCS2, judged on rows made by hand."""

import pytest

from gradveil.reproduce.claims import TooLittle, claims_of, judge

CLAIMS = {claim.id: claim for claim in claims_of("dcs2")}


def row(name, psnr, attacker="plain", accuracy=0.9, **more):
    defence = "none" if name == "None" else name.lower()
    return {"dataset": "MNIST", "paper_name": name, "defence": defence, "attacker": attacker, "psnr": psnr,
            "accuracy": accuracy if attacker == "plain" else None, "accuracy_sensitive": accuracy, **more}  # fmt: skip


ROWS = [row("None", 50.0), row("DP-Gaussian", 30.0), row("Prune", 14.0), row("Soteria", 10.0),
        row("DCS2", 8.0, accuracy=0.885), row("DCS2", 12.0, "knows it"), row("DCS2", 25.0, "searches both"),
        row("Soteria", 20.0, "knows it"), row("Prune", 15.0, "knows it"),
        row("DP-Gaussian", 31.0, "knows it")]  # fmt: skip


def test_the_best_baseline_and_the_strongest_attacker_count():
    runs = [{"scale": "small", "seed": 0, "rows": ROWS}]
    plain, knowing = (judge("dcs2", CLAIMS[name], runs) for name in ("1-mnist-best", "1-mnist-best-known"))
    assert (plain.verdict, plain.ours) == ("holds", "dB below the best baseline: 2")
    assert (knowing.verdict, knowing.ours) == ("fails", "dB below the best baseline: -10")


def test_points_of_accuracy():
    assert CLAIMS["1-mnist-accuracy"].measure(ROWS) == pytest.approx(1.5)


def test_entries_are_compared_by_the_authors_metric():
    rows = [row("DCS2", 8.0, ssim=0.4, ssim_authors=0.2)]
    assert CLAIMS["1-mnist-DCS2-ssim"].measure(rows) == pytest.approx(0.03)


def test_a_combination_is_compared_with_the_better_of_both():
    assert CLAIMS["7-combined"].measure([row("Prune", 14.0), row("DCS2", 8.0), row("Prune & DCS2", 9.0)]) == -1


def test_an_attack_that_fails_without_defence_decides_nothing():
    with pytest.raises(TooLittle, match="without defence the attack reaches"):
        CLAIMS["1-mnist-best"].measure([{**one, "psnr": 8.0} for one in ROWS])
