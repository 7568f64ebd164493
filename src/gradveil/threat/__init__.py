"""What a server knows and sees; `observe` is the only door to private data."""

from gradveil.threat.model import Knowledge, Observation, Reconstruction, ThreatModel

__all__ = ["Knowledge", "Observation", "Reconstruction", "ThreatModel"]
