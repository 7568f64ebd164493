r"""Evidence: how well candidate images explain noisy updates of one image, over any number of rounds.

An update of one image is its gradient g, as the defence leaves it, plus Gaussian noise. In units of the noise, all that
the updates y of all rounds say about candidates j is in the products :math:`y \cdot g_j` and :math:`g_i \cdot g_j`. A
gradient is kept as the outer product of two vectors (those of a linear head are), or as one long vector beside a 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.attacks.parts.countermoves import countermove
from gradveil.defences.clip import clip_rows
from gradveil.defences.countermove import Countermove
from gradveil.errors import ConfigError
from gradveil.models.trunk import FeatureNetwork
from gradveil.networks.grads import example_gradients
from gradveil.networks.watch import input_of
from gradveil.threat import Observation
from gradveil.types import Batch

MOST_ENTRIES = 2**27
"""Numbers in the gradients of all candidates, at most, if gradients are no outer products."""
_CHUNK = 64


@dataclass(frozen=True)
class Evidence:
    """What was seen of T images, compared with N candidates.

    Attributes:
        gram: (N, N) products of the candidates' gradients, summed over rounds, in units of the noise.
        cross: (T, N) the same of what was seen with the candidates' gradients.
        noisy: whether the strength of the noise is known; if not, the unit is arbitrary.
    """

    gram: Tensor
    cross: Tensor
    noisy: bool

    @property
    def log_likelihood(self) -> Tensor:
        """The logarithm of the likelihood (T, N) of each candidate, up to a constant of the target."""
        return self.cross - self.gram.diagonal() / 2

    def of_candidates(self, rows: Tensor, draws: int, rng: torch.Generator) -> Tensor:
        """Draw what would have been seen of some candidates: products (rows * draws, N), with noise if it is known."""
        exact = self.gram[rows].repeat_interleave(draws, 0)
        if not self.noisy:
            return exact
        noise: Tensor = torch.randn(exact.shape, generator=rng, dtype=torch.float64).to(exact) @ _root(self.gram).T
        return exact + noise

    def only(self, candidates: Tensor) -> "Evidence":
        """Return the evidence about some of the candidates."""
        return replace(self, gram=self.gram[candidates][:, candidates], cross=self.cross[:, candidates])


def gathered(seen: Observation, candidates: Batch) -> Evidence:
    """Compare what was seen in all rounds with the gradients that candidates would have sent.

    An attacker who knows the defence plays what it does to a gradient, and knows the noise of each round.

    Args:
        seen: updates of a single image each.
        candidates: images with the labels that they would have.
    """
    rounds = (replace(seen, later=()), *seen.later)
    moves = [countermove(one) or Countermove() for one in rounds]
    features = _features(seen, candidates) if all(map(_only_clips, moves)) else None
    whole, left, cross = (torch.zeros((), dtype=torch.float64),) * 3
    for one, move in zip(rounds, moves, strict=True):
        scale = torch.cat([t[0].flatten() * 0 + 1 / _std(move, name) for name, t in one.updates.items()])
        arrived = torch.cat([tensor.flatten(1) for tensor in one.mean_gradients.values()], 1) * scale
        if features is None:
            gradients = _whole_gradients(one, candidates, move) * scale
            whole, cross = whole + (gradients @ gradients.T).double(), cross + (arrived @ gradients.T).double()
        else:
            own = _residuals(one, candidates, features, move) / _std(move, "head.weight")
            left, cross = left + (own @ own.T).double(), cross + _products(arrived, own, features)
    gram = whole if features is None else left * (features @ features.T).double()
    return Evidence(gram, cross, all(bool(move.noise) for move in moves))


def posterior_mean(evidence: Evidence, images: Tensor) -> Tensor:
    """Return the mean (T, pixels) of the candidates' images (N, ...), each weighted by its likelihood."""
    weights = torch.softmax(evidence.log_likelihood, 1)
    return weights @ images.flatten(1).double()


