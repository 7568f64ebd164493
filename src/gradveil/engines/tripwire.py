r"""The tripwire: a client looks at the model that it received, and at its own gradient, before anything is sent.

A malicious server needs no search for images: it broadcasts weights which make the gradient hold them. What such
weights must have, honest ones hardly ever do, and the client has all that it takes to look:

=====================  ============  ===================================================================================
check                  points to     an alarm, and what honest layers give
=====================  ============  ===================================================================================
``parallel-rows``      imprint       three rows or more with a cosine of 0.95 (0.999 if fewer than three images move
                                     them, and in convolutions, where three filters of a well-trained LeNet-5 went
                                     beyond 0.95), or responses to the client's own images that correlate by 0.999.
                                     Random rows of n entries have cosines of about :math:`1/\sqrt n` (the exact law
                                     raises the bound where n is small). Training mostly gave 0.8 at most, and
                                     correlations of 0.993.
``bias-ladder``        imprint       such rows switch on one after the other, so that they cut the client's images into
                                     four cells or more; the difference of two rows is then the gradient of a cell.
``mirrored-rows``      trap-weights  in three rows or more the positive entries are the negative ones times a constant,
                                     up to 0.1%. The sorted halves of n random entries differ by about
                                     :math:`1/\sqrt n`.
``balanced-rows``      trap-weights  z = (sum of a row) / (norm of the row) is nearly the same in too many rows. With
                                     independent signs z has a standard deviation of 1, and training widens it: a window
                                     of width d holds a row with a chance of at most d / 2.
``single-firing``      trap-weights  too many rows are positive for exactly one image. Were the rates of firing spread
                                     evenly on a logarithmic scale from 1/1000 to 1, it would be 1 / ln 1000 = 14%.
``isolated-rows``      trap-weights  too many rows of the gradient come from one image alone; the same 14%. For both,
                                     three images or more must be among them: where a training has failed, one image
                                     may be all that reaches a layer.
``isolated-cells``     imprint       the differences of rows of the gradient leave single images, three or more of them.
                                     In honest layers every row has weights of its own behind it, so that two rows
                                     with six images each do not agree on all but one.
``not-agreed``         any           layers, parameters or shapes that are not those of the network agreed on.
=====================  ============  ===================================================================================

"Too many" is a binomial test at one in a million for a layer. The layer whose output is the network's is left out,
since no gate comes behind it (and the rows of classes that nobody has are parallel in all honesty).

Does not find: a server that knows these bounds and stays below them, mostly at a price for its attack; weights that
were trained to leak (SEER), or that single out a class or a feature (fishing), for these look like any others; anything
of an honest server that is merely curious; layers other than Linear and Conv2d; convolutions that only pass the image
on; noisy rows in a convolution that looks at a few large pieces of an image (one that leaves a single pixel counts as a
Linear); one or two rows, which are enough for a batch of one image. Single images are looked for only among 32 images
or more, and four or more of each class: among fewer, honest rows have them too. False alarms must be expected of
weights that are quantised, or standardised so that every row adds up to 0.

Reference: Fowl et al. 2022 (imprint), https://arxiv.org/abs/2110.13057; Boenisch et al. 2023 (trap weights),
https://arxiv.org/abs/2112.02918. The checks are this package's own; benchmarks/tripwire.py measures them.
"""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from scipy.special import bdtrc, betaincinv
from torch import Tensor, nn

from gradveil.attacks.base import Attack, Scene
from gradveil.defences.base import Client
from gradveil.errors import TripwireError
from gradveil.networks.watch import LayerCall, watch
from gradveil.types import Batch

FEWEST_ROWS = 3
"""Rows that must be alike: two classes, or two duplicates, are honest reasons for a pair."""
FEWEST_IMAGES = 3
"""Images that must be behind a finding: where a training has failed, one may be all that reaches a layer."""
COSINE, CORRELATION, MIRROR, ALONE, SHARED = 0.95, 0.999, 1e-3, 0.95, 6
CHANCE = 1e-6
"""How often an honest layer may raise an alarm where its law is known."""
LOG_UNIFORM = 1 / math.log(1000)
WINDOWS = (0.05, 0.2)
MOST_IMAGES, MOST_ROWS = 256, 512
"""Images that responses are taken of, and rows that are compared with each other in the gradient, evenly spread."""
FEW_IMAGES, USUAL_PIXELS = 64, 3 * 32 * 32
"""Of images with more entries fewer are taken, as many as fit the same memory, but not fewer than 64."""


