"""Claims of FedKL, judged on rows made by hand."""

import pytest

from gradveil.reproduce.claims import TooLittle, claims_of, judge
from gradveil.reproduce.fedkl import DEFENCE

CLAIMS = {claim.id: claim for claim in claims_of("fedkl")}


def test_points_are_lost_in_the_best_round():
    rows = [{"task": "LeNet MNIST", "training": "federated", "defence": defence, "best_round": best, "accuracy": 1.0}
            for defence, best in (("none", 98.0), (DEFENCE, 97.5))]  # fmt: skip
    assert CLAIMS["1-LeNet MNIST-federated"].measure(rows) == pytest.approx(0.5)
    with pytest.raises(TooLittle):
        CLAIMS["1-LeNet MNIST-centralised"].measure(rows)


def test_the_attacker_who_searches_scales_is_judged_apart():
    same = {"dataset": "mnist-5k", "attack": "grnn:iterations=9"}
    rows = [{**same, "defence": defence, "ssim": ssim} for defence, ssim in (
        ("none", 1.0), ("FedKL", 0.1), ("FedKL, lock within 0.5", 0.2), ("FedKL, scales searched", 0.9),
    )]  # fmt: skip
    runs = [{"scale": "small", "seed": 0, "rows": rows}]
    verdicts = [
        judge("fedkl", CLAIMS[f"6-grnn-mnist-{name}"], runs).verdict for name in ("plain", "locked", "locked-known")
    ]
    assert verdicts == ["holds", "holds", "fails"]


def test_a_key_is_told_from_random_ones_and_the_lock_has_a_share():
    rows = [{"task": "LeNet MNIST", "defence": DEFENCE, "key": key, "gap": gap, "lock_proportion": "16.62 %"}
            for key, gap in (("average", 80.0), ("random", 0.0))]  # fmt: skip
    assert CLAIMS["3-LeNet MNIST"].measure(rows) == 80
    assert CLAIMS["3-share-LeNet MNIST"].measure(rows) == pytest.approx(22.43 - 16.62)


def test_an_attack_that_fails_without_lock_decides_nothing():
    rows = [{"dataset": "mnist", "attack": "grnn", "defence": name, "ssim": 0.1} for name in ("none", "FedKL")]
    with pytest.raises(TooLittle, match="without defence the attack reaches"):
        CLAIMS["6-grnn-mnist-locked"].measure(rows)
    assert CLAIMS["6-grnn-mnist-plain"].measure(rows) == 0.1
