"""The table for papers: what it says is what the page says, and no text breaks it."""

import re
import shutil
import subprocess

import pytest

from gradveil.report.audit import write_report
from gradveil.report.latex import SIGNS, escaped

from .folders import Made


@pytest.fixture
def table(tmp_path):
    folder = Made(attacks=("gs:iterations=1000",)).write(tmp_path / "run")
    write_report(folder)
    return (folder / "summary.tex").read_text()


def test_it_has_a_line_per_line_of_the_summary(table, tmp_path):
    body = table.split("\\midrule\n")[1].split("\n\\bottomrule")[0].splitlines()
    csv_lines = (tmp_path / "run" / "summary.csv").read_text().splitlines()[1:]
    assert len(body) == len(csv_lines)
    sides = re.search(r"\\begin\{tabular\}\{(\w+)\}", table)[1]
    assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in body} == {len(sides)}
    assert "Recognisable" in table
    assert sum(line.startswith("none") for line in body) == 1


def test_every_sign_that_tex_takes_for_a_command_is_escaped():
    hostile = "\\input{x} 50% a_b #1 $x$ {y} ~z^2 & \n\x07"
    text = escaped(hostile)
    assert "\\input" not in text.replace("\\textbackslash{}input", "")
    bare = text
    for written in sorted(SIGNS.values(), key=len, reverse=True):
        bare = bare.replace(written, "")
    assert not set(bare) & set("\\&%$#_{}~^\n\x07")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on this machine")
def test_tex_takes_it(table, tmp_path):
    page = f"\\documentclass{{article}}\\usepackage{{booktabs}}\\begin{{document}}{table}\\end{{document}}"
    (tmp_path / "page.tex").write_text(page)
    command = ["pdflatex", "-halt-on-error", "page.tex"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
