"""The smallest generator: three linear layers."""

import math
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from gradveil.generators.base import Generator, Latent
from gradveil.validate import in_range


@dataclass(frozen=True)
class MlpGan(Generator):
    """Linear, ReLU, Linear, ReLU, Linear, tanh; with 64-256-256-784 the generator of many MNIST tutorials.

    It is not conditioned on classes. Weights trained elsewhere load directly if their names are the layers' positions.

    Attributes:
        latent: length of the latent vector that an image is made from.
        hidden: width of both hidden layers.
    """

    hidden: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("hidden", self.hidden, 1)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Latent:
        """Build the three layers."""
        return _Mlp(self.latent, self.hidden, shape)


class _Mlp(Latent):
    def __init__(self, latent: int, hidden: int, shape: tuple[int, int, int]) -> None:
        super().__init__(latent)
        self.shape = shape
        sizes = [latent, hidden, hidden, math.prod(shape)]
        for place, (inputs, outputs) in enumerate(pairwise(sizes)):
            self.add_module(str(2 * place), nn.Linear(inputs, outputs))  # 0, 2, 4: ReLUs lie between

    def forward(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        for name in ("0", "2"):
            latents = self.get_submodule(name)(latents).relu()
        images: Tensor = self.get_submodule("4")(latents).tanh()
        return ((images + 1) / 2).view(-1, *self.shape)
