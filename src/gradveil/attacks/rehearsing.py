"""Rehearsing decoders: those that learn from public images with the errors of the attack before them."""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from gradveil.attacks.decoder import Decoder
from gradveil.attacks.parts.imitation import Imitation, imitated, unrehearsable
from gradveil.attacks.parts.stages import Inversion, noted
from gradveil.threat import Observation, Reconstruction
from gradveil.validate import in_range


@dataclass(frozen=True)
class RehearsingDecoder(Decoder):
    """Base of decoders that learn from public images, which can have the errors of the attack before the decoder.

    Attributes:
        rehearsals: updates of played clients that the attack before the decoder inverts, to learn its errors; 0 learns
            from exact images, as is always done if encodings are granted.
    """

    rehearsals: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("rehearsals", self.rehearsals, 0)

    @property
    def share_used(self) -> float:
        """The share of guesses that are decoded, those with the least loss; all by default."""
        return 1.0

    @abstractmethod
    def decode(
        self, found: Reconstruction, seen: Observation, rng: torch.Generator, imitate: Imitation | None = None
    ) -> Reconstruction:
        """Return private images; ``imitate`` makes the errors of the guesses in what the decoder learns from."""

    def decode_after(
        self, invert: Inversion | None, found: Reconstruction, seen: Observation, rng: torch.Generator
    ) -> Reconstruction:
        """Rehearse the attack ``invert`` on played clients first, if it is not None and the round can be played."""
        if invert is None or not self.rehearsals:
            return self.decode(found, seen, rng)
        reason = unrehearsable(seen)
        imitate = None if reason else imitated(invert, seen, self.rehearsals, rng, self.share_used)
        result = self.decode(found, seen, rng, imitate)
        failed = reason or "no played update could be inverted"
        return noted(result, f"not rehearsed: {failed}") if imitate is None else result
