"""Settings of differential privacy in files: calls in Python, components in JSON, keys in TOML. Nothing is run."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gradveil.config import TrainSettings, make_train_settings, refuse_code
from gradveil.errors import ConfigError
from gradveil.limits import LONGEST_SETTINGS, parse_json, parse_toml, read_bytes
from gradveil.runs.lint import ARGUMENTS, MECHANISMS, LintFinding, Use, ours

LOCAL_DP = {"clipping_norm", "sensitivity", "epsilon", "delta"}
"""Keys that together configure Flower's LocalDpMod in somebody's run config."""


def lint(path: Path, use: Use | None = None) -> list[LintFinding]:
    """Return what each mechanism in a file really gives. Raise `ConfigError` if the file has none, or can't be read."""
    use = use or Use()
    try:
        content = read_bytes(path, LONGEST_SETTINGS)
        if path.suffix == ".py":
            found = list(_in_python(ast.parse(content), use))
        else:
            values = parse_toml(content) if path.suffix == ".toml" else parse_json(content)
            refuse_code(values, path)
            found = list(_in_values(values, "", use))
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        raise ConfigError(
            f"{str(path)!r} must be a readable .py, .toml or .json file, got {type(error).__name__}: {error}."
        ) from error
    if not found:
        raise ConfigError(
            f"{str(path)!r} must hold settings of differential privacy, got none that are known: "
            f"{', '.join(MECHANISMS)}, or a defence of gradveil."
        )
    return [replace(one, where=f"{path.name}{one.where}") for one in found]


def _in_python(tree: ast.Module, use: Use) -> Iterator[LintFinding]:
    """Yield the calls of known mechanisms; arguments are literals, or names that are assigned a literal once."""
    known: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            known[name] = _literal(node.value, {}) if name not in known else None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in MECHANISMS:
            given = dict(zip(ARGUMENTS.get(name, ()), node.args, strict=False))
            given |= {word.arg: word.value for word in node.keywords if word.arg}
            values = {key: _literal(value, known) for key, value in given.items()}
            yield replace(MECHANISMS[name](values, use), where=f":{node.lineno}")


def _literal(node: ast.expr, known: Mapping[str, object]) -> object:
    """Return the value of an expression, or None if it is not written there."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _in_values(values: object, place: str, use: Use) -> Iterator[LintFinding]:
    """Yield the mechanisms in nested dictionaries and lists."""
    if isinstance(values, list):
        for number, item in enumerate(values):
            yield from _in_values(item, f"{place}[{number}]", use)
    if not isinstance(values, dict):
        return
    plain = {str(key).replace("-", "_"): value for key, value in values.items()}
    here = f" {place}".rstrip()
    named = [str(plain[key]).rpartition(".")[2] for key in ("path", "name", "class_path") if key in plain]
    mechanism = next((name for name in named if name in MECHANISMS), None)
    if mechanism is not None:
        given = plain.get("args")
        yield replace(MECHANISMS[mechanism](given if isinstance(given, dict) else {}, use), where=here)
    elif plain.keys() >= LOCAL_DP:
        yield replace(MECHANISMS["LocalDpMod"](plain, use), where=here)
    if isinstance(plain.get("defence"), str):
        found = _our_own(plain, use)
        yield from [] if found is None else [replace(found, where=here)]
    for key, value in values.items():
        yield from _in_values(value, f"{place}.{key}".lstrip("."), use)


def _our_own(values: Mapping[str, Any], use: Use) -> LintFinding | None:
    names = {field.name for field in fields(TrainSettings)}
    settings = make_train_settings({key: value for key, value in values.items() if key in names})
    return ours(settings.defence, settings, use)
