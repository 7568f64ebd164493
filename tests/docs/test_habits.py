"""The files around the code agree with each other."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_pre_commit_runs_the_checks_of_make():
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    hooks = re.findall(r"^        entry: \.venv/bin/(.+)$", config, re.MULTILINE)
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert hooks == re.findall(r"^\t\$\(BIN\)/(.+)$", recipe, re.MULTILINE)
    assert len(hooks) == config.count("- id:")
    assert re.findall(r"- repo: (\S+)", config) == ["local"]


def test_version_and_licence_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_names_five_papers():
    references = (ROOT / "CITATION.cff").read_text().split("references:")[1]
    assert len(re.findall(r"^    title: ", references, re.MULTILINE)) == 5
    assert len(re.findall(r"^    year: 20\d\d$", references, re.MULTILINE)) == 5


GLOSSARY = (
    "client", "server", "round", "local step", "update", "tap", "guard", "look", "countermove", "decoder", "encodings",
    "target", "cell", "row", "leak", "guess, truth", "one world",
)  # fmt: skip


@pytest.mark.parametrize("word", GLOSSARY)
def test_the_glossary_explains(word):
    assert f"\n| {word} | " in (ROOT / "CONTRIBUTING.md").read_text().split("## Glossary")[1]
