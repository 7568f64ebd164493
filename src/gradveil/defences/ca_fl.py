"""CA-FL: a tenth as many random mixtures of an update's entries, with noise; the server solves for a sparse update."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.defences.base import Budget, Client, Defence, Releases, Server
from gradveil.defences.clip import clip_rows
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.gaussian import noise_spread, seen_noise
from gradveil.defences.laplace import Laplace
from gradveil.defences.pogz import refuse_infinite, refuse_moved_buffers
from gradveil.errors import DefenceError
from gradveil.types import Tensors, Update
from gradveil.validate import in_range, one_of

_SENSED, _LIKE, _LAST = "sensed", "like.", "last."
_SEED, _BOUND = "seed", "bound"
_BLOCK = 256
"""Entries that are mixed with each other."""
_RANGE = 3.0
"""Standard deviations of a number that random mixing makes of an update at the bound: 3 in 1000 are beyond."""
_LEAST = 0.01
"""The bound stays above this part of ``clip``."""
_THRESHOLD, _STEPS = 2.5, 20
"""Of the sparse solver: by recovery of real updates of lenet5, with and without noise."""


@dataclass(frozen=True)
class CaFl(Defence):
    r"""Send a few noisy random mixtures of all entries (compressive sensing), from which a sparse update is solved for.

    With u all n entries of the update in one vector, and :math:`w^t` the model broadcast in round t, a client sends the
    :math:`m = \lceil r n \rceil` numbers

    .. math:: y = \text{clamp}_{c_t}\Big( \Phi_t\, u \min\Big(1, \frac{C_t}{\|u\|_2}\Big) \Big) + z, \qquad
        p(z_i) \propto e^{-|z_i| \varepsilon / 2 c_t}, \qquad c_t = \frac{3\, C_t}{\sqrt n}

    .. math:: C_t = \min(C,\, \max(\kappa \|w^t - w^{t-1}\|_2,\, C / 100)), \qquad C_1 = C

    :math:`\Phi` has orthonormal rows: it shuffles the entries, flips signs at random, takes the Hartley transform of
    each 256 of them, and keeps m of the n results. The server draws its seed anew in each round and broadcasts it with
    :math:`C_t`, so the noise adapts to how far the model still moves, at no cost in privacy. The server then takes

    .. math:: \hat x = \arg\min_x \tfrac12 \|y - \Phi x\|_2^2 + \lambda \|x\|_1, \quad
        \lambda = \frac{2.5\, \|y\|_2}{\sqrt n}, \qquad \hat u = \hat x + \Phi^\top (y - \Phi \hat x)

    by 20 steps of FISTA; the last step makes :math:`\Phi \hat u = y`, so nothing of y is lost. Beside y a message holds
    the shapes and types of the tensors, as tensors without entries. Early clients of a chain get no broadcast; their
    seed is 0 and their bound C.

    Threat model: a curious server that sees all updates of a client.
    Does not protect: against an attacker who compares in the compressed domain, for the seed is the server's: a tenth
        of a network's entries is often more than an image's pixels, so that only the noise protects. The
        number of a client's images counts as known. Running statistics of BatchNorm (``Update.buffers``) would be
        sent as they are, so an update that changes them is refused.
    Guarantee: pure ε-differential privacy of a client's whole data, replacing all of its images by others, hence of
        each image. With ``per=update`` it is ε a round, and rounds add up; under such noise lenet5 with 10 clients
        diverges in the second round. With ``per=number``, the reading that trains, ε is that of a number alone,
        and an update costs m ε: thousands, which promises nothing. The noise is pseudo-random and in floating point,
        not hardened against those who exploit that.
    Reference: Miao et al. 2022, Compressed federated learning based on adaptive local differential privacy, ACSAC,
        https://doi.org/10.1145/3564625.3567973, as the submission Model Entanglement (ICLR 2025) describes and uses
        it: compressive sensing at a ratio of 0.1, adaptive noise, ε = 5.
    Differs from the paper: it was not at hand. The sensing matrix, the sparse solver, Laplace noise, what adapts, and
        that ε counts for each number are a reading of that description.

    Attributes:
        ratio: r, numbers sent for each entry.
        epsilon: ε, the budget of a number or of a whole update.
        per: ``number`` spends ε on every number sent; ``update`` spends :math:`\varepsilon / m`, so that all together
            cost ε.
        clip: C, the bound on the norm of an update; the first round's, and the highest.
        margin: κ, the bound in units of the last change of the global model, which recovers a part of it only.
    """

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
        """The seed of this round's mixtures, and the bound."""
        now = {name: parameter.detach().cpu().clone() for name, parameter in server.model.named_parameters()}
        changes = {name: now[name] - server.state[_LAST + name] for name in now if _LAST + name in server.state}
        server.state.update({_LAST + name: tensor for name, tensor in now.items()})
        moved = float(Update(changes, 0).norm())
        bound = min(self.clip, max(self.margin * moved, _LEAST * self.clip)) if changes else self.clip
        seed = torch.randint(2**63 - 1, (), generator=server.rng)
        return {_SEED: seed, _BOUND: torch.tensor(bound, dtype=torch.float64)}

    def on_update(self, update: Update, client: Client) -> Update:
        """Clip, mix and add noise; what is sent has other names and shapes."""
        refuse_moved_buffers(self.name, update)
        refuse_infinite(self.name, update)
        tensors = {name: update.tensors[name] for name in sorted(update.tensors)}
        entries = flat({name: tensor[None] for name, tensor in tensors.items()})[0]
        sensing = self._sensing(len(entries), client.public)
        excess = max(1.0, float(entries.double().norm()) / self._bound(client.public))
        limit = self._limit(len(entries), client.public)
        measured = sensing.measure(entries / excess).clamp(-limit, limit)
        scale = self._scale(len(entries), client.public)
        noisy = Laplace(scale=scale).perturb({_SENSED: measured}, client.rng)
        return replace(update, tensors=noisy | {_LIKE + name: tensor[None][:0] for name, tensor in tensors.items()})

    def on_server(self, update: Update, server: Server) -> Update:
        """Solve for a sparse update of the shapes that were sent along."""
        like = {name.removeprefix(_LIKE): t for name, t in sorted(update.tensors.items()) if name.startswith(_LIKE)}
        entries = sum(math.prod(tensor.shape[1:]) for tensor in like.values())
        sensing, measured = self._sensing(entries, server.public), update.tensors.get(_SENSED)
        if measured is None or measured.shape != sensing.rows.shape:
            raise DefenceError(
                f"Defence 'ca-fl' needs {len(sensing.rows)} numbers for an update of {entries} entries, got "
                f"{'none' if measured is None else tuple(measured.shape)}. Give clients and server the same settings."
            )
        recovered = unflat(recover(sensing, measured)[None], like)
        return replace(update, tensors={name: tensor[0].to(like[name].dtype) for name, tensor in recovered.items()})

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Compare what was sensed: clip and mix the guess, and take both back to the entries."""
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

        kept = len(sensing.rows) / max(entries, 1)  # an entry has this part of a number's noise, and of its say
        std = math.sqrt(2 * kept) * self._scale(entries, arrived.public)
        noise = seen_noise(arrived.gradients, std, spread, relative=False)
        return {"compressed": Countermove(sent, "l2", noise, dict.fromkeys(noise, kept), look=look)}

    def budget(self, releases: Releases) -> Budget | None:
        """Pure budgets add up over rounds, and over numbers, if these are known."""
        numbers = self._count(releases.entries) if self.per == "number" else 1
        return Budget(self.epsilon * numbers * releases.rounds, 0.0) if numbers else None

    def _count(self, entries: int) -> int:
        """How many numbers are sent of so many entries."""
        return math.ceil(round(self.ratio * entries, 6))

    def _sensing(self, entries: int, public: Tensors) -> "Sensing":
        return draw_sensing(entries, self._count(entries), int(public.get(_SEED, torch.tensor(0))))

    def _bound(self, public: Tensors) -> float:
        return float(public.get(_BOUND, self.clip))

    def _limit(self, entries: int, public: Tensors) -> float:
        """No number is larger than this before noise."""
        return _RANGE * self._bound(public) / math.sqrt(max(entries, 1))

    def _scale(self, entries: int, public: Tensors) -> float:
        """Of the Laplace noise on a number."""
        share = self.epsilon if self.per == "number" else self.epsilon / max(self._count(entries), 1)
        return 2 * self._limit(entries, public) / share


@dataclass(frozen=True, eq=False)
class Sensing:
    """A random matrix with orthonormal rows, (m, n), that is never stored.

    Attributes:
        order: (n,) the entries' random order.
        back: (n,) its inverse.
        signs: (n,) 1 or -1, of the entries in their random order.
        rows: (m,) the numbers that are kept.
    """

    order: Tensor
    back: Tensor
    signs: Tensor
    rows: Tensor

    def measure(self, entries: Tensor) -> Tensor:
        """(..., n) to (..., m): the product with the matrix."""
        device = entries.device
        shuffled = entries[..., self.order.to(device)] * self.signs.to(entries)
        return _mixed(shuffled)[..., self.rows.to(device)]

    def spread(self, numbers: Tensor) -> Tensor:
        """(..., m) to (..., n): the product with the transposed matrix, whose rows are orthonormal."""
        device, shape = numbers.device, (*numbers.shape[:-1], len(self.order))
        mixed = numbers.new_zeros(shape).index_copy(-1, self.rows.to(device), numbers)
        return (_mixed(mixed) * self.signs.to(numbers))[..., self.back.to(device)]


@functools.lru_cache(maxsize=2)
def draw_sensing(entries: int, numbers: int, seed: int) -> Sensing:
    """The matrix of a seed; the same on all sides.

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
    r"""(n,) a sparse vector with exactly these ``numbers`` (m,): FISTA for the lasso, then the nearest that fits.

    Reference: Beck and Teboulle 2009, A fast iterative shrinkage-thresholding algorithm, Section 4; the step is 1, as
    :math:`\|\Phi\| = 1`.
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
    """(T, n) all entries of T gradients, each (T, ...) by name, at least in float32."""
    wide = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()), torch.float32)
    rows = [tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None] for tensor in tensors.values()]
    return torch.cat([row.to(wide) for row in rows], 1) if rows else torch.zeros(1, 0)


def unflat(rows: Tensor, like: Tensors) -> dict[str, Tensor]:
    """The inverse of `flat`: (T, n) by name, in the shapes that each (any, ...) of ``like`` has."""
    parts = torch.split(rows, [math.prod(tensor.shape[1:]) for tensor in like.values()], 1)
    return {
        name: part.reshape(len(rows), *tensor.shape[1:])
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


def _mixed(rows: Tensor) -> Tensor:
    """(..., n) the Hartley transform of each block of entries, and of the rest; it is its own inverse and transpose."""
    whole = rows.shape[-1] // _BLOCK * _BLOCK
    blocks = rows[..., :whole].reshape(*rows.shape[:-1], whole // _BLOCK, _BLOCK)
    rest = rows[..., whole:]
    mixed = (blocks @ _hartley(_BLOCK).to(rows)).flatten(-2)
    return torch.cat([mixed, rest @ _hartley(rest.shape[-1]).to(rows)], -1)


@functools.cache
def _hartley(size: int) -> Tensor:
    """(size, size) the orthonormal matrix with the entries (cos + sin)(2 pi j k / size) / sqrt(size)."""
    index = torch.arange(size)
    angles = torch.outer(index, index).remainder(max(size, 1)).double() * (2 * math.pi / max(size, 1))
    return (angles.cos() + angles.sin()) / math.sqrt(max(size, 1))