class TripwireWarning(UserWarning):
    """What ``tripwire = "warn"`` says of a client's round."""


@dataclass(frozen=True)
class Finding:
    """Something in a received model, or in the gradient that it makes, which honest training does not give.

    Attributes:
        check: which check found it, as in the table above.
        layer: name of the layer.
        family: the attack that it points to.
        score: the check's own statistic; how far it goes beyond the bound is in the sentence.
        sentence: what was found, for a person.
    """

    check: str
    layer: str
    family: str
    score: float
    sentence: str

    def __str__(self) -> str:
        return f"{self.title}: {self.sentence}"

    @property
    def title(self) -> str:
        """Check, layer and family in a few words."""
        return f"{self.check} in {self.layer or 'the network'} ({self.family})"


def guard(mode: str, client: Client) -> None:
    """Run all checks before a client trains: ``warn`` says what they find, ``refuse`` raises it, so nothing is sent.

    The architecture is not compared, since a client of a simulation puts what it receives into a network of its own.
    """
    found = inspect(client.model, client.data)
    if not found:
        return
    message = (
        f"The model that client {client.id} received in round {client.round} must hold no traps, got "
        f"{len(found)}: {' '.join(str(finding) for finding in found)}"
    )
    if mode == "refuse":
        raise TripwireError(f"{message} Nothing was sent; look at the server, or go on with --resume --tripwire warn.")
    announce(message)


def announce(message: str) -> None:
    """Warn of what a client found, and tell whoever is `hearing`."""
    heard = _heard.get()
    if heard is not None:
        heard.append(message)
    warnings.warn(message, TripwireWarning, stacklevel=3)


@contextmanager
def hearing() -> Iterator[list[str]]:
    """Within, the list fills with what is announced.

    Example:
        >>> with warnings.catch_warnings(action="ignore"), hearing() as heard:
        ...     announce("a trap")
        >>> heard
        ['a trap']
    """
    heard: list[str] = []
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)


_heard: ContextVar[list[str] | None] = ContextVar("heard", default=None)


def inspect(network: nn.Module, data: Batch, agreed: nn.Module | None = None) -> list[Finding]:
    """All checks, of the model and of the gradient on some of a client's images; the network is left as it is."""
    return check_model(network, data, agreed) + check_update(network, _some(data, min(_enough(data), _most(data))))


def inspect_attack(
    attack: Attack, network: nn.Module, seen: Scene, data: Batch, rng: torch.Generator, *, agreed: bool = False
) -> list[Finding]:
    """What a client with these images finds in the model that the attack makes of a copy of the network.

    With ``agreed`` the client knows the architecture, so that it finds every layer that was put in.
    """
    altered = attack.alter(copy.deepcopy(network), seen, rng)
    return inspect(altered, data, network if agreed else None)


def check_model(network: nn.Module, data: Batch, agreed: nn.Module | None = None) -> list[Finding]:
    """Look at a received model, and at its responses to some of a client's images, at most `MOST_IMAGES`.

    Args:
        network: as received; left as it is.
        data: the client's images.
        agreed: the network that the client expects, of whatever weights; None where it expects nothing.
    """
    found = [] if agreed is None else list(_not_agreed(network, agreed))
    some = _some(data, _most(data))
    few = _enough(some)
    for call in _look(network, some)[0]:
        rows = call.layer.weight.detach().flatten(1)  # (rows, entries)
        group = _parallel_weights(rows, CORRELATION) if call.inputs is None else _most_parallel(rows, call)
        if len(group) >= FEWEST_ROWS:
            found.append(_parallel(call.name, group, len(rows)))
            found += _ladder(call, group)
        others = torch.ones(len(rows), dtype=torch.bool).index_fill(0, group.cpu(), len(group) < FEWEST_ROWS)
        found += _traps(call.name, rows[others.to(rows.device)])
        if call.outputs is not None and len(some) >= few:
            fires = call.outputs[_spread(len(call.outputs), few)] > 0  # (images, rows)
            found += _single(call.name, fires & fires.sum(0).eq(1), "single-firing", "are positive for one image alone")
    return found


