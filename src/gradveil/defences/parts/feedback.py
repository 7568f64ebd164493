"""Error feedback: what compression drops in one round is added to what is sent in the next."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from gradveil.defences.base import Client, Perturbation
from gradveil.types import Batch, Tensors, Update


@dataclass(frozen=True)
class Compression(Perturbation, ABC):
    r"""Base of perturbations that drop a part of the tensors, with or without error feedback.

    .. math:: s_r = C(u_r + e_{r-1}), \qquad e_r = u_r + e_{r-1} - s_r, \qquad e_0 = 0

    With feedback the sum of all that was sent is :math:`\sum_r s_r = \sum_r u_r - e_R`: nothing is lost for the
    training, nor for a server that sees many rounds of the same images.

    Reference: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847, Algorithm 1.

    Attributes:
        where: ``update`` or ``gradient``.
        feedback: whether what was dropped is kept on the device and added in the next round.
    """

    feedback: bool = False

    def on_gradient(self, gradient: Tensors, batch: Batch, client: Client) -> Tensors:
        """Compress the gradient if ``where`` is ``gradient``."""
        return self._sent(gradient, client) if self.where == "gradient" else gradient

    def on_update(self, update: Update, client: Client) -> Update:
        """Compress the update if ``where`` is ``update``."""
        return replace(update, tensors=self._sent(update.tensors, client)) if self.where == "update" else update

    def _sent(self, tensors: Tensors, client: Client) -> Mapping[str, Tensor]:
        if not self.feedback:
            return self.perturb(tensors, client.rng)
        keys = {name: f"{self.spec} dropped {name}" for name in tensors}
        due = {name: tensor + client.state.get(keys[name], 0.0) for name, tensor in tensors.items()}
        sent = self.perturb(due, client.rng)
        for name, tensor in sent.items():
            client.state[keys[name]] = due[name] - tensor
        return sent
