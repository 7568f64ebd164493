"""Components: frozen dataclasses that are found by their file. A class in the right folder exists; no list names it.

A component is written ``name:key=value,key=value`` on the command line, in TOML and in every row, and
`build` turns that text into the object. The user's own components are written ``path/file.py:Name:key=value``.
"""

import dataclasses
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from gradveil.catalogue import FOLDERS as FOLDERS  # users look for it here
from gradveil.catalogue import catalogue, kebab
from gradveil.errors import ConfigError, GradveilError, UnknownNameError
from gradveil.own import OWN, is_own, reference_to
from gradveil.own import load_own as load_own
from gradveil.own import own_files as own_files
from gradveil.source import module_path


@dataclasses.dataclass(frozen=True)
class Component:
    """Base of everything that has a name and settings. The fields of a subclass are its settings; all have defaults.

    Attributes:
        kind: the plural that users type in ``gradveil list KIND``; each base class states it.
        name: what users type; by default the class name in kebab case (``DpSgd`` is ``dp-sgd``).
    """

    kind: ClassVar[str]
    name: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401 - passed through untouched
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = kebab(cls.__name__)

    @property
    def spec(self) -> str:
        """The text that builds this component again, with the settings that differ from their defaults."""
        cls, module = type(self), sys.modules[type(self).__module__]
        own = f"{module.__file__}:{cls.__name__}" if module.__name__.startswith(OWN) else self.name
        return ":".join(filter(None, (own, self._settings())))

    def _settings(self) -> str:
        """Return the settings that differ from the default, as ``key=value,key=value``."""
        return ",".join(
            f"{field.name}={_text(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if field.init and getattr(self, field.name) != field.default
        )


C = TypeVar("C", bound=Component)


def names(kind: str) -> list[str]:
    """Return the names of all components of a kind, without importing them."""
    return list(catalogue(kind).entries)


def components(kind: str) -> dict[str, type[Component]]:
    """Import all components of a kind, by name: every concrete subclass of the base in any file of the kind's folder.

    Raises:
        ConfigError: a file of the folder can't be imported.
    """
    for broken in catalogue(kind).broken:
        raise ConfigError(f"{broken.path} can't be imported: {broken.error}. Correct that file.")
    return {name: find(kind, name) for name in names(kind)}


def find(kind: str, name: str) -> type[Component]:
    """Import the component of a kind that has this name, and no other.

    Raises:
        UnknownNameError: no component has this name.
        ConfigError: its file can't be imported; the message names it.
    """
    known = catalogue(kind)
    for broken in known.broken:
        if name in broken.names and name not in known.entries:
            raise _unusable(kind, name, broken.path, broken.error)
    if name not in known.entries:
        raise UnknownNameError(kind.removesuffix("s"), name, known.entries)
    source = known.entries[name].source
    try:
        found: type[Component] = getattr(importlib.import_module(source.module), source.name)
    except GradveilError:
        raise
    except Exception as error:
        raise _unusable(kind, name, module_path(source.module), f"{type(error).__name__}: {error}") from error
    return found


def _unusable(kind: str, name: str, path: Path, error: str) -> ConfigError:
    kind = kind.removesuffix("s")
    return ConfigError(f"The file of {kind} {name!r}, {path}, can't be imported: {error}. Correct it, or take another.")


