"""gradveil: train federated models, see what their shared updates leak, and stop it.

Nothing is imported before its first use, so ``import gradveil`` takes no time.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradveil.attacks import Attack, build_attack
    from gradveil.config import TrainSettings
    from gradveil.data import Dataset, load_dataset
    from gradveil.defences import Chain, Client, Defence, Server, build_defence
    from gradveil.engines.simulation import Simulation
    from gradveil.federated.protocol import LocalSettings, Protocol
    from gradveil.models import create_model
    from gradveil.runs.api import attack, audit, score, train
    from gradveil.runs.check import check
    from gradveil.runs.recorder import Recorder
    from gradveil.threat import Knowledge, Known, Observation, PublicKnowledge, Reconstruction, ThreatModel
    from gradveil.threat.observe import Federation, observe
    from gradveil.threat.received import received
    from gradveil.types import Batch, Update

_PLACES = {
    "Attack": "attacks",
    "Batch": "types",
    "Chain": "defences",
    "Client": "defences",
    "Dataset": "data",
    "Defence": "defences",
    "Federation": "threat.observe",
    "Knowledge": "threat",
    "Known": "threat",
    "LocalSettings": "federated.protocol",
    "Observation": "threat",
    "Protocol": "federated.protocol",
    "PublicKnowledge": "threat",
    "Reconstruction": "threat",
    "Recorder": "runs.recorder",
    "Server": "defences",
    "Simulation": "engines.simulation",
    "ThreatModel": "threat",
    "TrainSettings": "config",
    "Update": "types",
    "attack": "runs.api",
    "audit": "runs.api",
    "build_attack": "attacks",
    "build_defence": "defences",
    "check": "runs.check",
    "create_model": "models",
    "load_dataset": "data",
    "observe": "threat.observe",
    "received": "threat.received",
    "score": "runs.api",
    "train": "runs.api",
}
"""The module below gradveil that each public name lives in."""

__all__ = [
    "Attack",
    "Batch",
    "Chain",
    "Client",
    "Dataset",
    "Defence",
    "Federation",
    "Knowledge",
    "Known",
    "LocalSettings",
    "Observation",
    "Protocol",
    "PublicKnowledge",
    "Reconstruction",
    "Recorder",
    "Server",
    "Simulation",
    "ThreatModel",
    "TrainSettings",
    "Update",
    "attack",
    "audit",
    "build_attack",
    "build_defence",
    "check",
    "create_model",
    "load_dataset",
    "observe",
    "received",
    "score",
    "train",
]


def __getattr__(name: str) -> object:
    if name in _PLACES:
        value = globals()[name] = getattr(import_module(f"gradveil.{_PLACES[name]}"), name)
        return value
    if not name.startswith("_") and find_spec(f"gradveil.{name}"):
        return import_module(f"gradveil.{name}")
    raise AttributeError(f"module 'gradveil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
