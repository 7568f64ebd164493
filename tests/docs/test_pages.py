"""README and manual pages are short enough, complete, and show commands that exist."""

import dataclasses
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from gradveil.cli import app
from gradveil.engines.flower import AnswerLimits
from gradveil.engines.site_policy import SitePolicy
from gradveil.registry import components
from gradveil.runs.update_spec import UpdateSpec
from gradveil.threat import Knowledge
from tests.docs import columns

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def first_cells(page, heading=""):
    """Return the names in the first column of a page's tables, below a heading if one is given."""
    text = (DOCS / page).read_text()
    part = text.split(f"## {heading}\n")[1].split("\n## ")[0] if heading else text
    cells = re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1100


def test_the_page_on_attack_lists_every_key_of_the_spec():
    assert first_cells("attack.md", "Keys of the spec file") == {field.name for field in dataclasses.fields(UpdateSpec)}


def test_the_page_on_flower_lists_every_key_of_a_policy_and_of_the_server():
    policy = {field.name.replace("_", "-") for field in dataclasses.fields(SitePolicy)}
    assert first_cells("flower.md", "A site's policy") == policy
    limits = {field.name.replace("_", "-") for field in dataclasses.fields(AnswerLimits)}
    assert first_cells("flower.md", "The server") == {"bad-answers", *limits}


@pytest.mark.parametrize("kind", ["defences", "attacks"])
def test_the_tables_name_every_component(kind):
    assert set(components(kind)) - first_cells(f"{kind}.md") == set()


@pytest.mark.parametrize("kind", ["datasets", "models", "partitions"])
def test_the_page_on_data_and_models_names_every_component(kind):
    assert set(components(kind)) - set(re.findall(r"`([^`\s]+)`", (DOCS / "data-and-models.md").read_text())) == set()


def test_the_page_on_attacks_names_all_knowledge():
    assert first_cells("attacks.md", "What an attacker may know") == {knowledge.value for knowledge in Knowledge}


def commands_of(text):
    """Return the gradveil commands of a page, each as a list of words; continued lines are joined."""
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    inline = [code.replace("\n", " ") for code in re.findall(r"`(gradveil [^`]+)`", rest)]
    indented = re.findall(r"^    gradveil (?:.*\\\n)*.*$", rest, re.MULTILINE)
    lines = [line for code in [*fenced, *inline, *indented] for line in code.replace("\\\n", " ").splitlines()]
    joined = [re.sub(r"\s+", " ", line.strip().removeprefix("$ ")) for line in lines]
    return [shlex.split(line, comments=True) for line in joined if re.match(r"gradveil [a-z-]+( |$)", line)]


def wrong_words(words):
    """Return the words of a command that the command line does not know: a command or an option."""
    group, rest = typer.main.get_command(app), words[1:]
    while hasattr(group, "commands") and rest:
        name, *rest = rest
        if name not in group.commands:
            return [name]
        group = group.commands[name]
    known = {option for parameter in group.params for option in [*parameter.opts, *parameter.secondary_opts]}
    return [word for word in rest if word.startswith("--") and word.split("=")[0] not in {*known, "--help"}]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    wrong = [(" ".join(words), wrong_words(words)) for words in commands_of(page.read_text())]
    assert [pair for pair in wrong if pair[1]] == []


def test_wrong_commands_are_found():
    text = "`gradveil audit --defenses none`\n```\n$ gradveil trian \\\n  --out a\n```\n`gradveil train --out a`"
    assert [wrong_words(words) for words in commands_of(text)] == [["trian"], ["--defenses"], []]