def check_update(network: nn.Module, batch: Batch) -> list[Finding]:
    """Look at what each image adds to the gradient of the rows of every layer that sees an image as a whole.

    A row's gradient is the sum over images of the input times a factor, the gradient by the row's output. Each image's
    factors are first divided by their norm over the layer, and images without any loss are left out: one badly
    classified image among good ones is no attack.
    """
    found: list[Finding] = []
    calls, learnt = _look(network, batch)
    for call in calls:
        if call.slopes is None:
            continue
        parts = F.normalize(call.slopes[learnt].double(), dim=1, eps=1e-100)  # (images, rows)
        if len(parts) >= _enough(batch):
            found += _single(call.name, _alone(parts), "isolated-rows", "of the gradient come from one image alone")
        images = _isolated_by_differences(parts)
        if len(images) >= FEWEST_IMAGES:
            sentence = (
                f"differences of two rows of the gradient hold single images, {len(images)} of {len(batch)} images in "
                "all; honest layers give none."
            )
            found.append(Finding("isolated-cells", call.name, "imprint", len(images) / len(batch), sentence))
    return found


@dataclass(frozen=True)
class _Call:
    """What a layer met on its way.

    For a layer that meets many places of an image, as convolutions mostly do, the tensors are None.
    """

    name: str
    layer: nn.Linear | nn.Conv2d
    inputs: Tensor | None  # (N, entries)
    outputs: Tensor | None  # (N, rows)
    slopes: Tensor | None  # (N, rows), of each image's own loss by the outputs


def _look(network: nn.Module, batch: Batch) -> tuple[list[_Call], Tensor]:
    """All Linears and convolutions but the one that gives the result, and (N,) whether an image has a loss at all."""
    model = copy.deepcopy(network).eval().requires_grad_(False)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    met: dict[str, tuple[Tensor | None, Tensor]] = {}

    def keep(call: LayerCall) -> Tensor | None:
        layer = layers[call.name]
        if call.output.numel() != len(batch) * len(layer.weight):
            return None  # many places of an image: nothing is kept, and no graph is begun
        leaf: Tensor = call.output.requires_grad_()
        met[call.name] = (_seen_once(layer, call.inputs[0].detach(), leaf), leaf)
        return leaf.clone()  # an activation may work in place

    with watch(model, layers, after=keep), torch.enable_grad():
        result = model(batch.images).requires_grad_()
        loss = F.cross_entropy(result, batch.labels, reduction="sum")
    last = next((name for name, (_, output) in reversed(met.items()) if _is_result(output, result)), None)
    flat = {name: pair for name, pair in met.items() if name != last and pair[0] is not None}
    slopes = torch.autograd.grad(loss, [result, *(output for _, output in flat.values())], allow_unused=True)
    by_name = {name: None if slope is None else slope.flatten(1) for name, slope in zip(flat, slopes[1:], strict=True)}
    calls = [
        _Call(name, layer, flat[name][0], flat[name][1].detach().flatten(1), by_name[name])
        if name in flat
        else _Call(name, layer, None, None, None)
        for name, layer in layers.items()
        if name != last
    ]
    return calls, slopes[0].ne(0).any(1)


def _is_result(output: Tensor, result: Tensor) -> bool:
    return output.numel() == result.numel() and torch.equal(output.flatten(1), result.flatten(1))


def _seen_once(layer: nn.Linear | nn.Conv2d, inputs: Tensor, output: Tensor) -> Tensor | None:
    """(N, entries) what the rows see of each image; None if they see several places of it.

    A convolution that leaves a single pixel is a Linear by another name.
    """
    if isinstance(layer, nn.Linear):
        return inputs if output.dim() == 2 else None
    if tuple(output.shape[2:]) != (1, 1) or layer.groups != 1 or isinstance(layer.padding, str):
        return None
    return F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)[:, :, 0]


