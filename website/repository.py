"""Pages of the site that stand at the top of the repository, and links from docs/ to files outside of it."""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files at the top of the repository, and the pages that they are on the site."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def moved(text: str, source: str, page: str) -> tuple[str, set[str]]:
    """Return a page with its links fitted to the site, and the files of the repository that they lead to.

    Args:
        text: Markdown whose links are relative to ``source``.
        source: the page's file in the repository, such as ``docs/train.md``.
        page: its path on the site, such as ``train.md``.

    Example:
        >>> moved("[a](../README.md#b) [c](../results/d.json) [e](f.md)", "docs/x.md", "x.md")
        ('[a](readme.md#b) [c](files/results/d.json) [e](f.md)', {'results/d.json'})
    """
    files: set[str] = set()
    hidden: list[str] = []

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return f"\0{len(hidden) - 1}\0"

    def move(found: re.Match[str]) -> str:
        link, _, part = found[2].partition("#")
        if not link or re.match(r"[a-z]+:", link):
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if target in TOP:
            there = TOP[target]
        elif target.startswith("docs/"):
            there = target.removeprefix("docs/")
        else:
            target = _file(target)
            files.add(target)
            there = f"files/{target}"
        relative = posixpath.relpath(there, posixpath.dirname(page) or ".")
        return f"{found[1]}{relative}{'#' + part if part else ''}{found[3]}"

    # links may have code as their text, but code has no links
    text = re.sub(r"```.*?```", hide, text, flags=re.DOTALL)
    text = LINK.sub(move, text)
    return re.sub("\0(\\d+)\0", lambda found: hidden[int(found[1])], text), files


def _file(target: str) -> str:
    """Return a file for a link; for a folder its pyproject.toml, which lists what is in it."""
    return f"{target}/pyproject.toml" if (ROOT / target).is_dir() else target
