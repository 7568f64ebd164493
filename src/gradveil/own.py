"""The user's own components: from a file ``path/file.py:Name``, or defined in this session and known by a name.

A class or function without a file of its own, such as one defined in a notebook, can be adopted: then this process
finds it by a name, as it finds those of the package. Worker processes can't.
"""

import contextlib
import hashlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from gradveil.catalogue import catalogue
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.validate import is_file

OWN = "gradveil_own_"
"""How the names of modules begin that were loaded from users' files."""
_adopted: dict[str, Any] = {}
ADOPTED: Mapping[str, Any] = MappingProxyType(_adopted)
"""Things that this process knows by a name, see `adopt`."""


def is_own(reference: str, kind: str) -> bool:
    """Return whether a reference to a component of a kind names one of the user's: ``file.py:Name``, or adopted."""
    return names_code(reference) or is_adopted(reference, kind)


def is_adopted(name: str, kind: str) -> bool:
    """Return whether a name stands for an adopted thing; if the package has a component of the kind, it does not."""
    return name in _adopted and name not in catalogue(kind).entries


def adopt(name: str, thing: object, kind: str = "") -> str:
    """Let `load_own` find a thing by a name in this process; return the name. A thing adopted later replaces it.

    Raises:
        ConfigError: a component of the package, of this kind, has the name.
    """
    if kind and name in catalogue(kind).entries:
        raise ConfigError(
            f"Your own component must have a name of its own, got {name!r}, which is one of gradveil's {kind}. "
            'Rename the class, or give it a class attribute: name = "mine".'
        )
    _adopted[name] = thing
    return name


def reference_to(thing: Any, name: str, kind: str = "") -> str:  # noqa: ANN401 - a class or function of the user's
    """Return a text from which `load_own` gets a class or function: ``file.py:Name`` if it has a file, or ``name``.

    A script that is being run is no such file, because loading it would run it again.
    """
    module, attribute = sys.modules.get(thing.__module__), getattr(thing, "__qualname__", "")
    path = getattr(module, "__file__", None)
    if path and path.endswith(".py") and thing.__module__ != "__main__" and getattr(module, attribute, None) is thing:
        reference = f"{Path(path).resolve()}:{attribute}"
        with contextlib.suppress(ConfigError):  # it may need its package, or do without a second copy of its module
            load_own(reference)
            return reference
    return adopt(name, thing, kind)


def own_files(spec: str) -> list[str]:
    """Return the user's files that a spec names: Python files, and safetensors among the settings.

    Example:
        >>> own_files("none+my/idea.py:Mine:x=1+other.py:Other")
        ['my/idea.py', 'other.py']
        >>> own_files("ggl:generator=digits.safetensors,kl=0.1")
        ['digits.safetensors']
        >>> own_files("loda:extractor=nets/mine.py:factory,c=20")
        ['nets/mine.py']
    """
    return re.findall(r"(?:^|[+=])([^+=,]+?\.(?:py(?=:)|safetensors(?=[,+]|$)))", spec)


TRUST = "GRADVEIL_TRUST_CODE"
"""The environment variable by which worker processes know that `trusting_code` is in force."""


@contextlib.contextmanager
def trusting_code(trusted: bool = True) -> Iterator[None]:
    """Let the files and folders that are read inside name Python files to run, also in processes started inside.

    Otherwise only texts that the user wrote can; see `gradveil.config.refuse_code`.
    """
    before = os.environ.get(TRUST)
    if trusted:
        os.environ[TRUST] = "1"
    try:
        yield
    finally:
        os.environ.pop(TRUST, None)
        if before is not None:
            os.environ[TRUST] = before


def trusts_code() -> bool:
    """Return whether `trusting_code` is in force."""
    return os.environ.get(TRUST) == "1"


def names_code(text: str) -> bool:
    """Return whether a text names a Python file that building the component would run.

    Example:
        >>> names_code("loda:extractor=nets/mine.py:factory"), names_code("soteria:prune=0.6")
        (True, False)
    """
    return ".py:" in text


def load_own(reference: str) -> Any:  # noqa: ANN401 - whatever the user's file holds
    """Return the object ``Name`` of the user's file ``path/file.py:Name``, or what was adopted under this name.

    The file is run once, as importing it would.
    """
    if reference in _adopted:
        return _adopted[reference]
    path_text, _, attribute = reference.rpartition(":")
    path = Path(path_text).expanduser().resolve()
    if not is_file(path):
        raise ConfigError(f"There is no file {path_text!r}. Check the path.")
    module_name = f"{OWN}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    module = sys.modules.get(module_name)
    if module is None:
        module_spec = importlib.util.spec_from_file_location(module_name, path)
        if module_spec is None or module_spec.loader is None:
            raise ConfigError(f"{path_text!r} can't be imported as a Python module.")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_name] = module
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout carries results only
                module_spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            raise ConfigError(f"{path_text!r} failed when imported: {type(error).__name__}: {error}.") from error
    if not hasattr(module, attribute):
        wrong = f"{path_text!r} defines no {attribute!r}."
        raise UnknownNameError("name", attribute, _defined(module), wrong=wrong, lead="It defines")
    return getattr(module, attribute)


def told_error(error: BaseException) -> str:
    """Return an error in one line: its class, the first line of its text, and the user's own line that led to it."""
    first = (str(error).splitlines() or [""])[0]
    places = [
        f" ({Path(frame.f_code.co_filename).name}, line {line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(OWN)
    ]
    return f"{type(error).__name__}: {first}{places[-1] if places else ''}"


def _defined(module: ModuleType) -> list[str]:
    """Return the public names that a module defines itself, without those that it imports."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and (not callable(value) or getattr(value, "__module__", "") == module.__name__)
    ]
