"""Lines, intervals and the headline, each compared with a value by hand or another library."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from gradveil.metrics import schema_of
from gradveil.report.audit import headline, summarise, utility
from gradveil.report.headline import sentences
from gradveil.report.plane import points
from gradveil.report.sections import plane_section
from gradveil.report.summary import interval, strongest, with_costs

from .folders import privacy_row, utility_row


def rows_of(defence, ssims, **more):
    return [privacy_row(defence, target=n, ssim=ssim, **more) for n, ssim in enumerate(ssims)]


def test_a_line_by_hand():
    rows = [
        privacy_row(seed=0, target=0, psnr=10.0, ssim=0.5, label_accuracy=1.0, seconds=1.0),
        privacy_row(seed=0, target=1, psnr=30.0, ssim=0.49, label_accuracy=0.0, seconds=3.0, converged=False),
        privacy_row(seed=1, target=0, psnr=24.0, ssim=0.9, knows=["labels", "defence"], epsilon=2.0, delta=1e-5),
        privacy_row(seed=1, target=1, psnr=None, ssim=None, converged=False, epsilon=3.0, delta=1e-6, seconds=None),
        privacy_row(seed=2, psnr=None, failed=True, why="it broke"),
    ]
    (line,) = summarise(rows)
    assert (line["n"], line["seeds"], line["failed"]) == (4, 2, 1)
    assert line["psnr"] == (20 + 24) / 2
    assert line["psnr_worst"] == 30
    assert line["recognisable"] == 2
    assert line["ssim"] == pytest.approx((0.5 + 0.49 + 0.9) / 3)
    assert line["lpips"] is None
    assert line["not_converged"] == 2
    assert (line["epsilon"], line["delta"]) == (3.0, 1e-6)
    assert line["knows"] == ["labels", "defence"]
    assert line["seconds"] == pytest.approx((1 + 3 + 1.5) / 3)
    low, high = scipy.stats.t.interval(0.95, 1, 22, scipy.stats.sem([20, 24]))
    assert (line["psnr_low"], line["psnr_high"]) == pytest.approx((low, high))


def test_lines_keep_plain_and_adaptive_and_attacks_apart_in_their_order():
    rows = [privacy_row("b", "y"), privacy_row("a", "x", adaptive=True), privacy_row("a", "x"), utility_row("a")]
    lines = summarise([*rows, *rows])
    assert [(x["defence"], x["attack"], x["adaptive"]) for x in lines] == [
        ("b", "y", False),
        ("a", "x", True),
        ("a", "x", False),
    ]


def test_one_seed_has_no_interval():
    (line,) = summarise(rows_of("none", [0.1, 0.2, 0.3]))
    assert line["psnr_low"] is line["psnr_high"] is None


@given(st.lists(st.floats(0, 100), min_size=2, max_size=9))
def test_the_interval_is_that_of_scipy(values):
    low, high = interval(values)
    if np.std(values) < 1e-9:
        assert low == pytest.approx(high, abs=1e-6)
    else:
        expected = scipy.stats.t.interval(0.95, len(values) - 1, np.mean(values), scipy.stats.sem(values))
        assert (low, high) == pytest.approx(expected, abs=1e-9)


def test_recognisable_is_unknown_without_ssim_and_zero_without_a_guess():
    assert summarise([privacy_row(ssim=None)])[0]["recognisable"] is None
    assert summarise([privacy_row(ssim=None, psnr=None)])[0]["recognisable"] == 0


def test_utility_is_the_mean_over_seeds():
    rows = [
        utility_row("a", 0.9, seed=0, overhead=2.0, epsilon=1.0, delta=1e-5),
        utility_row("a", 0.8, seed=1, overhead=4.0, epsilon=1.5, delta=1e-5, accuracy_sensitive=0.5),
        utility_row("a", None, seed=2, failed=True, why="diverged"),
        utility_row("b", None, failed=True, why="no memory"),
        privacy_row("a"),
    ]
    a, b = utility(rows)
    assert (a["accuracy"], a["overhead"], a["accuracy_sensitive"], a["epsilon"]) == pytest.approx((0.85, 3, 0.5, 1.5))
    assert a["why"] == "diverged"
    assert (b["defence"], b["accuracy"], b["why"]) == ("b", None, "no memory")


def test_points_lost_are_differences_of_the_same_seeds_with_their_interval():
    """By hand: 2, 4 and 6 points, mean 4, s = 2, t = 4.303, so 4 ± 4.968; a seed without its pair does not count."""
    none = [utility_row("none", share, seed=seed) for seed, share in enumerate((0.9, 0.8, 0.7))]
    ours = [utility_row("a", share, seed=seed) for seed, share in enumerate((0.88, 0.76, 0.64, 0.1))]
    undefended, a = utility([*none, *ours])
    assert a["points_lost"] == pytest.approx(4)
    assert (a["points_lost_low"], a["points_lost_high"]) == pytest.approx((4 - 4.9683, 4 + 4.9683), abs=1e-3)
    assert undefended["points_lost"] is None
    (line,) = with_costs(summarise([privacy_row("a")]), [a], schema_of())
    column = schema_of().column("price", "points_lost")
    assert column.text(line) == "4.0 [-1.0, 9.0]"
    assert column.text(utility([none[0], ours[0]])[1]) == "2.0 (1 seed)"


def test_overhead_is_the_ratio_of_the_times_beside_it():
    """One clock: of 2 and 107 seconds against 1 and 3.74, the line's overhead is that of its own two means."""
    rows = [
        utility_row("a", 0.9, seed=0, round_seconds=2.0, round_seconds_undefended=1.0, overhead=2.0),
        utility_row("a", 0.9, seed=1, round_seconds=107.0, round_seconds_undefended=3.74, overhead=28.61),
    ]
    (line,) = utility(rows)
    assert line["overhead"] == line["round_seconds"] / line["round_seconds_undefended"]
    assert line["overhead"] == pytest.approx(109 / 4.74)


