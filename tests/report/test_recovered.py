import pytest

from gradveil.report.recovered import recovered

from .folders import privacy_row
from .test_membership import row as member_row


def labels_row(defence="none", share=0.9, blind=0.3, **more):
    own = {"seeks": "labels", "knows": ["num-examples"], "psnr": None, "ssim": None, "images": 200, "guessed": 0.0}
    return privacy_row(defence, "labels", **own | {"label_accuracy": share, "blind_label_accuracy": blind} | more)


def test_labels_membership_and_pictures_are_told_apart_each_beside_a_guess():
    rows = [labels_row(), labels_row("prune", 0.5), member_row(), member_row("prune", auc=0.51)]
    rows += [privacy_row(ssim=0.9, psnr=20.0, images=1, images_recognisable=1, blind="class average", blind_psnr=9.0)]
    told = recovered(rows)
    assert list(told) == ["Labels", "Membership", "Pictures"]
    assert told["Labels"] == (
        "90.0 % are right undefended, 50.0 % under prune; a guess by the classes' shares of public images gets 30.0 %."
    )
    assert told["Membership"].endswith("where 0.5 is guessing.")
    assert told["Pictures"] == (
        "recognisable and closer to the truth than a blind guess (class average: 9.0 dB): 1 of 1 undefended."
    )


@pytest.mark.parametrize(("share", "verdict"), [(0.301, "no attack did better."), (0.35, "gets 30.0 %.")])
def test_labels_no_better_than_a_guess_are_called_that(share, verdict):
    assert recovered([labels_row(share=share)])["Labels"].endswith(verdict)


def test_labels_that_were_given_are_not_recovered():
    given = privacy_row(label_accuracy=1.0, knows=["labels", "num-examples"])
    assert recovered([given])["Labels"] == "not attacked: the attackers were given them."
    guessed = privacy_row(attack="dlg", label_accuracy=1.0, knows=["num-examples"], blind_label_accuracy=0.1)
    assert recovered([given, guessed])["Labels"].startswith("100.0 % are right undefended")


def test_what_no_attack_looked_for_was_not_attacked():
    assert recovered([]) == dict.fromkeys(("Labels", "Membership", "Pictures"), "not attacked.")
    told = recovered([labels_row()], left_out={"gs": "can search at most 128 images per update, got 400."})
    assert told["Pictures"] == "not attacked: gs can search at most 128 images per update, got 400."
    assert recovered([privacy_row(failed=True)])["Pictures"] == "not attacked."


def test_of_many_defences_the_least_and_the_most_are_named():
    rows = [labels_row(name, share) for name, share in zip("abcde", (0.5, 0.4, 0.9, 0.6, 0.7), strict=True)]
    text = recovered(rows)["Labels"]
    assert text.startswith("40.0 % are right under b, 90.0 % under c (least and most of 5 defences);")
    assert "defences" not in recovered(rows[:3])["Labels"]
