"""CA-FL: send a few noisy random projections of the update, from which the server recovers a sparse update."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.defences.base import Client, Defence, Server
from gradveil.defences.clip import clip_rows
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.gaussian import noise_spread, seen_noise
from gradveil.defences.laplace import Laplace
from gradveil.defences.parts.accounting import Budget, Releases
from gradveil.defences.pogz import BELOW, finite_or_zero, refuse_moved_buffers
from gradveil.errors import DefenceError
from gradveil.types import Tensors, Update
from gradveil.validate import in_range, one_of

_SENSED, _LIKE, _LAST = "sensed", "like.", "last."
_SEED, _BOUND = "seed", "bound"
_BLOCK = 256
"""Number of entries that are transformed together."""
_RANGE = 3.0
"""Limit of a projection in standard deviations, for an update with norm C: about 3 of 1000 projections exceed it."""
_LEAST = 0.01
"""The bound on the norm is at least this share of ``clip``."""
_THRESHOLD, _STEPS = 2.5, 20
"""Settings of the sparse solver, chosen by recovery of real updates of lenet5, with and without noise."""


@dataclass(frozen=True)
class CaFl(Defence):
    r"""Send a few noisy random projections of the update (compressive sensing); the server recovers a sparse update.

    With u the vector of all n entries of the update, and :math:`w^t` the model broadcast in round t, a client sends the
    :math:`m = \lceil r n \rceil` numbers

    .. math:: y = \text{clamp}_{c_t}\Big( \Phi_t\, u \min\Big(1, \frac{C_t}{\|u\|_2}\Big) \Big) + z, \qquad
        p(z_i) \propto e^{-|z_i| \varepsilon / 2 c_t}, \qquad c_t = \frac{3\, C_t}{\sqrt n}

    .. math:: C_t = \min(C,\, \max(\kappa \|w^t - w^{t-1}\|_2,\, C / 100)), \qquad C_1 = C

    :math:`\Phi_t` has orthonormal rows: it shuffles the entries, flips signs at random, applies the Hartley transform
    to blocks of 256 entries, and keeps m of the n results. In each round the server draws a new seed for it and
    broadcasts the seed and :math:`C_t`. So the noise adapts to how far the model still moves, at no privacy cost. The
    server then recovers

    .. math:: \hat x = \arg\min_x \tfrac12 \|y - \Phi x\|_2^2 + \lambda \|x\|_1, \quad
        \lambda = \frac{2.5\, \|y\|_2}{\sqrt n}, \qquad \hat u = \hat x + \Phi^\top (y - \Phi \hat x)

    by 20 steps of FISTA. The last term makes :math:`\Phi \hat u = y`, so no information in y is lost. A message also
    holds the shapes and types of the tensors, as tensors without entries. In a chain with clients that train early,
    those clients get no broadcast; they use seed 0 and bound C.

    Threat model: an honest-but-curious server that sees all updates of a client.
    Does not protect: against an attacker who compares projections, since the server knows the seed. A tenth of a
        network's entries is often more than the pixels of an image, so only the noise protects. The number of a
        client's images is assumed to be public. Noise does not cover the running statistics of BatchNorm
        (``Update.buffers``), so an update that changes them is refused.
    Guarantee: pure ε-differential privacy for the whole data of a client (neighbours replace all of its images), and
        hence for each image. With ``per=update`` the cost is ε per round, summed over rounds; under that much noise
        lenet5 with 10 clients diverges in the second round. With ``per=number``, under which networks train, ε covers
        one number only, and an update costs m ε: thousands, which is no meaningful protection. Projections and
        noise are whole steps of a grid (``parts.grid``) and the noise comes from a cipher, so that it cannot be
        computed or taken off.
    Reference: Miao et al. 2022, Compressed federated learning based on adaptive local differential privacy, ACSAC,
        https://doi.org/10.1145/3564625.3567973, as the submission Model Entanglement (ICLR 2025) describes and uses
        it: compressive sensing at a ratio of 0.1, adaptive noise, ε = 5.
    Differs from the paper: we had no access to the paper. The sensing matrix, the sparse solver, Laplace noise, the way
        the noise adapts, and ε per number are our interpretation of that description.

    Attributes:
        ratio: r, how many numbers are sent per entry of the update.
        epsilon: ε, the budget of each number or of each update, see ``per``.
        per: ``number`` spends ε on every number sent; ``update`` spends :math:`\varepsilon / m` on each, so that an
            update costs ε.
        clip: C, the bound on the norm of an update in the first round, and the highest in later rounds.
        margin: κ, the bound in later rounds in units of the last change of the global model. It should be above 1, as
            the recovered updates are smaller than the true ones.
    """

    budget_replaces: ClassVar[bool] = True

    ratio: float = 0.1
    epsilon: float = 5.0
    per: str = "number"
    clip: float = 2.0
    margin: float = 4.0

    def __post_init__(self) -> None:
        in_range("ratio", self.ratio, 0, 1, open_low=True)
        in_range("epsilon", self.epsilon, 0, open_low=True)
        one_of("per", self.per, ["number", "update"])
        in_range("clip", self.clip, 0, open_low=True)
        in_range("margin", self.margin, 0, open_low=True)

    def public(self, early: Mapping[int, Update], server: Server) -> Tensors:
        """Broadcast the seed of this round's projections, and the bound on the norm."""
        now = {name: parameter.detach().cpu().clone() for name, parameter in server.model.named_parameters()}
        changes = {name: now[name] - server.state[_LAST + name] for name in now if _LAST + name in server.state}
        server.state.update({_LAST + name: tensor for name, tensor in now.items()})
        moved = float(Update(changes, 0).norm())
        bound = min(self.clip, max(self.margin * moved, _LEAST * self.clip)) if changes else self.clip
        seed = torch.randint(2**63 - 1, (), generator=server.rng)
        return {_SEED: seed, _BOUND: torch.tensor(bound, dtype=torch.float64)}

    def on_update(self, update: Update, client: Client) -> Update:
        """Clip, project and add noise; the tensors sent have other names and shapes than the update.

        An update that is not finite counts as zero.
        """
        refuse_moved_buffers(self.name, update, client.model)
        update = finite_or_zero(update)
        tensors = {name: update.tensors[name] for name in sorted(update.tensors)}
        entries = flat({name: tensor[None] for name, tensor in tensors.items()})[0]
        sensing = self._sensing(len(entries), client.public)
        excess = max(1.0, float(entries.double().norm()) / self._bound(client.public))
        limit = self._limit(len(entries), client.public)
        measured = sensing.measure(entries / excess)
        bounded = measured.double().clamp(-limit * BELOW, limit * BELOW)
        scale = self._scale(len(entries), client.public)
        noisy = {_SENSED: Laplace(scale=scale).perturb({_SENSED: bounded}, client.rng)[_SENSED].to(measured.dtype)}
        return replace(update, tensors=noisy | {_LIKE + name: tensor[None][:0] for name, tensor in tensors.items()})

    def on_server(self, update: Update, server: Server) -> Update:
        """Recover a sparse update with the shapes that the client sent."""
        like = {name.removeprefix(_LIKE): t for name, t in sorted(update.tensors.items()) if name.startswith(_LIKE)}
        entries = sum(math.prod(tensor.shape[1:]) for tensor in like.values())
        count, measured = self._count(entries), update.tensors.get(_SENSED)
        if measured is None or measured.shape != (count,):  # before anything is drawn for the shapes that it states
            raise DefenceError(
                f"Defence 'ca-fl' needs {count} numbers for an update of {entries} entries, got "
                f"{'none' if measured is None else tuple(measured.shape)}. Use the same settings of ca-fl on clients "
                "and server."
            )
        recovered = unflat(recover(self._sensing(entries, server.public), measured)[None], like)
        return replace(update, tensors={name: tensor[0].to(like[name].dtype) for name, tensor in recovered.items()})

    def sends(self, update: Update) -> Update | None:
        """Return the form of the projections, and one tensor without entries per tensor of the update."""
        like = {_LIKE + name: tensor[None][:0] for name, tensor in update.tensors.items()}
        wide = functools.reduce(torch.promote_types, (t.dtype for t in update.tensors.values()), torch.float32)
        count = self._count(sum(tensor.numel() for tensor in update.tensors.values()))
        return replace(update, tensors={_SENSED: torch.zeros(count, dtype=wide)} | like)

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``compressed``: clip and project the guess, and compare projections mapped back to the entries."""
        seen = {name: arrived.gradients[name] for name in sorted(arrived.gradients)}
        entries = sum(math.prod(tensor.shape[1:]) for tensor in seen.values())
        sensing, spread = self._sensing(entries, arrived.public), noise_spread("update", arrived.steps)
        bound, limit = self._bound(arrived.public) * spread, self._limit(entries, arrived.public) * spread

        def look(tensors: Tensors) -> dict[str, Tensor]:
            ordered = {name: tensors[name] for name in seen}
            return unflat(sensing.spread(sensing.measure(flat(ordered))), ordered)

        def sent(guess: Tensors, _: Tensors) -> dict[str, Tensor]:
            ordered = clip_rows({name: guess[name] for name in seen}, {}, bound=bound)
            return unflat(sensing.spread(sensing.measure(flat(ordered)).clamp(-limit, limit)), ordered)

        kept = len(sensing.rows) / max(entries, 1)  # share of a number's noise variance and weight in each entry
        std = math.sqrt(2 * kept) * self._scale(entries, arrived.public)
        noise = seen_noise(arrived.gradients, std, spread, relative=False)
        return {"compressed": Countermove(sent, "l2", noise, dict.fromkeys(noise, kept), look=look)}

    def budget(self, releases: Releases) -> Budget | None:
        """Return the sum of ε over rounds (and over numbers), or None if the number of entries is unknown."""
        numbers = self._count(releases.entries) if self.per == "number" else 1
        return Budget(self.epsilon * numbers * releases.rounds, 0.0) if numbers else None

    def _count(self, entries: int) -> int:
        """Return m, how many numbers are sent for an update of ``entries`` entries."""
        return math.ceil(round(self.ratio * entries, 6))

    def _sensing(self, entries: int, public: Tensors) -> "Sensing":
        return draw_sensing(entries, self._count(entries), int(public.get(_SEED, torch.tensor(0))))

    def _bound(self, public: Tensors) -> float:
        return float(public.get(_BOUND, self.clip))

    def _limit(self, entries: int, public: Tensors) -> float:
        """Return the largest magnitude of a number before noise."""
        return _RANGE * self._bound(public) / math.sqrt(max(entries, 1))

    def _scale(self, entries: int, public: Tensors) -> float:
        """Return the scale of the Laplace noise on a number."""
        share = self.epsilon if self.per == "number" else self.epsilon / max(self._count(entries), 1)
        return 2 * self._limit(entries, public) / share


@dataclass(frozen=True, eq=False)
class Sensing:
    """A random (m, n) matrix with orthonormal rows, applied without ever being stored.

    Attributes:
        order: (n,) random permutation of the entries.
        back: (n,) its inverse.
        signs: (n,) random signs of the permuted entries, 1 or -1.
        rows: (m,) indices of the transformed entries that are kept.
    """

    order: Tensor
    back: Tensor
    signs: Tensor
    rows: Tensor

    def measure(self, entries: Tensor) -> Tensor:
        """Multiply by the matrix: (..., n) to (..., m)."""
        device = entries.device
        shuffled = entries[..., self.order.to(device)] * self.signs.to(entries)
        return _mixed(shuffled)[..., self.rows.to(device)]

    def spread(self, numbers: Tensor) -> Tensor:
        """Multiply by the transposed matrix: (..., m) to (..., n)."""
        device, shape = numbers.device, (*numbers.shape[:-1], len(self.order))
        mixed = numbers.new_zeros(shape).index_copy(-1, self.rows.to(device), numbers)
        return (_mixed(mixed) * self.signs.to(numbers))[..., self.back.to(device)]


@functools.lru_cache(maxsize=2)
def draw_sensing(entries: int, numbers: int, seed: int) -> Sensing:
    """Draw the matrix of a seed; clients and server get the same one.

    Example:
        >>> sensing = draw_sensing(1000, 100, seed=3)
        >>> numbers = torch.arange(100.0)
        >>> torch.allclose(sensing.measure(sensing.spread(numbers)), numbers, atol=1e-4)
        True
    """
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(entries, generator=rng)
    signs = torch.randint(0, 2, (entries,), generator=rng, dtype=torch.int8) * 2 - 1
    return Sensing(order, order.argsort(), signs, torch.randperm(entries, generator=rng)[:numbers])


def recover(sensing: Sensing, numbers: Tensor, threshold: float = _THRESHOLD, steps: int = _STEPS) -> Tensor:
    r"""Return a sparse vector (n,) whose projections are ``numbers`` (m,).

    FISTA solves the lasso problem; the result is then moved to the nearest vector with exactly these projections.

    Reference: Beck and Teboulle 2009, A fast iterative shrinkage-thresholding algorithm, Section 4. The step size is 1,
    as :math:`\|\Phi\| = 1`.
    """
    entries = len(sensing.order)
    penalty = threshold * float(numbers.double().norm()) / math.sqrt(max(entries, 1))
    found = numbers.new_zeros(entries)
    ahead, pace = found, 1.0
    for _ in range(steps):
        moved = ahead + sensing.spread(numbers - sensing.measure(ahead))
        last, found = found, moved - moved.clamp(-penalty, penalty)
        pace, before = (1 + math.sqrt(1 + 4 * pace**2)) / 2, pace
        ahead = found + (before - 1) / pace * (found - last)
    return found + sensing.spread(numbers - sensing.measure(found))


def flat(tensors: Tensors) -> Tensor:
    """Concatenate all entries of T gradients, given as (T, ...) by name, to (T, n) in float32 or wider."""
    wide = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()), torch.float32)
    rows = [tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None] for tensor in tensors.values()]
    return torch.cat([row.to(wide) for row in rows], 1) if rows else torch.zeros(1, 0)


def unflat(rows: Tensor, like: Tensors) -> dict[str, Tensor]:
    """Invert `flat`: split (T, n) into tensors (T, ...) by name, with the shapes of ``like`` after the first axis."""
    parts = torch.split(rows, [math.prod(tensor.shape[1:]) for tensor in like.values()], 1)
    return {
        name: part.reshape(len(rows), *tensor.shape[1:])
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


def _mixed(rows: Tensor) -> Tensor:
    """Apply the Hartley transform to each block of (..., n) and to the rest; it is its own inverse and transpose."""
    whole = rows.shape[-1] // _BLOCK * _BLOCK
    blocks = rows[..., :whole].reshape(*rows.shape[:-1], whole // _BLOCK, _BLOCK)
    rest = rows[..., whole:]
    mixed = (blocks @ _hartley(_BLOCK).to(rows)).flatten(-2)
    return torch.cat([mixed, rest @ _hartley(rest.shape[-1]).to(rows)], -1)


@functools.cache
def _hartley(size: int) -> Tensor:
    """Return the orthonormal (size, size) matrix with entries (cos + sin)(2 pi j k / size) / sqrt(size)."""
    index = torch.arange(size)
    angles = torch.outer(index, index).remainder(max(size, 1)).double() * (2 * math.pi / max(size, 1))
    return (angles.cos() + angles.sin()) / math.sqrt(max(size, 1))
