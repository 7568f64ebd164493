"""The blind guess, counts of images and flags in summary, headline, tables and plots."""

import pytest

from gradveil.cli.tables import audit_table
from gradveil.metrics import schema_of
from gradveil.report import flags
from gradveil.report.audit import headline, summarise, utility
from gradveil.report.audit_folder import clean
from gradveil.report.blind import NAME, blind_level, blind_lines
from gradveil.report.figures import PSNR, plane
from gradveil.report.plane import plane_svg, points
from gradveil.report.summary import strongest, with_costs
from gradveil.report.tables import rows_columns

from .folders import privacy_row, utility_row

BLIND = {"blind": "class average", "blind_psnr": 18.8, "blind_ssim": 0.68, "blind_identified": 0.0, "candidates": 1001}


def row(defence="none", target=0, images=1, recognised=0, **more):
    own = {"images": images, "images_recognisable": recognised, "identified": 0.0, "flags": [], "attack_steps": 100}
    return privacy_row(defence, target=target, **BLIND | own | more)


def test_what_is_not_above_blind_is_not_recognisable_whatever_its_ssim():
    rows = [row(target=n, psnr=18.0, ssim=0.68) for n in range(16)]
    (line,) = summarise(rows)
    assert (line["recognisable"], line["images"], line["ssim"]) == (0, 16, pytest.approx(0.68))
    assert headline(rows).startswith("Undefended, no attack here recovered any of 16 pictures")
    old = [privacy_row(target=n, psnr=18.0, ssim=0.68) for n in range(16)]  # rows of an earlier version
    assert (summarise(old)[0]["recognisable"], summarise(old)[0]["images"]) == (16, 16)


def test_the_blind_line_has_labels_only_beside_attackers_who_guessed_them():
    given = row(label_accuracy=1.0, blind_label_accuracy=0.3, knows=["labels"])
    assert blind_lines([given])[0]["label_accuracy"] is None
    found = row(attack="labels", label_accuracy=0.5, blind_label_accuracy=0.3, knows=["num-examples"])
    other = row(attack="labels", target=1, label_accuracy=0.5, blind_label_accuracy=0.5, knows=["num-examples"])
    (line,) = blind_lines([given, found, other])
    assert (line["n"], line["label_accuracy"]) == (2, pytest.approx(0.4))


def test_batches_are_counted_image_by_image():
    rows = [row(images=32, recognised=3, psnr=12.0, ssim=0.2, image_psnr=[40.0, 30.0, 8.0], converged=False)]
    (line,) = summarise(rows)
    assert (line["recognisable"], line["images"], line["n"]) == (3, 32, 1)
    assert line["psnr_worst"] == 40
    assert headline(rows, images=32).startswith("Undefended, 3 of 32 pictures are recognisable.")
    assert schema_of().column("summary", "recognisable").text(line) == "3 of 32"
    whole = summarise([row(attack="whole", target=n, recognised=1, ssim=0.9) for n in range(2)])
    assert strongest([line, *whole])["attack"] == "whole"  # by the share of images


def test_recovered_pictures_are_not_called_not_converged():
    rows = [row(target=n, recognised=n, converged=False) for n in range(2)]
    assert summarise(rows)[0]["not_converged"] == 1
    shown = next(
        column for column in rows_columns([clean(each) for each in rows], schema_of()) if column["key"] == "converged"
    )
    assert [shown["texts"][cell] for cell in shown["cells"]] == ["no", "no, but it recovered the images"]


def test_the_blind_guess_is_a_line_of_its_own_per_kind():
    rows = [row(target=n, seed=s, blind_psnr=10.0 + n) for n in range(2) for s in range(2)]
    rows += [row("a", blind="mean image", blind_psnr=9.0, blind_ssim=None), privacy_row("old"), utility_row()]
    known, unknown = blind_lines(rows)
    assert (known["defence"], known["attack"], known["adaptive"], known["knows"]) == (
        NAME,
        "class average",
        None,
        ["labels"],
    )
    assert (known["n"], known["seeds"], known["psnr"], known["psnr_worst"]) == (4, 2, 10.5, 11.0)
    assert (known["recognisable"], known["not_converged"], known["identified"]) == (None, None, 0.0)
    assert (unknown["attack"], unknown["psnr"], unknown["ssim"]) == ("mean image", 9.0, None)
    assert blind_lines([privacy_row()]) == []


def test_identification_is_told_with_its_chance():
    rows = [row(recognised=1, identified=1.0), row("a", identified=0.25), row("a", attack="x", identified=0.5)]
    text = headline(rows)
    assert (
        "Guesses pick the true picture among 1,000 others: 100.0 % undefended, 50.0 % under a (chance 0.1 %)." in text
    )


@pytest.mark.parametrize(
    ("plain", "knowing", "expected"),
    [
        ({"psnr": 25.0}, {"psnr": 25.5}, ([], [])),
        ({"psnr": 18.7}, {"psnr": 25.0}, (["worse than a blind guess"], [])),
        ({"psnr": 31.5}, {"psnr": 31.5}, ([flags.MORE], [flags.MORE])),
        ({"psnr": 25.0}, {"psnr": 25.0, "attack_steps": 200}, ([], [flags.STEPS])),
        ({"psnr": 25.0, "attack_steps": None}, {"psnr": 25.0}, ([], [])),
        ({"psnr": 25.0}, {"psnr": 23.9}, ([], [flags.WORSE])),
        ({"psnr": None}, {"psnr": 23.9}, ([], [])),
    ],
)
def test_flags(plain, knowing, expected):
    rows = [row(psnr=30.0), row("a", **plain), row("a", adaptive=True, **knowing)]
    none, *others = summarise(rows)
    assert none["flags"] == []
    assert tuple(line["flags"] for line in others) == expected
    assert len(flags.explained([none, *others])) == len({flag for own in expected for flag in own})


def test_the_console_marks_flagged_lines_and_begins_with_the_blind_guess():
    rows = [row(psnr=30.0, recognised=1), row("a", psnr=10.0)]
    lines = with_costs([*blind_lines(rows), *summarise(rows)], utility(rows), schema_of())
    table = audit_table("title", lines, schema_of())
    shown = {str(column.header): list(column.cells) for column in table.columns}
    assert shown["Defence"] == [NAME, "none", "a"]
    assert shown["Recognisable"] == ["-", "1 of 1", "0 of 1 !"]
    assert shown["Identified"] == ["0.0 %"] * 3


def test_the_plane_has_a_line_at_the_blind_guess_and_room_for_it():
    rows = [row(psnr=30.0), row("a", psnr=25.0), utility_row(), utility_row("a", 0.9)]
    summary, costs = summarise(rows), utility(rows)
    level = blind_level(summary, PSNR)
    assert level == 18.8
    axes = plane(summary, costs).axes[0]
    assert any(set(line.get_ydata()) == {18.8} for line in axes.lines)
    assert axes.get_ylim()[0] <= 18.8
    some = points(summary, costs, PSNR)
    assert 'class="blind"' in plane_svg(some, PSNR, blind=level)
    assert 'class="blind"' not in plane_svg(some, PSNR)
