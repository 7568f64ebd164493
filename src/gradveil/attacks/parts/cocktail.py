r"""The published objective of the cocktail party attack, minimised over the unmixing matrix with Adam.

.. math:: \min_U -\frac{1}{r} \sum_i \Big(\frac{1}{D} \sum_n \log\cosh s_{in}\Big)^2
    + \lambda_D\,\mathrm{mean}_{ij}\, e^{T |\cos(u_i, u_j)|} + \lambda_{TV}\,TV(S), \qquad S = U Z

with whitened mixtures Z and rows :math:`u_i` of unit length. For layers' inputs that are no images, their mean
absolute value and the shorter of their positive and negative parts take the place of total variation.

Reference: Kariyappa et al. 2022, https://arxiv.org/abs/2209.05578, Sections 4 and 5; weights from the authors' code for
Tiny-ImageNet (images) and ImageNet (embeddings), https://github.com/facebookresearch/cocktail_party_attack.
Differs from the paper: the authors' code computes the first term but leaves it out of the sum; here it counts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.parts.optimisers import BatchedAdam, LearningRate
from gradveil.attacks.parts.priors import total_variation
from gradveil.progress import tell


class Weights(NamedTuple):
    """Weights of the objective's terms.

    Attributes:
        decorrelation: of the similarity of rows.
        temperature: T, the factor in its exponent.
        tv: of total variation.
        l1: of the mean absolute value.
        sign: of the norm of the shorter of positive and negative parts.
    """

    decorrelation: float
    temperature: float
    tv: float = 0.0
    l1: float = 0.0
    sign: float = 0.0


IMAGES, EMBEDDINGS = Weights(1.47, 12.4, tv=3.1), Weights(5.3, 7.7, l1=5.0, sign=0.13)


def whitening(mixtures: Tensor) -> Tensor:
    """Return the matrix (r, r) that makes mixtures (r, D) uncorrelated with variance 1, over their entries."""
    centred = mixtures - mixtures.mean(1, keepdim=True)
    sizes, vectors = torch.linalg.eigh(centred @ centred.T / (centred.shape[1] - 1))
    matrix: Tensor = (vectors / sizes.clamp_min(1e-14 * float(sizes[-1])).sqrt()).T
    return matrix


def objective(rows: Tensor, mixtures: Tensor, shape: tuple[int, ...], weights: Weights) -> Tensor:
    """Return the objective of rows (r, r) on whitened mixtures (r, D) of images (C, H, W), or of embeddings (D,)."""
    rows = rows / rows.norm(dim=1, keepdim=True)
    parts = rows @ mixtures
    centred = parts - parts.mean(1, keepdim=True)
    size = centred.abs()
    log_cosh = size + torch.log1p(torch.exp(-2 * size)) - torch.log(torch.tensor(2.0))
    loss: Tensor = -log_cosh.mean(1).square().mean()
    loss = loss + weights.decorrelation * (torch.exp(weights.temperature * (rows @ rows.T).abs()) - 1).mean()
    if weights.tv and len(shape) == 3:
        loss = loss + weights.tv * total_variation(parts.view(-1, *shape)).mean()
    if weights.sign:
        loss = loss + weights.sign * torch.minimum(parts.relu().norm(dim=1), (-parts).relu().norm(dim=1)).mean()
    return loss + weights.l1 * parts.abs().mean()


def published(mixtures: Tensor, shape: tuple[int, ...], iterations: int, lr: float) -> Tensor:
    """Return the unmixing matrix (r, r) of mixtures (r, D) after all steps, beginning with the whitened mixtures."""
    before, count = whitening(mixtures), len(mixtures)
    white = (before @ mixtures).float()
    weights = IMAGES if len(shape) == 3 else EMBEDDINGS

    def closure(flat: Tensor) -> tuple[Tensor, Tensor]:
        leaf = flat.detach().requires_grad_()
        loss = objective(leaf.view(count, count), white, shape, weights)
        return loss.detach()[None], torch.autograd.grad(loss, leaf)[0]

    adam = BatchedAdam(torch.eye(count).view(1, -1), LearningRate(lr, iterations))
    for step in range(iterations):
        adam.step(closure)
        tell(step / iterations)
    return adam.variables.view(count, count).to(before) @ before