def test_the_headline_says_that_an_accuracy_is_the_share_of_one_class():
    rows = [
        *rows_of("none", [0.9]),
        *rows_of("a", [0.9]),
        utility_row("none", 0.9, accuracy_majority=0.625),
        utility_row("a", 0.625, accuracy_majority=0.625),
    ]
    said = "accuracy falls from 90.0 % to 62.5 %, no more than the most frequent class's share of 62.5 %."
    assert headline(rows).endswith(said)


def test_the_strongest_attack_recovers_most():
    lines = summarise(
        [
            *rows_of("a", [0.9, 0.1], attack="x", psnr=99),
            *rows_of("a", [0.9, 0.9], attack="y", psnr=1),
            *rows_of("a", []),
        ]
    )
    assert strongest(lines)["attack"] == "y"
    assert strongest([]) is None


def test_the_headline_of_the_brief():
    rows = [
        *rows_of("none", [0.9] * 31 + [0.1]),
        *rows_of("none", [0.9] * 2 + [0.1] * 30, attack="dlg"),
        *rows_of("prune:fraction=0.7", [0.6] * 3 + [0.1] * 29),
        *rows_of("prune:fraction=0.7", [0.6] * 20 + [0.1] * 12, adaptive=True),
        utility_row("none", 0.969),
        utility_row("prune:fraction=0.7", 0.951),
    ]
    assert headline(rows) == (
        "Undefended, 31 of 32 pictures are recognisable. Under prune:fraction=0.7 it is 3 of 32, and 20 of 32 once the "
        "attacker knows the defence; accuracy falls from 96.9 % to 95.1 %."
    )


def test_nothing_recovered_is_never_called_safe():
    rows = [*rows_of("none", [0.9]), *rows_of("a", [0.1] * 4, converged=False), *rows_of("a", [0.2] * 4, attack="x")]
    text = headline(rows)
    assert text.endswith("Under a no attack here recovered any of 4 pictures; 4 of 8 attacks did not converge.")
    assert "safe" not in text
    assert headline(rows[1:]).startswith("Under a no attack here recovered")
    assert sentences(rows_of("none", [0.1])) == [
        "Undefended, no attack here recovered any of 1 pictures; 0 of 1 attacks did not converge."
    ]


@pytest.mark.parametrize(
    ("adaptive", "expected"),
    [
        ([0.9, 0.1], "it is 1 of 2, and knowing the defence does not help the attacker (1 of 2)"),
        ([0.1, 0.1], "it is 1 of 2, and knowing the defence does not help the attacker (0 of 2)"),
        ([0.9, 0.9], "it is 1 of 2, and 2 of 2 once the attacker knows the defence"),
    ],
)
def test_what_knowing_the_defence_is_worth(adaptive, expected):
    rows = [*rows_of("none", [0.9]), *rows_of("a", [0.9, 0.1]), *rows_of("a", adaptive, adaptive=True)]
    assert headline(rows).endswith(f"Under a {expected}.")


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ([0.9, 0.1], "it is 1 of 2; decoding what it hides was not tried (unmix needs public-data)"),
        ([0.1, 0.1], "no attack here recovered any of 2 pictures; 0 of 2 attacks did not converge; decoding what it "
         "hides was not tried (unmix needs public-data)"),
        ([], "decoding what it hides was not tried (unmix needs public-data)"),
    ],
)  # fmt: skip
def test_a_decoder_that_did_not_run_gives_no_value_of_knowing_the_defence(plain, expected):
    note = {"adaptive": True, "not_decoded": "unmix needs public-data"}
    rows = [*rows_of("none", [0.9]), *rows_of("a", plain), *rows_of("a", [0.9, 0.1], **note)]
    assert headline(rows).endswith(f"Under a {expected}.")
    decoded = headline([*rows, *rows_of("a", [0.1], adaptive=True)])
    assert "not tried" not in decoded


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([], "1 of 1."),
        ([utility_row("a", 0.5)], "1 of 1; accuracy is 50.0 %."),
        ([utility_row("none", 0.5), utility_row("a", 0.5001)], "1 of 1; accuracy is about the same (50.0 %)."),
        ([utility_row("none", 0.5), utility_row("a", 0.6)], "1 of 1; accuracy rises from 50.0 % to 60.0 %."),
    ],
)
def test_the_price_in_accuracy(costs, expected):
    assert headline([*rows_of("none", [0.9]), *rows_of("a", [0.9]), *costs]).endswith(expected)


