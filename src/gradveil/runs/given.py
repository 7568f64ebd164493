"""What a run was given: options, a file of settings and the folder of an earlier run, put together."""

import inspect
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from gradveil.catalogue import kebab
from gradveil.config import read_settings, refuse_code
from gradveil.errors import ConfigError, RunFolderError
from gradveil.own import adopt, is_adopted, reference_to, trusting_code
from gradveil.registry import Component, spec_of

KINDS: Mapping[str, str] = {
    "model": "models",
    "dataset": "datasets",
    "aux": "datasets",
    "partition": "partitions",
    "defence": "defences",
    "defences": "defences",
    "attack": "attacks",
    "attacks": "attacks",
    "metrics": "metrics",
}
"""The kind of component that each option takes."""


def fresh_folder(kind: str, resume: bool = False) -> Path:
    """Return a new folder below runs for a run that was not given one."""
    if resume:
        raise ConfigError("--resume continues a run, got no folder. Add --out with the folder of that run.")
    return Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S-%f}"


def given_settings(
    kind: str, options: Mapping[str, Any], config: Path | None, out: Path, resume: bool, *, trust_code: bool = False
) -> dict[str, Any]:
    """Return the settings of a run: those it was started with, those of ``config``, the options; later ones win.

    Raises:
        ConfigError: the folder's settings name Python files that neither options nor ``config`` name, and
            ``trust_code`` is False.
    """
    given = {key: value for key, value in options.items() if value is not None}
    saved = read_settings(out / "settings.toml") if resume and os.path.exists(out / "settings.toml") else {}
    if resume and not (saved or given or config):
        raise ConfigError(f"There is no run in {out} to resume. Check --out, or give the settings of a new run.")
    if saved and ("kind" in saved) != (kind == "audit"):
        raise RunFolderError(
            f"{out} must hold a run of gradveil {kind} to continue, got another kind of run. Choose another --out."
        )
    chosen = {**(read_settings(config) if config else {}), **given}
    with trusting_code(trust_code):
        refuse_code(saved, out / "settings.toml", chosen)
    return {**saved, **chosen}


def as_texts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with paths, components, networks and data sets as the texts that settings hold.

    Lists are kept; their elements become texts.
    """
    return {key: _text(key, value) for key, value in options.items()}


def usable_workers(settings: Mapping[str, Any], workers: int | None) -> int | None:
    """Return the number of workers: 0 if a setting names something that is defined in this session only.

    Raises:
        ConfigError: workers were asked for nevertheless.
    """
    local = [
        piece
        for key, kind in KINDS.items()
        for text in ([settings.get(key, "")] if isinstance(settings.get(key, ""), str) else settings[key])
        for piece in text.split("+")
        if is_adopted(piece.partition(":")[0], kind)
    ]
    if not local:
        return workers
    if workers:
        raise ConfigError(
            f"{local[0]!r} is defined in this session, where worker processes can't see it, got workers={workers}. "
            "Leave workers out, or move it into a file and import it from there."
        )
    return 0


def _text(key: str, value: Any) -> Any:  # noqa: ANN401 - whatever the user gave
    if isinstance(value, (list, tuple)):
        return [_text(key, item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Component):
        _check_kind(key, value)
        members = getattr(value, "defences", ())  # of a chain
        return "+".join(map(spec_of, members)) if members else spec_of(value)
    if key in KINDS and key not in ("model", "dataset", "aux") and inspect.isclass(value):
        raise ConfigError(
            f"{key} must be given as objects or texts, got the class {value.__name__}. Call it: {value.__name__}()."
        )
    if key == "model" and not isinstance(value, str):
        return _network(value)
    if key in ("dataset", "aux") and not isinstance(value, str):
        return _dataset(value)
    return value


def _check_kind(key: str, component: Component) -> None:
    kind = KINDS.get(key, component.kind)
    if component.kind != kind:
        wanted = kind if key.endswith("s") else f"a {'data set' if kind == 'datasets' else kind.removesuffix('s')}"
        raise ConfigError(
            f"{key} must be {wanted}, got the {component.kind.removesuffix('s')} {type(component).__name__}. "
            f"See `gradveil list {kind}`."
        )


def _network(model: Any) -> str:  # noqa: ANN401 - a class, a function or a torch.nn.Module
    """Return a text for a factory, or for a network, which every run then starts from."""
    from torch import nn

    if isinstance(model, nn.Module):
        return adopt(_my(type(model).__name__), _Copies(model))
    if not callable(model):
        raise ConfigError(f"model must be a name, a torch.nn.Module or a function that returns one, got {model!r}.")
    return reference_to(model, _my(getattr(model, "__name__", type(model).__name__)))


def _my(name: str) -> str:
    """Return a name for a network that no component of the package has.

    Example:
        >>> _my("LeNet5"), _my("<lambda>")
        ('my-le-net5', 'my-lambda')
    """
    return f"my-{kebab(re.sub(r'[^0-9A-Za-z_]', '', name))}"


class _Copies:
    """A factory that returns copies of one network."""

    def __init__(self, network: Any) -> None:  # noqa: ANN401 - a torch.nn.Module
        self.network = network

    def __call__(self) -> Any:  # noqa: ANN401 - a torch.nn.Module
        from copy import deepcopy

        return deepcopy(self.network)


def _dataset(dataset: Any) -> str:  # noqa: ANN401 - a Dataset
    from gradveil.data import Dataset

    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"A data set must be a name, a path, a NamedSet or a gradveil.Dataset, got {type(dataset).__name__}."
        )
    return adopt(f"own-{kebab(''.join(c if c.isalnum() else '-' for c in dataset.name))}", dataset)
