"""Theorem 2 of Soteria: a bound on how fast FedAvg converges under the defence, with measured constants."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.engines.simulation import Simulation
from gradveil.federated.protocol import Protocol
from gradveil.types import Batch


@dataclass(frozen=True)
class Constants:
    r"""The constants of Theorem 2 for softmax regression with an L2 penalty :math:`\frac{\mu}{2} \|W\|^2`.

    Attributes:
        mu: strong convexity: the penalty's weight.
        smoothness: L: at most :math:`\mu + \frac 12 \max_k \lambda_{max}(\frac 1{n_k} X_k^T X_k)`.
        sigma: :math:`\sum_k p_k^2 \sigma_k^2`, with the largest measured variances of batch gradients.
        gradient: G^2, the largest measured squared norm of a batch gradient.
        output: the bound on the gradient at the layer's output: softmax minus a one-hot vector is at most sqrt(2) long.
        heterogeneity: :math:`\Gamma = F^* - \sum_k p_k F_k^*`.
        distance: :math:`\|W_0 - W^*\|^2`.
        optimum: F^*.
        weights: (N,) p_k.
    """

    mu: float
    smoothness: float
    sigma: float
    gradient: float
    output: float
    heterogeneity: float
    distance: float
    optimum: float
    weights: Tensor


def bound(constants: Constants, *, steps: int, local_steps: int, sampled: int, perturbation: float) -> float:
    r"""Return Theorem 2's bound on :math:`E[F(W_T)] - F^*` after T = ``steps`` local steps in total, I per round.

    .. math:: \frac{2\kappa}{\gamma + T} \Big( \frac{Q + C}{\mu} + \frac{\mu\gamma}{2} \|W_0 - W^*\|^2 \Big)

    It holds for the learning rate :math:`\eta_t = 2 / (\mu (\gamma + t))`, see `rate`.

    Args:
        constants: the measured constants.
        steps: T, all local steps.
        local_steps: I, local steps per round.
        sampled: K, clients per round.
        perturbation: the defence's epsilon.
    """
    c, extra = constants, constants.output * perturbation
    kappa = c.smoothness / c.mu
    gamma = max(8 * kappa, local_steps)
    q = float(c.weights.square().sum()) * extra + c.sigma + 6 * c.smoothness * c.heterogeneity
    q += 8 * (local_steps - 1) ** 2 * (extra + c.gradient)
    sampling = 4 / sampled * local_steps**2 * (extra + c.gradient)
    return 2 * kappa / (gamma + steps) * ((q + sampling) / c.mu + c.mu * gamma / 2 * c.distance)


def rate(constants: Constants, step: int, local_steps: int) -> float:
    """Return the theorem's learning rate at a step, counted from 0."""
    return 2 / (constants.mu * (max(8 * constants.smoothness / constants.mu, local_steps) + step))


def measure(clients: Sequence[Batch], num_classes: int, mu: float, batch_size: int, start: Tensor) -> Constants:
    """Measure the constants of softmax regression on these clients; ``start`` is W_0 (classes, pixels + 1)."""
    inputs = [_with_one(client.images) for client in clients]
    labels = [client.labels for client in clients]
    sizes = torch.tensor([len(own) for own in labels], dtype=torch.float64)
    weights = sizes / sizes.sum()
    best, optimum = _minimise(torch.cat(inputs), torch.cat(labels), num_classes, mu)
    least = [_minimise(x, y, num_classes, mu)[1] for x, y in zip(inputs, labels, strict=True)]
    largest = max(float(torch.linalg.eigvalsh(x @ x.T / len(x)).max()) for x in inputs)
    noise, squares = [], []
    for x, y in zip(inputs, labels, strict=True):
        found = [_batch_gradients(x, y, at, mu, batch_size) for at in (start.double(), best)]
        noise.append(max(float((each - each.mean(0)).square().sum((1, 2)).mean()) for each in found))
        squares.append(max(float(each.square().sum((1, 2)).max()) for each in found))
    return Constants(
        mu=mu,
        smoothness=mu + largest / 2,
        sigma=float((weights.square() * sizes.new_tensor(noise)).sum()),
        gradient=max(squares),
        output=math.sqrt(2),
        heterogeneity=max(0.0, optimum - float((weights * sizes.new_tensor(least)).sum())),
        distance=float((start.double() - best).square().sum()),
        optimum=optimum,
        weights=weights,
    )


class Convergence(NamedTuple):
    """The training loss F after each round, its minimum, and Theorem 2's bound on the final gap to that minimum."""

    losses: list[float]
    optimum: float
    bound: float


def converge(simulation: Simulation, perturbation: float) -> Convergence:
    """Train softmax regression at the theorem's learning rate, which decreases from round to round.

    Args:
        simulation: a simulation of the model ``logistic`` without normalisation, whose weight decay is mu.
        perturbation: the defence's epsilon.
    """
    settings = simulation.settings
    clients = [simulation.data.client(number) for number in range(settings.clients)]
    local_steps = Protocol.of(settings).local.num_steps(min(simulation.sizes))
    mu, classes = settings.weight_decay, simulation.dataset.num_classes
    constants = measure(clients, classes, mu, settings.batch_size, _matrix(simulation.model))
    images, labels = torch.cat([c.images for c in clients]), torch.cat([c.labels for c in clients])
    losses = []
    for number in range(1, settings.rounds + 1):
        lr = rate(constants, (number - 1) * local_steps, local_steps)
        simulation.settings = replace(settings, lr=lr)
        simulation.step(number)
        losses.append(penalised_loss(_matrix(simulation.model), images, labels, mu))
    steps = settings.rounds * local_steps
    theory = bound(
        constants, steps=steps, local_steps=local_steps, sampled=settings.num_sampled, perturbation=perturbation
    )
    return Convergence(losses, constants.optimum, theory)


def _matrix(model: Mapping[str, Tensor]) -> Tensor:
    """Return the weights of softmax regression (classes, pixels + 1), bias last."""
    weight, bias = (next(t for t in model.values() if t.dim() == dim) for dim in (2, 1))
    return torch.cat([weight, bias[:, None]], 1)


def penalised_loss(at: Tensor, images: Tensor, labels: Tensor, mu: float) -> float:
    """Return F at weights of shape (classes, pixels + 1), bias last."""
    return float(_loss(at.double(), _with_one(images), labels, mu))


def _with_one(images: Tensor) -> Tensor:
    flat = images.flatten(1).double()
    return torch.cat([flat, flat.new_ones(len(flat), 1)], 1)


def _loss(at: Tensor, x: Tensor, y: Tensor, mu: float) -> Tensor:
    return F.cross_entropy(x @ at.T, y) + mu / 2 * at.square().sum()


def _minimise(x: Tensor, y: Tensor, num_classes: int, mu: float) -> tuple[Tensor, float]:
    """Minimise F by L-BFGS with a line search in float64; return the weights and the minimum."""
    at = torch.zeros(num_classes, x.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([at], max_iter=300, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimiser.zero_grad()
        loss = _loss(at, x, y, mu)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return at.detach(), float(_loss(at.detach(), x, y, mu))


def _batch_gradients(x: Tensor, y: Tensor, at: Tensor, mu: float, batch_size: int) -> Tensor:
    """Return the gradient of each batch, (batches, classes, pixels + 1), in the order of the images."""
    found = []
    for some in torch.split(torch.arange(len(x)), batch_size):
        apart = (x[some] @ at.T).softmax(1) - F.one_hot(y[some], at.shape[0])
        found.append(apart.T @ x[some] / len(some) + mu * at)
    return torch.stack(found)
