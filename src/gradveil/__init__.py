"""gradveil: train federated models, see what their shared updates leak, and stop it."""

from gradveil.attacks import Attack, build_attack
from gradveil.config import TrainSettings
from gradveil.data import Dataset, load_dataset
from gradveil.defences import Chain, Client, Defence, Server, build_defence
from gradveil.engines.simulation import Simulation
from gradveil.federated.protocol import LocalSettings
from gradveil.models import create_model
from gradveil.threat import Knowledge, Observation, Reconstruction, ThreatModel
from gradveil.threat.observe import observe
from gradveil.threat.received import received
from gradveil.types import Batch, Update

__all__ = [
    "Attack",
    "Batch",
    "Chain",
    "Client",
    "Dataset",
    "Defence",
    "Knowledge",
    "LocalSettings",
    "Observation",
    "Reconstruction",
    "Server",
    "Simulation",
    "ThreatModel",
    "TrainSettings",
    "Update",
    "build_attack",
    "build_defence",
    "create_model",
    "load_dataset",
    "observe",
    "received",
]
