"""The tree of errors, their messages, and the exit code of the command line for each."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil import cli, errors
from gradveil.errors import ConfigError, GradveilError, TrainingError, UnknownNameError

TREE = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, Exception)}


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    drawn = [line for line in errors.__doc__.splitlines() if "──" in line]
    assert len(drawn) == len(TREE) - 1 > 0
    parents = ["GradveilError"]
    for line in drawn:
        depth = line.index("──") // 4
        name = line.split("── ")[1].split()[0]
        parents[depth:] = [name]
        assert TREE[name].__bases__ == (TREE[parents[depth - 1]],), line


@pytest.mark.parametrize("name", sorted(TREE.keys() - {"UnknownNameError"}))
def test_each_error_ends_the_command_line_with_one_line_and_its_code(name, monkeypatch, capsys):
    def fails(*_args, **_options):
        raise TREE[name]("[bold]x[/bold] must be y, got z.")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == (1 if issubclass(TREE[name], TrainingError) else 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"{name}: [bold]x[/bold] must be y, got z.\n"


def test_a_long_message_stays_one_line(monkeypatch, capsys):
    message = "word " * 200 + "end."

    def fails(*_args, **_options):
        raise GradveilError(message)

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == f"GradveilError: {message}\n"


def test_an_unknown_name_is_shown_as_a_config_error(monkeypatch, capsys):
    def fails(*_args, **_options):
        raise UnknownNameError("model", "lenet6", ["mlp", "lenet5"])

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "ConfigError: Unknown model 'lenet6'. Did you mean 'lenet5'? Known: lenet5, mlp.\n"
    )


def test_an_unexpected_error_is_not_swallowed(monkeypatch):
    def fails(*_args, **_options):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_a_name_without_similar_names_gets_no_hint():
    assert str(UnknownNameError("model", "zzzz", ["mlp"])) == "Unknown model 'zzzz'. Known: mlp."
    assert str(UnknownNameError("model", "zzzz", [])) == "Unknown model 'zzzz'. Known: none."
    assert issubclass(UnknownNameError, ConfigError)


@given(st.lists(st.text("abcdefgh-", min_size=3, max_size=12), min_size=1, max_size=6, unique=True), st.data())
def test_one_changed_letter_finds_a_known_name(known, data):
    name = data.draw(st.sampled_from(known))
    position = data.draw(st.integers(0, len(name) - 1))
    wrong = name[:position] + "z" + name[position + 1 :]
    message = str(UnknownNameError("kind", wrong, known))
    if len(name) >= 4:
        assert "Did you mean" in message
    assert message.endswith(f"Known: {', '.join(sorted(known))}.")
