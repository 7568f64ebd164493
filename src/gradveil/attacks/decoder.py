"""Decoders: attacks that turn what the network saw into the private images that a defence made it from."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradveil.attacks.base import Attack, Scene, build_attack
from gradveil.attacks.parts.stages import Inversion, Stage
from gradveil.errors import ConfigError
from gradveil.threat import Observation, Reconstruction


@dataclass(frozen=True)
class Decoder(Attack):
    """Base of the attacks on images that a defence changed before training. A subclass implements `decode`.

    Another attack first guesses the images that the network saw; `decode` turns these guesses into private images. If
    the attacker knows a defence whose countermove names the decoder, the decoder runs after every attack. As an attack
    of its own, a decoder runs the attack named by ``inner`` first.

    Attributes:
        inner: the attack whose guesses are decoded, its settings separated by ``;``: ``gs:iterations=500;tv=1e-3``.
    """

    inner: str = "encodings"

    def __post_init__(self) -> None:
        first = self._first
        if isinstance(first, Decoder):
            raise ConfigError(
                f"inner must be an attack that guesses what the network saw, got the decoder {self.inner!r}. "
                "Choose another one, for example inner=encodings."
            )
        object.__setattr__(self, "needs", type(self).needs | first.needs)

    def lacks(self, seen: Observation) -> list[str]:
        """Return what `decode` needs but is not granted, not counting what only ``inner`` needs."""
        others = {knowledge.value for knowledge in self._first.needs - type(self).needs}
        return [name for name in self.missing(seen) if name not in others] or self.unfit(seen)

    @abstractmethod
    def unfit(self, seen: Observation) -> list[str]:
        """Return what else decoding needs, for example a certain defence or several rounds; empty if it can run."""

    @abstractmethod
    def decode(self, found: Reconstruction, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Return private images from guesses (T, B, C, H, W) of what the network saw.

        Returns one result per target, or one per client if it combines a client's rounds. A guess that is NaN carries
        no information.
        """

    def decode_after(
        self, invert: Inversion | None, found: Reconstruction, seen: Observation, rng: torch.Generator
    ) -> Reconstruction:
        """Decode the guesses of the attack ``invert``, or exact ones if it is None; by default, alike."""
        return self.decode(found, seen, rng)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Guess what the network saw, by the attack ``inner``."""
        return self._first.run(seen, rng)

    def decoders(self, seen: Observation) -> Sequence[Stage]:
        """Return this decoder alone."""
        return [self]

    def alter(self, network: nn.Module, seen: Scene, rng: torch.Generator) -> nn.Module:
        """Alter the network as ``inner`` does."""
        return self._first.alter(network, seen, rng)

    def prepared_on(self, shape: tuple[int, int, int], num_classes: int) -> frozenset[int]:
        """Return the keys of the images that ``inner`` was prepared on."""
        return self._first.prepared_on(shape, num_classes)

    @property
    def _first(self) -> Attack:
        return build_attack(self.inner.replace(";", ","))
