"""Base of the defences that clip per-example gradients: checks that no image can act but through its own gradient."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from gradveil.defences.base import Client, Defence
from gradveil.defences.clip import clip_rows
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.gaussian import noise_spread, seen_noise
from gradveil.defences.parts.clipped import refuse_mixing, refuse_mixing_layers, refuse_moved_buffers
from gradveil.errors import ConfigError, DefenceError
from gradveil.networks.mixing import frozen_norms, random_images
from gradveil.types import Update


@dataclass(frozen=True)
class PerExample(Defence):
    """Base of defences whose guarantee rests on clipping each image's gradient. A subclass adds ``on_gradient``."""

    takes_own_gradient: ClassVar[bool] = True
    adds_noise: ClassVar[bool] = True

    def check(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        """Raise `ConfigError` if the network mixes images of a batch, in training or in evaluation mode."""
        for training in (True, False):
            copied = frozen_norms(network, training=training)
            try:
                refuse_mixing(self.name, copied, random_images(copied, shape))
            except DefenceError as error:
                raise ConfigError(str(error)) from error

    def check_training(self, network: nn.Module) -> None:
        """Raise `ConfigError` if a layer mixes images or tracks their statistics."""
        try:
            refuse_mixing_layers(self.name, network)
        except DefenceError as error:
            raise ConfigError(str(error)) from error

    def on_update(self, update: Update, client: Client) -> Update:
        """Raise `DefenceError` if buffers changed or the network, as trained, mixes images."""
        refuse_moved_buffers(self.name, update)
        _, *shape = client.data.images.shape
        refuse_mixing(self.name, client.model, random_images(client.model, shape))  # never on private images
        return update


def noise_countermoves(clip: float, std: float, arrived: Arrived) -> Mapping[str, Countermove]:
    """Return ``likelihood``, in units of the noise, and ``direction`` (cosine); both clip the guess's gradient.

    Args:
        clip: bound on the norm of a gradient.
        std: standard deviation of the noise in the gradient of each local step.
        arrived: what the attacker received.
    """
    clipped = partial(clip_rows, bound=clip)
    noise = seen_noise(arrived.gradients, std, noise_spread("gradient", arrived.steps), relative=False)
    return {"likelihood": Countermove(clipped, "l2", noise), "direction": Countermove(clipped, "cosine")}
