"""Relative links in README and docs lead to files and headings that exist."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def prose(text):
    """Return a page without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchor(heading):
    """Return the anchor that a heading gets when it is rendered."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return kept.replace(" ", "-")


def anchors(text):
    """Return the anchors of a page; a heading that repeats is numbered."""
    found, seen = [], Counter()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE):
        name = anchor(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        found.append(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return set(found)


def broken(page, text):
    """Return the relative links of a page that lead nowhere."""
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, part = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        inside = target.is_relative_to(ROOT) and target.exists()
        if not inside or (part and part not in anchors(text if target == page else target.read_text())):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert broken(page, page.read_text()) == []


def test_broken_links_are_found():
    text = "# One `two`\n[a](README.md) [b](nowhere.md) [c](#one-two) [d](#three) [e](https://x.org/y) `[f](no.md)`"
    assert broken(ROOT / "README.md", text) == ["nowhere.md", "#three"]


def test_every_page_is_in_the_table_of_contents():
    contents = (ROOT / "docs" / "index.md").read_text()
    linked = set(re.findall(r"\]\(([\w.-]+\.md)", contents))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked
