"""What a server knows and sees; `observe` is the only door to private data."""

from gradveil.threat.knowledge import Knowledge, Known, PublicKnowledge, ThreatModel
from gradveil.threat.model import Observation, Reconstruction

__all__ = ["Knowledge", "Known", "Observation", "PublicKnowledge", "Reconstruction", "ThreatModel"]
