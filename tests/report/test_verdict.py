"""The verdict for people outside the field: leaks, open or bounded, and what that means."""

import re

import pytest

from gradveil.report.verdict import MARKS, WORDS, badge, by_luck, judge, meaning, patients_section

LINE = {
    "attack": "gs", "adaptive": False, "seeks": "pictures", "n": 4, "images": 4, "recognisable": 0, "identified": 0.0,
    "candidates": 1001.0, "identified_bound": None,
}  # fmt: skip


def judged(*lines, **prices):
    costs = [{"defence": name, "epsilon": epsilon} for name, epsilon in prices.items()]
    return {each.defence: each for each in judge([LINE | line for line in lines], costs)}


def test_recognisable_pictures_leak_whatever_is_proven():
    (found,) = judged({"defence": "noise", "recognisable": 1}, noise=1.0).values()
    assert found.level == "leaks"
    assert "1 of 4" in meaning(found)


def test_poor_pictures_that_name_their_image_leak():
    (found,) = judged({"defence": "none", "identified": 0.25}).values()
    assert found.level == "leaks"
    assert "25.0 %" in meaning(found)
    assert "poor" in meaning(found)


def test_nothing_recovered_is_open_without_a_proof_and_bounded_with_one():
    found = judged({"defence": "none"}, {"defence": "noise"}, {"defence": "veil", "identified_bound": 0.02}, noise=2.5)
    assert {name: each.level for name, each in found.items()} == {"none": "open", "noise": "bounded", "veil": "bounded"}
    assert "no proof" in meaning(found["none"])
    assert "ε = 2.5" in meaning(found["noise"])
    assert "2.0 %" in meaning(found["veil"])
    assert "safe" not in "".join(map(meaning, found.values()))


def test_the_strongest_attack_decides():
    found = judged({"defence": "d"}, {"defence": "d", "adaptive": True, "recognisable": 3})
    assert found["d"].level == "leaks"
    assert found["d"].recognisable == (3, 4)


def test_attacks_on_labels_alone_have_no_verdict():
    assert judged({"defence": "none", "seeks": "labels"}) == {}
    assert patients_section([]) == ""


@pytest.mark.parametrize(("hits", "images", "chance"), [(1, 4, 0.001), (2, 100, 0.01), (5, 5, 0.5), (0, 3, 0.2)])
def test_luck_is_that_of_a_naive_count(hits, images, chance):
    total = 0.0
    for outcome in range(2**images) if images <= 12 else ():
        right = outcome.bit_count()
        total += (chance**right * (1 - chance) ** (images - right)) * (right >= hits)
    if images > 12:
        total = 1 - (1 - chance) ** images - images * chance * (1 - chance) ** (images - 1)
    assert by_luck(hits, images, chance) == pytest.approx(total)


def test_a_lucky_hit_among_very_many_images_is_no_leak():
    one_of_many = {"defence": "none", "n": 2000, "images": 2000, "identified": 1 / 2000}
    assert judged(one_of_many)["none"].level == "open"


def test_the_mark_has_a_word_and_a_sign_beside_its_colour():
    for level, word in WORDS.items():
        text = re.sub(r"<[^>]*>", "", badge(level))
        assert text == f"{MARKS[level]} {word}"
    assert len(set(MARKS.values())) == len(set(WORDS.values())) == 3