def test_the_best_and_the_worst_of_many_defences_are_named():
    rows = [*rows_of("none", [0.9] * 4)]
    for number in range(4):
        rows += rows_of(f"d{number}", [0.9] * number + [0.1] * (4 - number))
    assert sentences(rows)[1:] == [
        "Of 4 defences, d0 leaks least: no attack here recovered any of 4 pictures; 0 of 4 attacks did not converge.",
        "d3 leaks most: it is 3 of 4.",
    ]


def test_only_one_of_many_defences_is_named_if_none_leaks():
    rows = [privacy_row(f"d{number}", psnr=5.0 + number, ssim=0.1) for number in range(4)]
    text = headline([privacy_row("none"), *rows])
    assert "Under all 4 defences nothing is recognisable; d3 comes nearest: no attack here recovered any" in text
    assert "leaks least" not in text


def test_defences_that_stop_only_the_plain_attacker_are_named():
    rows = rows_of("none", [0.9], psnr=50.0)
    for name, plain, knowing in (("a", 20.0, 48.0), ("b", 20.0, 40.0), ("c", 45.0, 50.0), ("d", 10.0, 60.0)):
        rows += rows_of(name, [0.9], psnr=plain) + rows_of(name, [0.9], psnr=knowing, adaptive=True)
    told = [f"{name} (50.0 dB undefended, {under} dB under it, {known} dB once it is known)"
            for name, under, known in (("a", "20.0", "48.0"), ("d", "10.0", "60.0"))]  # fmt: skip
    assert sentences(rows)[-1] == f"Stopping the naive attacker only: {', '.join(told)}."
    few = [row for row in rows if row["defence"] in ("none", "d")]
    assert sentences(few)[-1] == f"Stopping the naive attacker only: {told[1]}."
    assert not any("naive" in text for text in sentences([row for row in rows if row["defence"] in ("none", "b", "c")]))


def test_headlines_of_other_audits():
    assert headline([]) == "No attack has finished yet."
    assert headline([privacy_row(failed=True)]) == "Every attack failed."
    assert headline(rows_of("a", [0.9]), images=4) == "Under a 1 of 1 batches are recognisable."
    assert headline([privacy_row("a", adaptive=True)]).endswith(
        "are recognisable to an attacker who knows the defence."
    )
    assert (
        headline([privacy_row(ssim=None, psnr=12.34)]) == "Undefended, pictures come back with a mean PSNR of 12.3 dB."
    )


class TestTrainingsThatDidNotLearn:
    def rows(self, **guessed):
        attacks = [*rows_of("none", [0.9]), *rows_of("prune", [0.2])]
        return attacks + [utility_row(name, 0.1, at_chance=guess) for name, guess in guessed.items()]

    def test_without_an_undefended_model_no_price_is_known(self):
        rows = self.rows(none=True, prune=False)
        assert all(line["why"].startswith("price not known: the undefended training did not") for line in utility(rows))
        assert [line["points_lost"] for line in utility(rows)] == [None, None]
        text = headline(rows)
        assert "What defences cost is not known: the undefended training did not learn." in text
        assert "accuracy" not in text
        assert points(summarise(rows), utility(rows), schema_of().column("privacy", "psnr")) == []
        section = plane_section(summarise(rows), utility(rows), schema_of())
        assert "there are none: the undefended training did not learn" in section
        assert "prune: price not known" in section

    def test_a_defence_that_stops_learning_has_a_price(self):
        none, prune = utility(rows := self.rows(none=False, prune=True))
        assert none["why"] == ""
        assert prune["why"] == "the training under this defence did not learn: it is no better than a guess"
        assert "not known" not in headline(rows)

    def test_rows_of_earlier_versions_are_taken_to_have_learned(self):
        assert [line["why"] for line in utility([utility_row(), utility_row("prune")])] == ["", ""]
