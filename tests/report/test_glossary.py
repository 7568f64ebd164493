"""Words are explained at their first place, in texts only, and all of them at the end of the page."""

from gradveil.report.glossary import GLOSSARY, glossary_list, glossed


def test_a_word_is_explained_once_and_never_inside_a_tag():
    html = glossed('<p title="PSNR">PSNR, psnr and SSIM; a blind guess, unrecognisable</p><b>SSIM</b>')
    assert html.count("<abbr") == 3
    assert '<p title="PSNR">' in html
    assert "unrecognisable" in html
    assert html.endswith("<b>SSIM</b>")


def test_text_without_words_stays():
    assert glossed("<p>Nothing &amp; nobody</p>") == "<p>Nothing &amp; nobody</p>"


def test_the_list_has_all_words():
    assert glossary_list().count("<dt>") == len(GLOSSARY)