def _enough(data: Batch) -> int:
    """How many images make a rarely firing row suspicious: one that answers to a class fires for four of them."""
    labels = data.labels if data.labels.dim() == 1 else data.labels.argmax(1)
    return max(32, 4 * len(set(labels.tolist())))


def _most(data: Batch) -> int:
    """How many images are looked at."""
    return min(MOST_IMAGES, max(FEW_IMAGES, MOST_IMAGES * USUAL_PIXELS // math.prod(data.images.shape[1:])))


def _some(data: Batch, count: int) -> Batch:
    return data[_spread(len(data), count).to(data.images.device)]


def _spread(length: int, count: int) -> Tensor:
    """Indices of at most ``count`` entries, evenly spread: a client's images may be sorted by class."""
    return torch.linspace(0, length - 1, min(count, length)).round().long()


def _not_agreed(network: nn.Module, agreed: nn.Module) -> Iterator[Finding]:
    received, expected = _structure(network), _structure(agreed)
    for name in received.keys() | expected.keys():
        got, rule = received.get(name, "nothing"), expected.get(name, "nothing")
        if got != rule:
            yield Finding("not-agreed", name, "any", 1.0, f"{rule} was agreed on, got {got}.")


def _structure(network: nn.Module) -> dict[str, str]:
    """What is under each name: the kind of a layer with its own parameters and buffers."""
    found = {}
    for name, layer in network.named_modules():
        own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        shapes = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in own)
        if own or not list(layer.children()):
            found[name] = f"{type(layer).__name__}({shapes})"
    return found


def _parallel_weights(rows: Tensor, least: float = COSINE) -> Tensor:
    """The rows of the largest group with parallel weights: those nearly proportional to one of them."""
    count, entries = rows.shape
    if count < FEWEST_ROWS or entries < 2:
        return torch.empty(0, dtype=torch.long)
    pairs = count * (count - 1) / 2
    by_chance = math.sqrt(1 - betaincinv((entries - 1) / 2, 0.5, CHANCE / pairs))
    return _largest_group(rows, max(least, by_chance))


def _most_parallel(rows: Tensor, call: _Call) -> Tensor:
    """The largest of three groups: rows with proportional weights, with nearly so, and with responses that correlate.

    For the last two only rows count that three images or more move: the others are alike where a training has failed.
    Responses count only where images differ in many ways: random rows must not correlate by 0.9 themselves.
    """
    groups = [_parallel_weights(rows, CORRELATION)]
    if call.inputs is not None and call.slopes is not None:
        live = (call.slopes.ne(0).sum(0) >= min(FEWEST_IMAGES, len(call.slopes))).nonzero().flatten()
        groups.append(live[_parallel_weights(rows[live])])
        centred = call.inputs - call.inputs.mean(0)  # (N, entries)
        rng = torch.Generator().manual_seed(0)
        control = torch.randn(256, rows.shape[1], generator=rng).to(rows)
        responses = F.normalize(control @ centred.T, dim=1)
        if (responses @ responses.T).fill_diagonal_(0).abs().max() < 0.9:
            groups.append(live[_largest_group(rows[live] @ centred.T, CORRELATION)])
    return max(groups, key=len)


def _largest_group(rows: Tensor, bound: float) -> Tensor:
    """Indices of the row with most others at a cosine of the bound or more, and of those; zero rows do not count."""
    if not len(rows):
        return torch.empty(0, dtype=torch.long)
    norms = rows.norm(dim=1)
    unit = F.normalize(rows, dim=1) * norms.gt(1e-9 * norms.max())[:, None]
    near: Tensor = (unit @ unit.T).abs() >= bound
    return near[int(near.sum(1).argmax())].nonzero().flatten()


def _parallel(name: str, group: Tensor, count: int) -> Finding:
    sentence = f"{len(group)} of {count} rows are parallel; honest rows are not."
    return Finding("parallel-rows", name, "imprint", len(group) / count, sentence)


def _ladder(call: _Call, group: Tensor) -> list[Finding]:
    """Parallel rows that switch on at different places, among the client's own images."""
    if call.outputs is None:
        return []
    patterns = (call.outputs[:, group] > 0).int()  # (N, group)
    sizes = Counter(map(tuple, patterns.tolist())).values()
    if len(sizes) < FEWEST_ROWS + 1:
        return []
    alone = sum(size == 1 for size in sizes)
    sentence = f"{len(group)} parallel rows cut {len(patterns)} images into {len(sizes)} cells, {alone} with one image."
    return [Finding("bias-ladder", call.name, "imprint", len(sizes) / len(patterns), sentence)]


def _traps(name: str, rows: Tensor) -> Iterator[Finding]:
    """Rows that are half negative with the same magnitudes as the other half, or nearly so."""
    count, entries = rows.shape
    if not count:
        return
    mirrored = int(_mirrored(rows).sum()) if entries >= 16 else 0
    if mirrored >= FEWEST_ROWS:
        sentence = f"the positive entries of {mirrored} of {count} rows are the negative ones times a constant."
        yield Finding("mirrored-rows", name, "trap-weights", mirrored / count, sentence)
    norms = rows.norm(dim=1)
    balances = (rows.sum(1) / norms)[norms > 0].sort().values
    balances = balances[balances.abs() < 0.2 * math.sqrt(entries)]  # beyond that a row is mostly of one sign
    for width in WINDOWS:
        inside = torch.searchsorted(balances, balances + width, right=True) - torch.arange(
            len(balances), device=rows.device
        )
        most = int(inside.max()) if len(inside) else 0
        if most >= FEWEST_ROWS and count * bdtrc(most - 1, count, width / 2) < CHANCE:
            sentence = (
                f"the sum of a row over its norm is the same up to {width:g} in {most} of {count} rows; "
                f"{count * width / 2:.1f} are expected at most."
            )
            yield Finding("balanced-rows", name, "trap-weights", most / count, sentence)
            return


def _mirrored(rows: Tensor) -> Tensor:
    """(rows,) whether the sorted positive entries are the sorted negative ones times a constant."""
    half = rows.shape[1] // 2
    ordered = rows.sort(dim=1).values
    negative, positive = -ordered[:, :half], ordered.flip(1)[:, :half]  # both from the largest magnitude down
    factor = (positive * negative).sum(1) / negative.square().sum(1).clamp_min(1e-30)
    rest = (positive - factor[:, None] * negative).norm(dim=1)
    mixed = (positive >= 0).all(1) & (negative >= 0).all(1) & (negative[:, 0] > 0)
    spread = positive.std(1, correction=0) > 0.1 * positive.mean(1)  # of a row of +c and -c nothing can be said
    found: Tensor = mixed & spread & (rest < MIRROR * positive.norm(dim=1))
    return found


def _single(name: str, owners: Tensor, check: str, what: str) -> list[Finding]:
    """A finding if more rows have a single image than a spread of rates explains, and not always the same few images.

    ``owners`` (images, rows) says which image a row has, where it has one alone.
    """
    images, count = owners.shape
    found = int(owners.any(0).sum())
    too_many = found >= FEWEST_ROWS and bdtrc(found - 1, count, LOG_UNIFORM) < CHANCE
    if not too_many or int(owners.any(1).sum()) < FEWEST_IMAGES:
        return []
    sentence = f"{found} of {count} rows {what} of {images}; {count * LOG_UNIFORM:.1f} are expected at most."
    return [Finding(check, name, "trap-weights", found / count, sentence)]


def _alone(parts: Tensor) -> Tensor:
    """(images, rows) whether an image has nearly all of a row of the parts (images, rows)."""
    sizes = parts.abs()
    return sizes > ALONE * sizes.sum(0)


def _isolated_by_differences(parts: Tensor) -> Sequence[int]:
    """Images that the difference of two rows leaves alone, of rows with `SHARED` images or more: parts is (N, rows).

    Two honest rows agree on one image by chance, at times, but not on five.
    """
    shared = parts[:, parts.ne(0).sum(0) >= SHARED].T  # (rows, N)
    found: set[int] = set()
    if not len(shared):
        return []
    shared = shared[_spread(len(shared), MOST_ROWS).to(parts.device)]
    for row in shared:
        rest = (shared - row).abs()
        total = rest.sum(1)
        single = (rest.amax(1) > ALONE * total) & (total > 1e-6 * row.abs().sum())
        found |= set(rest[single].argmax(1).tolist())
    return sorted(found)