@pytest.mark.parametrize("page", ["README.md", "docs/attack.md"])
def test_the_python_snippets_run(page, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    (tmp_path / "snippet.py").write_text(code)
    command = [sys.executable, "snippet.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_the_times_of_looking_things_up_are_those_of_the_benchmark():
    measured = json.loads((ROOT / "results" / "front-door.json").read_text())
    part = (DOCS / "performance.md").read_text().split("## Looking things up\n")[1].split("\n## ")[0]
    told = re.findall(r"`(gradveil [^`]+)`(?: takes)? (\d\.\d\d) s", part)
    assert len(told) == 3
    assert told == [(name, f"{measured['figures'][name]['cpu_seconds']:.2f}") for name, _ in told]
    assert measured["date"] in part
    assert measured["command"] in part


def test_the_figures_of_the_evaluate_oracle_are_those_of_the_benchmark():
    measured = json.loads((ROOT / "results" / "evaluate-oracle.json").read_text())
    part = (DOCS / "flower.md").read_text().split("## What scores give away\n")[1].split("\n## ")[0]
    told = re.findall(r"^\| (.+?) \| (\d+) \| ([\d.]+) \|$", part, re.MULTILINE)
    assert told == [(name, str(row["answers"]), str(row["psnr"])) for name, row in measured["figures"].items()]
    assert measured["date"] in part
    assert measured["command"] in part


def test_the_figures_of_the_killed_nodes_are_those_of_the_benchmark():
    measured = json.loads((ROOT / "results" / "flower-faults.json").read_text())
    part = (DOCS / "flower.md").read_text().split("### Secure sums and killed nodes\n")[1].split("\n##")[0]
    rows = [
        f"| {name} | {row['round']} | {row['clients']} | "
        f"{', '.join(reason.split(' must')[0] for reason in row['dropped'] or []) or 'nobody'} | "
        f"{row['accuracy']:.1%} | {row['seconds']:.0f} |"
        for name, run in measured["runs"].items()
        for row in run["rows"]
    ]
    assert [line for line in part.splitlines() if line.startswith(("| calm", "| killed"))] == rows
    assert measured["runs"]["calm"]["equals simulation"]
    assert measured["runs"]["killed"]["finished"]
    assert all(measured[key] in part for key in ("date", "command"))


def test_the_figures_about_randomness_are_the_measured_ones():
    results = ROOT / "results"
    noise, times = (json.loads((results / f"{name}.json").read_text()) for name in ("noise-removal", "randomness"))
    rows = [
        f"| `{one['defence']}` | {one['noise']} | {one['error_sent']:g} | "
        f"{'nothing found' if one['error_after'] is None else format(one['error_after'], 'g')} |"
        for one in noise["figures"]
    ]
    rows += [f"| `{name}` | {value:g} |" for name, value in times["figures"]["times_torch_randn"].items()]
    shares = times["figures"]["share_of_a_lenet5_round"].items()
    rows += [f"| noise of a lenet5 update, {name} | {share:.2%} of the round |" for name, share in shares]
    page = (DOCS / "randomness.md").read_text().split("## Measured\n")[1]
    assert [line for line in page.splitlines() if re.match(r"\| (?!defence |what )", line)] == rows
    assert all(text in page for one in (noise, times) for text in (one["command"], one["date"]))


def test_the_guide_to_the_columns_is_that_of_the_schema():
    assert columns.guide() == columns.written(), "Refresh docs/report.md with: python -m tests.docs.columns"


def test_the_demo_in_the_readme_is_its_measured_output():
    data = json.loads((ROOT / "results" / "demo.json").read_text())
    spec = importlib.util.spec_from_file_location("demo", ROOT / "benchmarks" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.block(data) in (ROOT / "README.md").read_text()
    for audit in data["audits"].values():  # the Makefile plays these audits, and types no setting of an attack
        command = audit["command"]
        played = command.partition(" --defences ")[2].partition(" ")[0].removeprefix("none,")
        assert f"--defences {played}" in (ROOT / "Makefile").read_text()
        assert f"--model {audit['model']}" in (ROOT / "Makefile").read_text()
    assert "--attacks" not in (ROOT / "Makefile").read_text()
    assert module.shown(data)[-1]["defence"].startswith("veil")