def split_specs(text: str) -> list[str]:
    """Split a comma-separated list of components; a piece with ``=`` before any ``:`` continues the one before it.

    Example:
        >>> split_specs("none,prune:fraction=0.9,scope=global,gaussian:scale=1e-3")
        ['none', 'prune:fraction=0.9,scope=global', 'gaussian:scale=1e-3']
        >>> split_specs("loda:c=20,extractor=resnet20:width=8,none")
        ['loda:c=20,extractor=resnet20:width=8', 'none']
    """
    specs: list[str] = []
    for piece in text.split(","):
        if "=" in piece.partition(":")[0] and specs:
            specs[-1] += f",{piece}"
        else:
            specs.append(piece)
    return [spec.strip() for spec in specs if spec.strip()]


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Return the name and the settings in a component's text; the name of a user's own is its ``path.py:Name``.

    Example:
        >>> parse_spec("soteria:prune=0.6")
        ('soteria', {'prune': '0.6'})
        >>> parse_spec("nets/mine.py:factory:width=8")
        ('nets/mine.py:factory', {'width': '8'})
    """
    own = re.match(r"(?P<name>[^=]+\.py:[A-Za-z_]\w*)(?::(?P<settings>.*))?$", spec)
    name, _, text = (own["name"], "", own["settings"] or "") if own else spec.partition(":")
    settings: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"Settings of {name!r} must be key=value pairs split by commas, got {pair!r} in {spec!r}. "
                f"See `gradveil describe {name}`."
            )
        settings[key.strip()] = value.strip()
    return name.strip(), settings


def build(base: type[C], spec: str) -> C:
    """Build a component from its text; unknown names and settings, and values of the wrong type, are errors."""
    name, settings = parse_spec(spec)
    kind = base.kind.removesuffix("s")
    cls = load_own(name) if is_own(name, base.kind) else find(base.kind, name)
    if not (inspect.isclass(cls) and issubclass(cls, base)):
        raise ConfigError(f"{name!r} must be a subclass of gradveil's {base.__name__} to serve as {kind}, got {cls!r}.")
    try:
        return cls(**convert(cls, settings, owner=f"{kind} {name!r}"))
    except ConfigError as error:
        if not error.setting:
            raise
        raise ConfigError(f"{error} Set {name}:{error.setting}=...") from None


def spec_of(component: Component) -> str:
    """Return a text that builds an equal component, also if its class is defined outside of the package.

    In addition to `Component.spec` it makes sure that the class is found: by its file, or by its name in this process
    (see `gradveil.own.reference_to`).
    """
    cls = type(component)
    if cls.__module__.startswith(("gradveil.", OWN)):
        return component.spec
    text = ":".join(filter(None, (reference_to(cls, cls.name, cls.kind), component._settings())))
    reference, settings = parse_spec(text)
    built = load_own(reference)(**convert(cls, settings, owner=cls.__name__))
    for field in dataclasses.fields(component):
        value = getattr(component, field.name)
        if field.init and getattr(built, field.name) != value:
            raise ConfigError(
                f"Settings of {cls.__name__} must be numbers, texts, true, false, none or tuples of these, "
                f"got {field.name}={value!r}, which can't be written as text."
            )
    return text


def convert(cls: type[Any], settings: Mapping[str, object], owner: str) -> dict[str, Any]:
    """Turn texts (or TOML values) into the types that the fields of a dataclass declare."""
    hints = typing.get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    values: dict[str, Any] = {}
    for key, value in settings.items():
        field = key.replace("-", "_")
        if field not in fields:
            wrong = f"{owner[:1].upper()}{owner[1:]} has no setting {key!r}."
            raise UnknownNameError("setting", key, fields, wrong=wrong)
        try:
            values[field] = _value(value, hints[field])
        except (ValueError, TypeError, OverflowError) as error:
            wanted = _in_words(hints[field])
            raise ConfigError(f"Setting {key} of {owner} must be of type {wanted}, got {value!r}.") from error
    return values


def _in_words(hint: object) -> str:
    """Return the name of a declared type; for a list of numbers, how to write it.

    Example:
        >>> _in_words(int), _in_words(tuple[int, ...])
        ('int', 'int, or several separated by slashes such as 1/2')
    """
    if typing.get_args(hint)[:1] in ((int,), (float,)) and typing.get_origin(hint) is tuple:
        return f"{typing.get_args(hint)[0].__name__}, or several separated by slashes such as 1/2"
    return getattr(hint, "__name__", str(hint))


def _value(value: object, hint: object) -> object:
    """Return a setting's value in the declared type; texts are parsed, other values must have that type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments and value in (None, "none"):
            return None
        return _first_that_fits(value, [argument for argument in arguments if argument is not type(None)])
    if origin is tuple:
        pieces = value.split("/") if isinstance(value, str) else value
        if not isinstance(pieces, (list, tuple)):
            raise TypeError(hint)
        return tuple(_value(piece, arguments[0]) for piece in pieces if piece != "")
    if hint is bool:
        return _truth(value)
    if hint in (int, float):
        return _number(value, whole=hint is int)
    if hint is not str or not isinstance(value, str):
        raise TypeError(hint)
    return value


def _number(value: object, *, whole: bool) -> int | float:
    """Return a number from a text or another number. Raise TypeError for a bool."""
    if isinstance(value, bool) or (whole and isinstance(value, float) and not value.is_integer()):
        raise TypeError(value)
    return int(value) if whole else float(value)  # type: ignore[call-overload, arg-type]


def _first_that_fits(value: object, hints: list[object]) -> object:
    for hint in hints:
        try:
            return _value(value, hint)
        except (ValueError, TypeError):
            continue
    raise ValueError(value)


def _truth(value: object) -> bool:
    """Return a truth value from true, yes or 1, or from false, no or 0."""
    text = str(value).lower()
    if text not in {"true", "yes", "1", "false", "no", "0"}:
        raise ValueError(value)
    return text in {"true", "yes", "1"}


def _text(value: object) -> str:
    """Return a setting's value as text for a spec."""
    if isinstance(value, tuple):
        return "/".join(map(_text, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
