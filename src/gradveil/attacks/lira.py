"""LiRA, offline: a likelihood-ratio test of an image's log odds against those under models trained without it."""

from dataclasses import dataclass

from torch import Tensor

from gradveil.attacks.shadow import ShadowAttack, log_odds

MANY = 64
"""Shadow models from which on each image's own spread is estimated; with fewer, one spread serves all images."""


@dataclass(frozen=True)
class Lira(ShadowAttack):
    r"""Find training images whose log odds are higher than under shadow models trained without them.

    .. math:: \phi = \log \frac{p_y}{1 - p_y}, \qquad
        \Lambda(x) = \Pr\left[ N(\mu_{out}, \sigma_{out}^2) < \phi(f, x) \right], \qquad
        s(x) = \frac{\phi(f, x) - \mu_{out}}{\sigma_{out}}

    The score s orders images as the test's :math:`\Lambda` does, but does not round to 1.

    Needs: a client's model, which the server has from its update; candidate images with labels; public images; how many
    images a client has, and for several local steps how clients train. Knowing the defence, shadow models are
    played under it, otherwise without one.
    Fails: if the model is no surer of its training images than of others; if public images are of another kind. With
    ``play=round`` it asks what this round adds: what the broadcast model remembers from earlier rounds is in the shadow
    models too.
    Reference: Carlini et al. 2022, https://arxiv.org/abs/2112.03570, Algorithm 1, its offline version, with
    one spread for all images if there are fewer than 64 shadow models.
    Differs from the paper: shadow models are clients' rounds or small federated trainings, 8 in place of 64 to 256; one
    query per image, no augmentations.

    Attributes:
        every: attack the local models of every n-th round.
        images: at most this many members are tested per model, and as many non-members.
        shadows: shadow models per attacked model.
        play: what a shadow model is: round (a client's round from the same broadcast model) or training (the whole
            federated training up to that round, from the same initial weights).
    """

    def signal(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the log odds of the labels (N,)."""
        return log_odds(logits, labels)

    def compare(self, own: Tensor, others: Tensor) -> Tensor:
        """Return how many standard deviations (N,) each signal lies above those of the shadow models (K, N)."""
        apart = own - others.mean(0)
        if len(others) < 2:
            return apart
        variance = others.var(0)
        spread = (variance if len(others) >= MANY else variance.mean()).sqrt()
        return apart / spread.clamp_min(1e-12)
