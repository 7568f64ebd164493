"""What this machine has of what gradveil can use: packages, data, a browser, a compiler, Flower."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from gradveil.report.browser import find_browser

State = Literal["ok", "missing", "wrong"]
OPTIONAL = {
    "flwr": ("flower", "to train between real sites, and to protect a Flower app"),
    "nvflare": ("nvflare", "for filters in NVFlare"),
}
"""Packages that only some users need: the extra that installs each, and what for."""


@dataclass(frozen=True)
class MachineFact:
    """One thing that was looked for.

    Attributes:
        what: its name.
        state: ``ok``, ``missing`` (gradveil works without it) or ``wrong`` (it does not).
        detail: what was found.
        advice: what to do about it, or what it is for; "" if nothing.
    """

    what: str
    state: State
    detail: str
    advice: str = ""


def examine(data_root: Path | None = None) -> list[MachineFact]:
    """Return all findings; nothing is downloaded, installed or changed."""
    return [*_python(), *_packages(), *_optional(), *_tools(), *_data(data_root)]


def _python() -> Iterator[MachineFact]:
    yield MachineFact("gradveil", "ok", version("gradveil"))
    found = platform.python_version()
    fits = sys.version_info >= (3, 11)
    yield MachineFact("Python", "ok" if fits else "wrong", found, "" if fits else "Use Python 3.11 or later.")
    yield MachineFact("machine", "ok", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores")


def _packages() -> Iterator[MachineFact]:
    """Yield a finding for each package that gradveil needs, against the version that it asks for."""
    from packaging.requirements import Requirement

    for text in requires("gradveil") or []:
        wanted = Requirement(text)
        if wanted.marker is not None:
            continue
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            yield MachineFact(wanted.name, "wrong", "not installed", f"pip install '{wanted}'")
            continue
        fits = wanted.specifier.contains(found, prereleases=True)
        yield MachineFact(wanted.name, "ok" if fits else "wrong", found, "" if fits else f"pip install '{wanted}'")


def _optional() -> Iterator[MachineFact]:
    from packaging.requirements import Requirement

    wanted = {Requirement(text).name: Requirement(text) for text in requires("gradveil") or []}
    for name, (extra, purpose) in OPTIONAL.items():
        install = f"pip install 'gradveil[{extra}]', {purpose}"
        try:
            found = version(name)
        except PackageNotFoundError:
            yield MachineFact(name, "missing", "not installed", install)
            continue
        fits = name not in wanted or wanted[name].specifier.contains(found, prereleases=True)
        yield MachineFact(name, "ok" if fits else "missing", found, "" if fits else f"another version: {install}")


def _tools() -> Iterator[MachineFact]:
    browser = find_browser()
    yield MachineFact(
        "browser", "ok" if browser else "missing", browser or "none of Chromium and Chrome",
        "" if browser else "needed by gradveil report --pdf only; any browser shows the pages",
    )  # fmt: skip
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    yield MachineFact(
        "C++ compiler", "ok" if compiler else "missing", compiler or "none",
        "" if compiler else "long attacks are compiled if there is one, and slower without",
    )  # fmt: skip
    import torch

    there = torch.cuda.is_available()
    detail = torch.cuda.get_device_name(0) if there else "none"
    yield MachineFact("graphics card", "ok" if there else "missing", detail, "" if there else "not needed")


def _data(given: Path | None) -> Iterator[MachineFact]:
    from gradveil.data import NamedSet, data_root
    from gradveil.registry import build, names

    root = data_root(given)
    offline = os.environ.get("GRADVEIL_OFFLINE", "0") not in {"", "0"}
    yield MachineFact(
        "data root", "ok" if root.is_dir() else "missing", str(root), "--data-root or GRADVEIL_DATA moves it"
    )
    for name in names("datasets"):
        files = build(NamedSet, name).expected(root)
        present = sum(file.path.exists() for file in files)
        if present == len(files):
            yield MachineFact(name, "ok", "there", f"gradveil data verify {name} checks it")
        else:
            way = "place its files there by hand: GRADVEIL_OFFLINE is set" if offline else "fetched at its first use"
            yield MachineFact(name, "missing", f"{present} of {len(files)} files", way)
    weights = sorted(path.name for path in (root / "weights").glob("*")) if (root / "weights").is_dir() else []
    needs = "for the metric lpips and public trunks" if not weights else ""
    yield MachineFact(
        "weights", "ok" if weights else "missing", ", ".join(weights) or "none below the data root", needs
    )
