"""RMIA, offline: the probability of an image's label relative to what models trained without it give."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.shadow import ShadowAttack, log_probability
from gradveil.validate import in_range


@dataclass(frozen=True)
class Rmia(ShadowAttack):
    r"""Find training images whose label is likelier than it is on average over models with and without the image.

    .. math:: s(x) = \log \frac{p(x \mid f)}{p(x)}, \qquad
        p(x) \approx \tfrac 12 \left( (1 + a)\, \bar p_{out}(x) + 1 - a \right)

    p is the probability of the label, its mean taken over shadow models trained without the image. The models that were
    trained with it are not played: a line through :math:`p_{in} = 1` at :math:`p_{out} = 1` stands for them.

    Needs: a client's model, which the server has from its update; candidate images with labels; public images; how many
    images a client has, and for several local steps how clients train. Knowing the defence, shadow models are
    played under it, otherwise without one.
    Fails: if the model is no surer of its training images than of others; if public images are of another kind. With
    ``play=round`` it asks what this round adds: what the broadcast model remembers from earlier rounds is in the shadow
    models too.
    Reference: Zarifzadeh et al. 2024, https://arxiv.org/abs/2312.03262, the offline attack.
    Differs from the paper: it counts the population images z that x exceeds; for a single model that count only
    rises with s(x), so the ROC curve is the same, and z is not drawn. Probabilities are plain softmax. Shadow models
    are clients' rounds or small federated trainings.

    Attributes:
        every: attack the local models of every n-th round.
        images: at most this many members are tested per model, and as many non-members.
        shadows: shadow models per attacked model.
        play: what a shadow model is: round (a client's round from the same broadcast model) or training (the whole
            federated training up to that round, from the same initial weights).
        a: slope of the line by which the models trained with an image are guessed, in [0, 1].
    """

    a: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("a", self.a, 0, 1)

    def signal(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the logarithms of the labels' probabilities (N,)."""
        return log_probability(logits, labels)

    def compare(self, own: Tensor, others: Tensor) -> Tensor:
        """Return the logarithm of the ratio (N,) from log probabilities of the model (N,) and of the shadows (K, N)."""
        average = ((1 + self.a) * others.exp().mean(0) + (1 - self.a)) / 2
        return own - average.clamp_min(torch.finfo(average.dtype).tiny).log()
