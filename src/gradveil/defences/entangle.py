"""Model Entanglement: replace the most revealing entries of an update by those of a guard trained on public data."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from gradveil.defences.base import Client, Defence, Server
from gradveil.defences.countermove import Arrived, Countermove
from gradveil.defences.prune import surviving
from gradveil.defences.soteria import feature_scores
from gradveil.errors import ConfigError, DefenceError
from gradveil.networks.grads import layer_inputs
from gradveil.networks.jacobians import jacobian_row_norms
from gradveil.secret_stream import SecretStream
from gradveil.types import Tensors, Update
from gradveil.validate import in_range, one_of

_TOGETHER = 8
"""Number of Jacobian products that are computed together."""
_SAME = 1e-4
"""Numbers count as equal if their relative difference is below this, as they went through float32."""


@dataclass(frozen=True)
class Entangle(Defence):
    r"""Replace the columns of each fully connected layer that use the most revealing features by a guard's columns.

    In each round a guard, a client with public data, trains before the others, and its update :math:`\Delta^0` is
    broadcast. With r the F input features of a layer (the paper's representation), and X the image, a private client
    sends

    .. math::
        s_i = \frac{|r_i|}{\|\nabla_X r_i\|_2}, \qquad
        \Delta' W_{:,i} = \begin{cases} \Delta^0 W_{:,i} & s_i \text{ among the } \mu F \text{ largest of } F \\
            \Delta W_{:,i} & \text{else} \end{cases}

    .. math::
        A = \frac 1N \sum_j \left| \frac{\Delta_j}{w_j} \right|, \qquad
        \mu = \frac{1 - 3 e^{-A}}{10\,(1 + e^{-A})} + (1 - \beta)

    where :math:`\Delta` is the change of the N weights in the round and w their values before it. Scores are means over
    a few of the client's own images, computed with its trained network. Weights with w = 0 do not count in the sum or
    in N, and :math:`\mu` is clamped to [0, 1]. The guard sends its update unchanged, and takes part in every round in
    addition to the sampled clients. It trains on the images of ``--aux``, which no private client has; without
    ``--aux`` it trains on its own part of the data, which then counts as public. A client that got no guard's update
    sends nothing.

    Threat model: an honest-but-curious server that matches all entries of individual updates.
    Does not protect: against a server that uses the guard's update, which it broadcast itself: it leaves the replaced
        entries out of the match, and the others determine the image as well. Without the guard's update it can find
        equal entries in the updates of several clients, or leave out whole layers. Collusion with the guard tells the
        server nothing new. BatchNorm's running statistics are sent unchanged and not protected.
    Guarantee: none.
    Reference: Model Entanglement for solving privacy preserving in federated learning (ICLR 2025 submission, anonymous
        authors), Section 4, Equations 9 and 10.
    Differs from the paper: the paper says that the adaptive part of Eq. 10, the fraction, lies in (0, 0.1); for A >= 0
        it lies in [-0.1, 0.1), and we use the equation as printed. The paper leaves open which entries are adjacent to
        r (``reach``), how |f'(r)| is computed (here as in Soteria, see ``probes``), on how many images, and how zero
        weights count in A.

    Attributes:
        beta: approximate share of the columns that stay the client's own, in (0.1, 0.9); the paper uses 0.7.
        guards: numbers of the clients that are guards. If there are several, each private client draws a secret random
            mean of their updates in each round.
        aggregate: whether the guards' updates are aggregated too, weighted by their numbers of images.
        reach: which entries are replaced. ``columns``: those of the layers that get r; ``rows``: also the rows and
            biases of the ``nn.Linear`` layers that produce r; ``channels``: both for convolutions too, except for the
            columns of the first one, with the norm of a channel's feature map as r. The layer that produces r is taken
            to be the one defined before, if its width matches. So filters that feed a flattened layer are not replaced,
            and networks with skip connections are replaced only in part.
        layers: names of the ``nn.Linear`` layers, joined by ``/``; if empty, all of them.
        images: number of images over which scores are averaged.
        probes: number of random forward-mode products that estimate the norms; 0 computes them exactly, by one backward
            pass per feature.
        noise: standard deviation of noise on replaced entries, relative to the root mean square of the guard's tensor.
    """

    uses_aux: ClassVar[bool] = True
    reports: ClassVar[Mapping[str, str]] = {
        "entangle_change": "A of Eq. 10: mean relative change of the weights in the round",
        "entangle_replaced": "µ of Eq. 10: share of representations whose entries are replaced by the guard's",
    }

    beta: float = 0.7
    guards: tuple[int, ...] = (0,)
    aggregate: bool = True
    reach: str = "columns"
    layers: tuple[str, ...] = ()
    images: int = 8
    probes: int = 32
    noise: float = 0.0

    def __post_init__(self) -> None:
        in_range("beta", self.beta, 0.1, 0.9, open_low=True, open_high=True)
        if not self.guards or len(set(self.guards)) != len(self.guards) or min(self.guards) < 0:
            raise ConfigError(f"guards must be different client numbers, 0 or larger, got {self.guards}. Try guards=0.")
        if len(set(self.layers)) != len(self.layers):
            raise ConfigError(f"layers must differ from each other, got {'/'.join(self.layers)}. Name each layer once.")
        one_of("reach", self.reach, ["columns", "rows", "channels"])
        in_range("images", self.images, 1)
        in_range("probes", self.probes, 0)
        in_range("noise", self.noise, 0)

    def early_clients(self, num_clients: int) -> tuple[int, ...]:
        """Return the guards. Raise `ConfigError` if a guard does not exist, or if all clients are guards."""
        if max(self.guards) >= num_clients or len(self.guards) >= num_clients:
            raise ConfigError(
                f"guards must be some of the {num_clients} clients, and not all, got {'/'.join(map(str, self.guards))}"
                ". Raise --clients, or set guards to lower numbers."
            )
        return self.guards

    def check(self, network: nn.Module, shape: tuple[int, int, int]) -> None:
        """Raise `ConfigError` unless fully connected layers are sent, including all in ``layers``."""
        try:
            self._linears(_weighted_layers(network, dict(network.named_parameters())))
        except DefenceError as error:
            raise ConfigError(str(error)) from error

    def public(self, early: Mapping[int, Update], server: Server) -> Tensors:
        """Broadcast each guard's update, with the guard's number before each tensor's name."""
        missing = [guard for guard in self.guards if guard not in early]
        if missing:
            raise DefenceError(
                f"Defence 'entangle' needs the update of guard {missing[0]} first, got none. Wait for its update."
            )
        return {f"{guard}.{name}": t for guard in self.guards for name, t in early[guard].tensors.items()}

    @property
    def counts_early(self) -> bool:
        """Return whether the guards' updates are aggregated: the setting ``aggregate``."""
        return self.aggregate

    def on_update(self, update: Update, client: Client) -> Update:
        """Replace the entries next to the most revealing features; a guard's update does not change."""
        if client.id in self.guards:
            return update
        if not len(client.data):
            raise DefenceError(
                "Defence 'entangle' ranks features of a client's images, got a client with none. Give every client "
                "images (--partition)."
            )
        if not all(bool(tensor.isfinite().all()) for tensor in update.tensors.values()):
            raise DefenceError(
                "Defence 'entangle' needs a finite update, got NaN or infinity. Lower the learning rate (--lr)."
            )
        guard = self._mixture(_guards(client.public), client.rng)
        change = relative_change(update.tensors, client.start)
        rate = replacement_rate(change, self.beta)
        client.report("entangle_change", change)
        client.report("entangle_replaced", rate)
        changed = dict(update.tensors)
        for spot in self._spots(client, update.tensors):
            number = round(rate * len(spot.scores))
            chosen = spot.scores.argsort(descending=True, stable=True)[:number]
            for name, axis in spot.entries:
                _check_guard(guard, name, changed[name])
                theirs = guard[name] + self._noise(guard[name], client.rng)
                places = [slice(None)] * axis + [chosen.to(theirs.device)]
                tensor = changed[name].clone()
                tensor[tuple(places)] = theirs[tuple(places)].to(tensor)
                changed[name] = tensor
        return replace(update, tensors=changed)

    def adaptive(self, arrived: Arrived) -> Mapping[str, Countermove]:
        """Return ``guard``, ``repeated``, ``layers`` and ``outliers``: ways to leave out the guard's entries.

        ``guard`` leaves out entries that equal those of the broadcast update (known without collusion). ``repeated``
        leaves out entries that several clients share, if there is one guard. ``layers`` leaves out the weight of every
        ``nn.Linear``. ``outliers`` uses absolute differences, which a few foreign entries change little. With ``noise``
        no entries repeat, and ``guard`` leaves out those that are more likely noise around the guard's than the
        client's own; it is often wrong, so it comes last.
        """
        seen = arrived.gradients
        matrices = {name: 0.0 for name, tensor in seen.items() if tensor.dim() == 3}  # (T, out, in)
        convolved = any(tensor.dim() > 3 for tensor in seen.values())
        moves = {}
        if convolved and self.reach != "channels":
            moves["layers"] = Countermove(weights=matrices)
        moves["outliers"] = Countermove(distance="l1")
        foreign = {} if self.noise else {"repeated": _leaving_out(repeated(seen))}
        if arrived.public:
            length = -sum(arrived.steps)
            guards = [{k: t / length for k, t in guard.items()} for guard in _guards(arrived.public)]
            foreign = {"guard": _leaving_out(foreign_entries(seen, guards, self.noise)), **foreign}
        return {**moves, **foreign} if self.noise else {**foreign, **moves}

    def _mixture(self, guards: Sequence[Tensors], rng: SecretStream) -> dict[str, Tensor]:
        """Return the update of the only guard, or a random mean of several."""
        if len(guards) != len(self.guards):
            raise DefenceError(
                f"Defence 'entangle' sends nothing without its guards' updates, got {len(guards)} of "
                f"{len(self.guards)}. Wait for the guards, or end the round."
            )
        drawn = rng.exponential((len(guards),), torch.float64)  # normalised: a flat Dirichlet
        shares = (drawn / drawn.sum()).tolist()
        mixed = {
            name: sum((share * guard[name] for share, guard in zip(shares, guards, strict=True)), torch.zeros(()))
            for name in guards[0]
        }
        if not all(bool(tensor.isfinite().all()) for tensor in mixed.values()):
            raise DefenceError(
                "Defence 'entangle' needs a finite update of its guard, got NaN or infinity. "
                "Lower the learning rate (--lr)."
            )
        return {name: tensor.to(guards[0][name]) for name, tensor in mixed.items()}

    def _noise(self, like: Tensor, rng: SecretStream) -> Tensor:
        if not self.noise:
            return torch.zeros((), dtype=like.dtype, device=like.device)
        size = self.noise * like.double().square().mean().sqrt()
        return (rng.normal(like.shape, torch.float64).to(like.device) * size).to(like)

    def _spots(self, client: Client, tensors: Tensors) -> "list[_Spot]":
        """Return the features of all protected layers with their scores, and the entries next to them."""
        network = copy.deepcopy(client.model).eval()
        weighted = _weighted_layers(network, tensors)
        linears = self._linears(weighted)
        chosen = [name for name in weighted if name in linears]
        if self.reach == "channels":
            first = next(iter(weighted))
            chosen = [
                n for n, layer in weighted.items() if n in chosen or (isinstance(layer, nn.Conv2d) and n != first)
            ]
        scores = self._scores(network, chosen, client)
        return [self._spot(name, score, weighted, tensors) for name, score in zip(chosen, scores, strict=True)]

    def _linears(self, weighted: Mapping[str, nn.Module]) -> list[str]:
        """Return the names of the fully connected layers to protect: those in ``layers``, or all."""
        linears = [name for name, layer in weighted.items() if isinstance(layer, nn.Linear)]
        if not linears:
            raise DefenceError(
                "Defence 'entangle' replaces columns of fully connected layers, but this network trains no nn.Linear, "
                "or an earlier defence in the chain replaced its weights. Use a model that ends in one (--model), or "
                "another order of the chain."
            )
        unknown = [name for name in self.layers if name not in linears]
        if unknown:
            raise DefenceError(
                f"Defence 'entangle' protects layers of type nn.Linear, got {unknown[0]!r}. "
                f"Set layers to some of: {', '.join(linears)}."
            )
        return list(self.layers or linears)

    def _spot(self, name: str, scores: Tensor, weighted: Mapping[str, nn.Module], tensors: Tensors) -> "_Spot":
        entries = [(f"{name}.weight", 1)]
        if self.reach != "columns":
            before = list(weighted)[: list(weighted).index(name)]
            producer = before[-1] if before else ""
            kind = nn.Linear if self.reach == "rows" else (nn.Linear, nn.Conv2d)
            if producer and isinstance(weighted[producer], kind):
                rows = [f"{producer}.weight", f"{producer}.bias"]
                entries += [(row, 0) for row in rows if row in tensors and len(tensors[row]) == len(scores)]
        return _Spot(scores, tuple(entries))

    def _scores(self, network: nn.Module, names: Sequence[str], client: Client) -> list[Tensor]:
        """Return, for each layer, the mean score of each input feature, or of each channel of a feature map."""
        some = client.rng.permutation(len(client.data))[: self.images]
        images = client.data.images[some.to(client.data.images.device)]
        with torch.no_grad():
            reached = layer_inputs(network, names, images)
        odd = [name for name, r in zip(names, reached, strict=True) if r.dim() not in (2, 4)]
        if odd:
            raise DefenceError(
                f"Defence 'entangle' needs layers with an input (images, features), got another at {odd[0]!r}. "
                "Set layers to other nn.Linear layers."
            )

        def features(batch: Tensor) -> Tensor:
            return torch.cat([r.flatten(1) for r in layer_inputs(network, names, batch)], 1)

        norms = jacobian_row_norms(features, images, probes=self.probes, rng=client.rng, chunk=_TOGETHER)
        parts = torch.split(norms, [r[0].numel() for r in reached], 1)
        found = []
        for name, r, own in zip(names, reached, parts, strict=True):
            if not bool(r.isfinite().all() and own.isfinite().all()):
                raise DefenceError(
                    f"Defence 'entangle' can rank finite features only, got NaN or infinity at layer {name!r}. "
                    "Lower the learning rate (--lr)."
                )
            units = r.reshape(len(r), r.shape[1], -1).norm(dim=2), own.view(len(r), r.shape[1], -1).norm(dim=2)
            found.append(feature_scores(*units).mean(0))
        return found


class _Spot(NamedTuple):
    """Scores (units,) of a layer's features, and the (tensor, axis) pairs that these features index."""

    scores: Tensor
    entries: tuple[tuple[str, int], ...]


def relative_change(change: Tensors, start: Tensors) -> float:
    """Return A of Eq. 10: the mean of abs(change / start) over all weights that were not 0; 0 if there are none.

    Example:
        >>> relative_change({"w": torch.tensor([2.0, 5.0])}, {"w": torch.tensor([4.0, 0.0])})
        0.5
    """
    total, count = 0.0, 0
    for name, tensor in change.items():
        if name in start:
            weights = start[name].to(tensor)
            there = weights != 0
            total += float((tensor[there].double() / weights[there].double()).abs().sum())
            count += int(there.sum())
    return total / count if count else 0.0


def replacement_rate(change: float, beta: float) -> float:
    """Return µ of Eq. 10 for A = ``change``: the share of features whose entries are replaced, in [0, 1].

    Example:
        >>> round(replacement_rate(0.0, 0.7), 3), round(replacement_rate(90.0, 0.7), 3)
        (0.2, 0.4)
    """
    weight = math.exp(-change)
    return min(max((1 - 3 * weight) / (10 * (1 + weight)) + (1 - beta), 0.0), 1.0)


def foreign_entries(seen: Tensors, guards: Sequence[Tensors], noise: float = 0.0) -> dict[str, Tensor]:
    """Return masks (T, ...) by name of the columns and rows of T seen gradients that are mixtures of the guards'.

    Rows are slices along the first axis of a parameter, biases included. With one guard, they must equal the guard's up
    to a factor. ``noise`` is the standard deviation of the added noise, relative to the root mean square of the guards'
    tensor.
    """
    found = {}
    for name, tensor in seen.items():
        mask = torch.zeros_like(tensor, dtype=torch.bool)
        theirs = [guard[name].to(tensor) for guard in guards if name in guard]
        if not theirs or not tensor.numel():
            found[name] = mask
            continue
        for axis in range(1, min(tensor.dim(), 3)):
            units = _units(tensor, axis)  # (T, units, numbers)
            basis = torch.stack([_units(own[None], axis)[0] for own in theirs], 2)  # (units, numbers, guards)
            slack = noise * max(float(own.square().mean().sqrt()) for own in theirs)
            near = _explained(units, basis, slack) & units.ne(0).any(2)
            mask |= near.view(len(near), *[-1 if d == axis else 1 for d in range(1, tensor.dim())])
        found[name] = mask
    return found


def _explained(units: Tensor, basis: Tensor, noise: float) -> Tensor:
    """Return (T, units) whether a unit's numbers are a mixture of the basis, up to float32 precision and noise.

    If there are too few numbers to decide, they must equal one of the basis.
    """
    if basis.shape[1] > basis.shape[2]:
        coefficients = torch.linalg.pinv(basis) @ units.permute(1, 2, 0)  # (units, guards, T)
        candidates = (basis @ coefficients).permute(2, 0, 1)[None]
    else:
        candidates = basis.permute(2, 0, 1)[:, None]
    off = (units - candidates).norm(dim=-1)  # (candidates, T, units)
    if noise:  # is noise around the basis more likely than a client's own unit of the usual mean square?
        count, spread = units.shape[-1], units.square().mean().clamp_min(torch.finfo(units.dtype).tiny)
        around = off.square() / noise**2 + 2 * count * math.log(noise)
        likelier: Tensor = around <= units.square().sum(-1) / spread + count * spread.log()
        return likelier.any(0)
    near: Tensor = off <= _SAME * units.norm(dim=-1)
    return near.any(0)


def repeated(seen: Tensors) -> dict[str, Tensor]:
    """Return masks (T, ...) by name of the entries of T seen gradients that another client's update has too.

    Example:
        >>> repeated({"w": torch.tensor([[1.0, 2.0, 0.0], [1.0, 3.0, 0.0]])})["w"]
        tensor([[ True, False, False],
                [ True, False, False]])
    """
    found = {}
    for name, tensor in seen.items():
        values, order = tensor.sort(0)
        gap = (values[1:] - values[:-1]).abs() <= _SAME * values[1:].abs()
        none = torch.zeros_like(values[:1], dtype=torch.bool)
        beside = (torch.cat([none, gap]) | torch.cat([gap, none])) & (values != 0)
        found[name] = torch.zeros_like(beside).scatter(0, order, beside)
    return found


def _units(tensor: Tensor, axis: int) -> Tensor:
    """Reshape (T, ...) to (T, units, numbers), with the units along the given axis."""
    moved = tensor.movedim(axis, 1)
    return moved.reshape(*moved.shape[:2], -1)


def _guards(public: Tensors) -> list[dict[str, Tensor]]:
    """Return the guards' updates from the broadcast."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in public.items():
        number, name = key.split(".", 1)
        found.setdefault(number, {})[name] = tensor
    return list(found.values())


def _check_guard(guard: Tensors, name: str, like: Tensor) -> None:
    if name not in guard or guard[name].shape != like.shape:
        raise DefenceError(
            f"Defence 'entangle' needs a guard's update of the same model, got none of {name!r} with the shape "
            f"{tuple(like.shape)}. Let the guard train the same model as the clients."
        )


def _leaving_out(foreign: Tensors) -> Countermove:
    return Countermove(surviving, passes_noise=True, zeroes=True, look=partial(_without, foreign))


def _without(foreign: Tensors, seen: Tensors) -> dict[str, Tensor]:
    """Return the seen gradients with zeros at foreign entries, and nowhere else; `surviving` leaves zeros out."""
    return {
        name: torch.where(foreign[name], 0.0, torch.where(tensor == 0, torch.finfo(tensor.dtype).tiny, tensor))
        for name, tensor in seen.items()
    }


def _weighted_layers(network: nn.Module, tensors: Tensors) -> dict[str, nn.Module]:
    """Return the linear and convolutional layers whose weight is sent, in the order of definition."""
    return {
        name: layer
        for name, layer in network.named_modules()
        if (isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1))
        and f"{name}.weight" in tensors
    }
