"""The page of the Python interface: every public name, from its docstring."""

from gradveil import _PLACES
from gradveil.source import ClassSource, module_path, read_module

GROUPS = {
    "Commands as functions": ("audit", "train", "attack", "check", "score", "Recorder"),
    "Data, models, components": (
        "load_dataset", "Dataset", "create_model", "build_defence", "build_attack",
        "Defence", "Chain", "Client", "Server", "Attack",
    ),
    "What a server sees": (
        "observe", "received", "Observation", "Reconstruction", "ThreatModel", "Knowledge", "Known", "PublicKnowledge",
        "Federation",
    ),
    "Trainings": ("Simulation", "TrainSettings", "Protocol", "LocalSettings", "Update", "Batch"),
}  # fmt: skip
"""Every public name of the package, in the order of the page."""
DIRECTIVE = "::: {home}\n    options:\n      heading: gradveil.{name}\n      toc_label: {name}\n      heading_level: 3"


def page() -> str:
    """Return the Markdown of the page, with a directive of mkdocstrings per name."""
    parts = ["# Python reference", "Every name that `import gradveil` offers. [A first look](../python-api.md)."]
    for head, names in GROUPS.items():
        parts += [f"## {head}", *(DIRECTIVE.format(home=_home(name), name=name) for name in names)]
    return "\n\n".join(parts) + "\n"


def _home(name: str) -> str:
    """Return the dotted place in which a public name is defined."""
    module = f"gradveil.{_PLACES[name]}"
    found = read_module(module).resolve(name)
    if isinstance(found, ClassSource):
        return f"{found.module}.{found.name}"
    there = read_module(module).imports.get(name)
    while there and module_path(there[0]).exists() and name in read_module(there[0]).imports:
        there = read_module(there[0]).imports[name]
    return f"{there[0]}.{there[1]}" if there else f"{module}.{name}"
