"""Looking something up is fast, and one broken file does not keep the others from being found and used."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradveil as package

HEAVY = {"torch", "matplotlib", "cma", "opacus", "scipy", "numpy", "pandas", "PIL", "safetensors"}
SOURCE = Path(package.__file__).parent


def run(*arguments, source=SOURCE.parent, code="from gradveil.cli import main\nmain()"):
    """Run the command line in a process of its own; the last line of stderr are the heavy modules it imported."""
    code = (
        f"import sys\nsys.path.insert(0, {str(source)!r})\nsys.argv[0] = 'gradveil'\n"
        f"try:\n    {code.replace(chr(10), chr(10) + '    ')}\n"
        f"finally:\n    print(*sorted(set(sys.modules) & {HEAVY!r}), file=sys.stderr)"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    ["--help", "list", "list defences --json", "describe soteria", "describe gs --json", "train --help",
     "audit --help", "train-generator --help", "attack --help", "score --help", "data --help", "reproduce --help"],
)  # fmt: skip
def test_looking_things_up_imports_nothing_heavy(command):
    ended = run(*command.split())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
    assert ended.stderr.splitlines()[-1] == ""


def test_importing_gradveil_imports_nothing_heavy():
    code = "import gradveil\nprint(len(dir(gradveil)))\nfrom gradveil import TrainSettings\nTrainSettings()"
    ended = run(code=code)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[-1] == ""
    used = run(
        code="import gradveil\nprint(gradveil.Update.__name__, gradveil.attacks.__name__, gradveil.tripwire.__name__)"
    )
    assert used.stdout.split() == ["Update", "gradveil.attacks", "gradveil.tripwire"], used.stderr
    assert "torch" in used.stderr


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        package.nonsense  # noqa: B018
    assert set(package.__all__) <= set(dir(package))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """Copy the package, with three files in defences that can't be imported."""
    source = tmp_path_factory.mktemp("scratch")
    shutil.copytree(SOURCE, source / "gradveil", ignore=shutil.ignore_patterns("__pycache__"))
    folder = source / "gradveil" / "defences"
    (folder / "pasted.py").write_text("@dataclass(frozen=True)\nclass Pasted(Defence):\n    'Nothing is imported.'\n")
    (folder / "cut_off.py").write_text("class CutOff(\n")
    (folder / "late.py").write_text(
        "from dataclasses import dataclass\nfrom gradveil.defences.base import Defence\n\n\n"
        "@dataclass(frozen=True)\nclass Late(Defence):\n    'Fail when imported.'\n\n\nLate().nothing\n"
    )
    return source


def test_a_broken_file_is_named_and_the_rest_is_listed(scratch):
    ended = run("list", "--json", source=scratch)
    assert ended.returncode == 0, ended.stderr
    listed = json.loads(ended.stdout)
    assert {"none", "soteria"} <= listed["defences"].keys()
    assert "gs" in listed["attacks"]
    assert "pasted" not in listed["defences"]
    warned = [line for line in ended.stderr.splitlines() if line.startswith("Warning: ")]
    assert len(warned) == 2
    assert "cut_off.py is left out, because it can't be imported: SyntaxError: " in warned[0]
    assert warned[1].endswith(
        "pasted.py is left out, because it can't be imported: NameError: name 'dataclass' is not defined, in line 1."
    )


@pytest.mark.parametrize(
    ("name", "error"), [("pasted", "NameError"), ("cut-off", "SyntaxError"), ("late", "AttributeError: 'Late' object")]
)
def test_using_a_broken_component_names_its_file(scratch, name, error):
    code = f"from gradveil.defences import build_defence\nbuild_defence({name!r})"
    message = run(source=scratch, code=code).stderr
    assert f"ConfigError: The file of defence {name!r}, " in message
    assert f"{name.replace('-', '_')}.py, can't be imported: {error}" in message
    works = run(
        source=scratch, code="from gradveil.defences import build_defence\nprint(build_defence('soteria+none').spec)"
    )
    assert works.stdout.strip() == "soteria+none", works.stderr


def test_describing_a_broken_component_names_its_file(scratch):
    ended = run("describe", "pasted", source=scratch)
    assert ended.returncode == 2
    assert (
        "pasted.py, can't be imported: NameError: name 'dataclass' is not defined, in line 1. Correct it"
        in ended.stderr
    )
    assert run("describe", "prune", source=scratch).stdout.startswith("prune (defence)")


OWN = '''
from dataclasses import dataclass
from torch import nn
from gradveil import Defence


@dataclass(frozen=True)
class Mine(Defence):
    """Do nothing.

    Attributes:
        strength: of doing it.
    """

    strength: float = 2.0
    places: tuple[int, ...] = (1, 2)


def net(shape, num_classes, width=8, depth=None):
    """Build a small network."""
    return nn.Flatten()


number = 3
'''


def test_the_users_own_component_is_described(gradveil, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    ended = gradveil("describe", f"{tmp_path / 'own.py'}:Mine")
    assert ended.code == 0, ended.err
    assert ended.out.startswith(f"{tmp_path / 'own.py'}:Mine (defence)\n\nDo nothing.\n\nAttributes:")
    assert "Settings and defaults: strength=2.0, places=(1, 2)" in ended.out
    document = json.loads(gradveil("describe", f"{tmp_path / 'own.py'}:net", "--json").out)
    assert document["kind"] == "models"
    assert document["doc"] == "Build a small network."
    assert document["settings"] == {"width": 8, "depth": None}


def test_what_can_not_be_described_is_refused(gradveil, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    assert "Did you mean 'Mine'?" in gradveil("describe", f"{tmp_path / 'own.py'}:Mone").last
    assert "must be a component or a function" in gradveil("describe", f"{tmp_path / 'own.py'}:number").last
    assert "Unknown component 'soterai'. Did you mean 'soteria'?" in gradveil("describe", "soterai").last
    assert gradveil("describe", "soteria:prune=0.6").out.startswith("soteria (defence)")