def linear_estimate(evidence: Evidence, images: Tensor, ridge: float = 1.0) -> Tensor:
    r"""Return the guesses (T, pixels) of the linear decoder with the least mean squared error over the candidates.

    With images X and gradients G of the N candidates, both centred, and noise of variance 1,

    .. math:: \hat x = \bar x + X^T (G G^T + \lambda N I)^{-1} G (y - \bar g)

    for :math:`\lambda = 1`, the strength of the noise; ``ridge`` is :math:`\lambda`.
    """
    gram, count = evidence.gram, len(evidence.gram)
    flat = images.flatten(1).double()
    rows = gram.mean(1)
    centred = gram - rows[:, None] - rows + rows.mean()
    apart = evidence.cross - rows  # G (y - mean), before G is centred
    apart = apart - apart.mean(1, keepdim=True)
    system = centred + ridge * count * torch.eye(count).to(gram)
    found: Tensor = flat.mean(0) + torch.linalg.solve(system, apart.T).T @ (flat - flat.mean(0))
    return found


def picked(evidence: Evidence, truth: Sequence[int], others: int) -> Tensor:
    """Return whether the true candidate of each target is likelier than all of the first ``others`` candidates."""
    score = evidence.log_likelihood
    own = score[torch.arange(len(score)), torch.as_tensor(truth)]
    return own > score[:, :others].max(1).values


def _features(seen: Observation, candidates: Batch) -> Tensor | None:
    """Return the features (N, D) if only the head of a feature network is trained, or None."""
    network = seen.network
    if not isinstance(network, FeatureNetwork) or list(seen.updates) != ["head.weight"]:
        return None
    with torch.no_grad():
        found: Tensor = input_of(network, "head", candidates.images)
    return found


def _residuals(one: Observation, candidates: Batch, features: Tensor, move: Countermove) -> Tensor:
    """Return the left factors (N, classes) of the gradients of a head: probabilities minus label, clipped."""
    weight = one.network.get_parameter("head.weight").detach()
    wanted = F.one_hot(candidates.labels, len(weight)) if candidates.labels.dim() == 1 else candidates.labels
    residuals: Tensor = torch.softmax(features @ weight.T, 1) - wanted.to(features)
    if move.sent is None:
        return residuals
    lengths = features.norm(dim=1, keepdim=True)  # a gradient has the norm of this product
    clipped: Tensor = move.sent({"": residuals * lengths}, {})[""] / lengths
    return clipped


def _products(arrived: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the products (T, N) of what was seen (T, classes * D) with outer products of rows of both factors."""
    count, classes = len(arrived), left.shape[1]
    along = (right @ arrived.view(count * classes, -1).T).view(-1, count, classes)  # (N, T, classes)
    return torch.einsum("ntc,nc->tn", along, left).double()


def _whole_gradients(one: Observation, candidates: Batch, move: Countermove) -> Tensor:
    """Return the gradients (N, entries) of all parameters, after the defence."""
    entries = sum(tensor[0].numel() for tensor in one.updates.values())
    if entries * len(candidates) > MOST_ENTRIES:
        raise ConfigError(
            f"Gradients of all candidates must have at most {MOST_ENTRIES:,} numbers, got {len(candidates):,} "
            f"candidates with {entries:,} each. Lower samples."
        )
    parts = []
    for start in range(0, len(candidates), _CHUNK):
        some = candidates[slice(start, start + _CHUNK)]
        each = {name: t.detach() for name, t in example_gradients(one.network, some.images, some.labels).items()}
        sent = each if move.sent is None else move.sent(each, each)
        parts.append(torch.cat([sent[name].flatten(1) for name in one.updates], 1))
    return torch.cat(parts)


def _root(gram: Tensor) -> Tensor:
    """Return a matrix R with R R^T = gram, which has no negative eigenvalues but for rounding."""
    slightly = 1e-9 * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(gram + slightly)
    if int(failed):
        values, vectors = torch.linalg.eigh(gram)
        root = vectors * values.clamp_min(0).sqrt()
    return root


def _only_clips(move: Countermove) -> bool:
    """Return whether a defence at most clips, which the left factor of a gradient shows as well as all of it."""
    return move.sent is None or (isinstance(move.sent, partial) and move.sent.func is clip_rows)


def _std(move: Countermove, name: str) -> float:
    return move.noise.get(name, 1.0)
