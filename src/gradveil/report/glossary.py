"""Words of the field, explained where they first stand on a page, and all together at its end."""

import re
from collections.abc import Mapping
from html import escape

GLOSSARY: Mapping[str, str] = {
    "update": "what a client sends to the server: how the model's numbers should change, computed from its images",
    "defence": "a change to the client's training or to its update that is meant to hide the images",
    "blind guess": "what anybody could draw without the update: the average public image, of the same class if known",
    "recognisable": "so close to the private image that people see what it shows, clearly better than a blind guess",
    "PSNR": "how close two images are, in decibels; about 10 is a poor likeness, 20 a good one, above 30 nearly a copy",
    "SSIM": "how similar the structure of two images is; 1 for the same image, about 0 for unrelated ones",
    "adaptive": "said of an attacker who knows the defence and its settings, as real ones will",
    "converge": "an attack converges if its guess explains the update; if not, its poor picture says nothing",
    "AUC": "how well training images are told from others; 0.5 is guessing, 1 is always right",
    "ε": "epsilon: how much one image can change what the server sees, proven; small is private, above 10 says little",
    "μ": "mu: like epsilon, for noise that follows the bell curve; below 1 is strong",
}
_TAG_OR_TEXT = re.compile(r"(<[^>]*>)|([^<]+)")


def glossed(html: str) -> str:
    """Return HTML whose words of the glossary, each at its first place, show their meaning on hover, focus or tap.

    Example:
        >>> glossed("<p title='PSNR'>The PSNR and PSNR</p>").count("<abbr")
        1
    """
    left = dict(GLOSSARY)

    def explain(found: re.Match[str]) -> str:
        tag, text = found[1], found[2]
        if tag:
            return tag
        pieces = sorted(left, key=len, reverse=True)
        if not pieces:
            return text
        return re.sub(rf"(?<![\w-])({'|'.join(map(re.escape, pieces))})(?![\w-])", mark, text, flags=re.IGNORECASE)

    def mark(found: re.Match[str]) -> str:
        word = next(word for word in GLOSSARY if word.lower() == found[1].lower())
        if word not in left:
            return found[1]
        return f'<abbr tabindex="0" title="{escape(left.pop(word))}">{found[1]}</abbr>'

    return _TAG_OR_TEXT.sub(explain, html)


def glossary_list() -> str:
    """Return the whole glossary as a list."""
    lines = "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in GLOSSARY.items())
    return f'<h3 id="glossary">Words</h3><dl class="glossary">{lines}</dl>'
