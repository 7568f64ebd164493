r"""The tripwire: a client checks the model that it received, and its own gradient, before it sends anything.

A malicious server need not search for images: it can broadcast weights that write the images into the gradient. Such
weights have properties that honest weights hardly ever have, and the client can check for them. A row is the weights of
one output of a linear layer, or one filter of a convolution; "alarm" says when a check reports a finding:

=====================  ============  ===================================================================================
check                  points to     alarm, and the values of honest layers
=====================  ============  ===================================================================================
``parallel-rows``      imprint       Alarm: three or more rows with a cosine of at least 0.95, or with responses to the
                                     client's own images that correlate by at least 0.999. For rows that fewer than
                                     three images activate, and for convolutions, the cosine must be 0.999 (three
                                     filters of a well-trained LeNet-5 exceeded 0.95). Honest: cosines of random rows
                                     with n entries are about :math:`1/\sqrt n` (the exact distribution raises the
                                     bound if n is small); trained layers had mostly at most 0.8, and correlations up
                                     to 0.993.
``bias-ladder``        imprint       Alarm: parallel rows become active one after another, so that they divide the
                                     client's images into four or more cells. The difference of two rows of the
                                     gradient is then the gradient of one cell.
``mirrored-rows``      trap-weights  Alarm: in three or more rows the positive entries equal the negative ones times a
                                     constant, up to 0.1%. Honest: the sorted halves of n random entries differ by
                                     about :math:`1/\sqrt n`.
``balanced-rows``      trap-weights  Alarm: z = (sum of a row) / (norm of the row) is nearly the same in too many rows.
                                     Honest: with independent signs z has a standard deviation of 1, and training
                                     widens it, so z of a row lies in a window of width d with probability at most
                                     d / 2.
``single-firing``      trap-weights  Alarm: too many rows are positive for exactly one image. Honest: 14% = 1 / ln 1000
                                     of the rows, if the share of images that activate a row is spread evenly on a
                                     logarithmic scale from 1/1000 to 1.
``isolated-rows``      trap-weights  Alarm: too many rows of the gradient come from a single image. Honest: the same
                                     14%. This check and the one above need three or more different images, since after
                                     a failed training a single image may be all that reaches a layer.
``isolated-cells``     imprint       Alarm: differences of two rows of the gradient contain a single image, for three or
                                     more images. Honest: later layers weight each row differently, so two rows
                                     activated by six images each do not agree on all images but one.
``ramp``               imprint       Alarm: an activation is constant for low and for high responses of a row to the
                                     client's images, with at most 1/8 of the images between (one-shot imprint: the row
                                     reads these images); in half of a layer's rows or more. Honest: a ReLU is constant
                                     on one side only. A Hardtanh or ReLU6 that saturates raises a false alarm.
``twin-rows``          imprint       Alarm: two rows with proportional responses (correlation 0.999) become active at
                                     different thresholds, and their gradients are proportional for all images that
                                     activate both, so that their difference reads the images between. Honest: copies of
                                     a row have equal thresholds, and other rows outgoing weights of their own.
``not-agreed``         any           Alarm: layers, parameters or shapes differ from those of the agreed network.
=====================  ============  ===================================================================================

"Too many" means a binomial test at a level of one in a million per layer. The layer that gives the network's output is
not checked: no activation follows it, and honest rows of classes that no image has are parallel.

Does not find: a server that knows these bounds and stays below them, which mostly weakens its attack; weights that were
trained to leak (SEER), or that single out a class or a feature (fishing), since they look like honest weights; anything
that an honest-but-curious server does; layers other than Linear and Conv2d; convolutions that only pass the image on;
noisy rows in a convolution with few large patches (a convolution with a single output pixel is treated as a Linear);
a single ReLU row that few images activate, which suffices for one image of a batch: trained honest layers have such
rows too. ``ramp`` needs the next layer to receive the activation's output directly. The checks for single images need
at least 32 images and four per class, since with fewer images honest rows raise them too. Expect false alarms for
quantised weights, for weights that are standardised so that every row sums to 0, and for layers whose Hardtanh or ReLU6
saturates: such an honest layer reads narrow bins too.

Reference: Fowl et al. 2022 (imprint), https://arxiv.org/abs/2110.13057; Boenisch et al. 2023 (trap weights),
https://arxiv.org/abs/2112.02918. The checks are our own; benchmarks/tripwire.py measures them.
"""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from scipy.special import bdtrc, betaincinv
from torch import Tensor, nn

from gradveil.attacks.base import Attack, Scene
from gradveil.defences.base import Client
from gradveil.engines.one_bin import ramps, twins
from gradveil.errors import TripwireError
from gradveil.networks.watch import LayerCall, watch
from gradveil.types import Batch

__all__ = [
    "Finding",
    "TripwireWarning",
    "announce",
    "check_model",
    "check_update",
    "guard",
    "hearing",
    "inspect",
    "inspect_attack",
]

FEWEST_ROWS = 3
"""Number of similar rows for an alarm; honest layers may have a pair, e.g. for two classes or a duplicated row."""
FEWEST_IMAGES = 3
"""Number of images for an alarm; after a failed training a single image may be all that reaches a layer."""
COSINE, CORRELATION, MIRROR, ALONE, SHARED = 0.95, 0.999, 1e-3, 0.95, 6
CHANCE = 1e-6
"""Probability of a false alarm per honest layer, for checks whose distribution is known."""
LOG_UNIFORM = 1 / math.log(1000)
WINDOWS = (0.05, 0.2)
RAMPS = 0.5
"""Share of a layer's rows that are narrow ramps for an alarm."""
MOST_IMAGES, MOST_ROWS = 256, 512
"""Largest number of images whose responses are checked, and of gradient rows compared in pairs; evenly spaced."""
FEW_IMAGES, USUAL_PIXELS = 64, 3 * 32 * 32
"""For images with more than `USUAL_PIXELS` entries, as many as fit the same memory are used, but at least 64."""


class TripwireWarning(UserWarning):
    """The warning with which ``--tripwire warn`` reports the findings of a client's round."""


@dataclass(frozen=True)
class Finding:
    """A property of a received model, or of its gradient, that honest training does not produce.

    Attributes:
        check: name of the check, as in the table above.
        layer: name of the layer.
        family: the attack that the finding points to.
        score: the statistic of the check; the sentence compares it with the expected value.
        sentence: description for people.
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
        """Return check, layer and attack in a few words."""
        return f"{self.check} in {self.layer or 'the network'} ({self.family})"


def guard(mode: str, client: Client) -> None:
    """Run all checks before a client trains; ``warn`` reports findings, ``refuse`` raises them, so nothing is sent.

    The architecture is not compared, since a simulated client loads the received weights into its own network.
    """
    found = inspect(client.model, client.data)
    if not found:
        return
    message = (
        f"The model that client {client.id} received in round {client.round} must contain no traps, got "
        f"{len(found)}: {' '.join(str(finding) for finding in found)}"
    )
    if mode == "refuse":
        raise TripwireError(f"{message} Nothing was sent; check the server, or continue with --resume --tripwire warn.")
    announce(message)


def announce(message: str) -> None:
    """Issue a warning about a client's findings, and add it to the list of `hearing` if active."""
    heard = _heard.get()
    if heard is not None:
        heard.append(message)
    warnings.warn(message, TripwireWarning, stacklevel=3)


@contextmanager
def hearing() -> Iterator[list[str]]:
    """Collect all announced messages in a list within the ``with`` block.

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
    """Run all checks, of the model and of its gradient on some of a client's images; the network is not changed."""
    return check_model(network, data, agreed) + check_update(network, _some(data, min(_enough(data), _most(data))))


def inspect_attack(
    attack: Attack, network: nn.Module, seen: Scene, data: Batch, rng: torch.Generator, *, agreed: bool = False
) -> list[Finding]:
    """Return the findings of a client with these images in a copy of the network that the attack has altered.

    With ``agreed`` the client knows the architecture, so it finds every layer that was inserted.
    """
    altered = attack.alter(copy.deepcopy(network), seen, rng)
    return inspect(altered, data, network if agreed else None)


def check_model(network: nn.Module, data: Batch, agreed: nn.Module | None = None) -> list[Finding]:
    """Check a received model and its responses to at most `MOST_IMAGES` of a client's images.

    Args:
        network: the received network; not changed.
        data: the client's images.
        agreed: the network that the client expects, with any weights, or None to skip that comparison.
    """
    found = [] if agreed is None else list(_not_agreed(network, agreed))
    some = _some(data, _most(data))
    few = _enough(some)
    calls, learnt = _look(network, some)
    for call in calls:
        rows = call.layer.weight.detach().flatten(1)  # (rows, entries)
        group = _parallel_weights(rows, CORRELATION) if call.inputs is None else _most_parallel(rows, call)
        parallel = len(group) >= FEWEST_ROWS
        if not parallel:
            found += _one_bin(call, learnt)
        elif _tells_apart(call.inputs):
            found += [_parallel(call.name, group, len(rows)), *_ladder(call, group)]
        others = torch.ones(len(rows), dtype=torch.bool).index_fill(0, group.cpu(), not parallel)
        found += _traps(call.name, rows[others.to(rows.device)])
        if call.outputs is not None and len(some) >= few:
            fires = call.outputs[_spread(len(call.outputs), few)] > 0  # (images, rows)
            found += _single(call.name, fires & fires.sum(0).eq(1), "single-firing", "are positive for one image only")
    return found


def check_update(network: nn.Module, batch: Batch) -> list[Finding]:
    """Check how much each image contributes to each row of the gradient, in layers that get an image as a whole.

    The gradient of a row is a sum over images of the layer's input times a factor, the gradient with respect to the
    row's output. The factors of each image are first divided by their norm over the layer, and images without any loss
    are left out, since one badly classified image among well classified ones is not an attack.
    """
    found: list[Finding] = []
    calls, learnt = _look(network, batch)
    for call in calls:
        if call.slopes is None:
            continue
        parts = _parts(call.slopes, learnt)
        if len(parts) >= _enough(batch):
            found += _single(call.name, _alone(parts), "isolated-rows", "of the gradient come from one image only")
        images = _isolated_by_differences(parts)
        if len(images) >= FEWEST_IMAGES:
            sentence = (
                f"differences of two rows of the gradient contain single images, {len(images)} of {len(batch)} images "
                "in total; honest layers give none."
            )
            found.append(Finding("isolated-cells", call.name, "imprint", len(images) / len(batch), sentence))
    return found


@dataclass(frozen=True)
class _Call:
    """Inputs, outputs and output gradients of one layer.

    The tensors are None for a layer that is applied at many positions of an image, as most convolutions are.
    """

    name: str
    layer: nn.Linear | nn.Conv2d
    inputs: Tensor | None  # (N, entries)
    outputs: Tensor | None  # (N, rows)
    slopes: Tensor | None  # (N, rows), gradient of each image's own loss by the outputs
    passed: Tensor | None = (
        None  # (N, rows), what the next layer receives of the outputs, or None if it differs in size
    )


_Met = tuple[Tensor | None, Tensor]
"""The input of a layer's rows, or None if they are applied at several positions, and its output."""


def _look(network: nn.Module, batch: Batch) -> tuple[list[_Call], Tensor]:
    """Return the calls of all Linears and convolutions but the output layer, and (N,) whether an image has any loss."""
    model = copy.deepcopy(network).eval().requires_grad_(False)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    met: dict[str, _Met] = {}

    def keep(call: LayerCall) -> Tensor | None:
        layer = layers[call.name]
        if call.output.numel() != len(batch) * len(layer.weight):
            return None  # many positions per image: keep nothing, and build no autograd graph
        leaf: Tensor = call.output.requires_grad_()
        met[call.name] = (_seen_once(layer, call.inputs[0].detach(), leaf), leaf)
        return leaf.clone()  # an activation may change it in place

    with watch(model, layers, after=keep), torch.enable_grad():
        result = model(batch.images).requires_grad_()
        loss = F.cross_entropy(result, batch.labels, reduction="sum")
    last = next((name for name, (_, output) in reversed(met.items()) if _is_result(output, result)), None)
    flat = {name: pair for name, pair in met.items() if name != last and pair[0] is not None}
    slopes = torch.autograd.grad(loss, [result, *(output for _, output in flat.values())], allow_unused=True)
    by_name = {name: None if slope is None else slope.flatten(1) for name, slope in zip(flat, slopes[1:], strict=True)}
    after = dict(zip(met, [*met.values()][1:], strict=False))  # the layer that runs next
    calls = [
        _Call(name, layer, flat[name][0], flat[name][1].detach().flatten(1), by_name[name], _passed(name, met, after))
        if name in flat
        else _Call(name, layer, None, None, None)
        for name, layer in layers.items()
        if name != last
    ]
    return calls, slopes[0].ne(0).any(1)


def _passed(name: str, met: Mapping[str, _Met], after: Mapping[str, _Met]) -> Tensor | None:
    """Return the input of the layer that runs after the named one, if it has the size of this layer's output."""
    received = after[name][0] if name in after else None
    return received if received is not None and received.shape == met[name][1].flatten(1).shape else None


def _is_result(output: Tensor, result: Tensor) -> bool:
    return output.numel() == result.numel() and torch.equal(output.flatten(1), result.flatten(1))


def _seen_once(layer: nn.Linear | nn.Conv2d, inputs: Tensor, output: Tensor) -> Tensor | None:
    """Return the input (N, entries) of the rows for each image, or None if they are applied at several positions.

    A convolution with a single output pixel is equivalent to a Linear.
    """
    if isinstance(layer, nn.Linear):
        return inputs if output.dim() == 2 else None
    if tuple(output.shape[2:]) != (1, 1) or layer.groups != 1 or isinstance(layer.padding, str):
        return None
    return F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)[:, :, 0]


def _enough(data: Batch) -> int:
    """Return how many images the checks for single images need: four per class, so that no class is rare."""
    labels = data.labels if data.labels.dim() == 1 else data.labels.argmax(1)
    return max(32, 4 * len(set(labels.tolist())))


def _most(data: Batch) -> int:
    """Return the largest number of images to check."""
    return min(MOST_IMAGES, max(FEW_IMAGES, MOST_IMAGES * USUAL_PIXELS // math.prod(data.images.shape[1:])))


def _some(data: Batch, count: int) -> Batch:
    return data[_spread(len(data), count).to(data.images.device)]


def _spread(length: int, count: int) -> Tensor:
    """Return at most ``count`` evenly spaced indices, since a client's images may be sorted by class."""
    return torch.linspace(0, length - 1, min(count, length)).round().long()


def _not_agreed(network: nn.Module, agreed: nn.Module) -> Iterator[Finding]:
    received, expected = _structure(network), _structure(agreed)
    for name in received.keys() | expected.keys():
        got, rule = received.get(name, "nothing"), expected.get(name, "nothing")
        if got != rule:
            yield Finding("not-agreed", name, "any", 1.0, f"{rule} was agreed on, got {got}.")


def _structure(network: nn.Module) -> dict[str, str]:
    """Describe each layer by its type and the shapes of its own parameters and buffers."""
    found = {}
    for name, layer in network.named_modules():
        own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        shapes = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in own)
        if own or not list(layer.children()):
            found[name] = f"{type(layer).__name__}({shapes})"
    return found


def _parallel_weights(rows: Tensor, least: float = COSINE) -> Tensor:
    """Return the largest group of parallel rows: those nearly proportional to one row."""
    count, entries = rows.shape
    if count < FEWEST_ROWS or entries < 2:
        return torch.empty(0, dtype=torch.long)
    pairs = count * (count - 1) / 2
    by_chance = math.sqrt(1 - betaincinv((entries - 1) / 2, 0.5, CHANCE / pairs))
    return _largest_group(rows, max(least, by_chance))


def _most_parallel(rows: Tensor, call: _Call) -> Tensor:
    """Return the largest group of rows that are proportional, nearly proportional, or have correlated responses.

    The last two groups contain only rows that three or more images change, since after a failed training the others
    are similar. Responses are compared only if images differ enough that random rows correlate by less than 0.9.
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


def _tells_apart(inputs: Tensor | None) -> bool:
    """Return whether a layer gets more than `FEWEST_IMAGES` different inputs (N, entries), or is not known to get less.

    Training that fails can switch all rows of a layer off. Later layers then see the same input for (nearly) all
    images. Their rows may become parallel, but can't tell images apart.
    """
    return inputs is None or len(set(map(tuple, inputs.tolist()))) > min(FEWEST_IMAGES, len(inputs) - 1)


def _largest_group(rows: Tensor, bound: float) -> Tensor:
    """Return the row with the most others at a cosine of at least the bound, and these others; ignore zero rows."""
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
    """Return a finding if parallel rows become active at different thresholds among the client's own images."""
    if call.outputs is None:
        return []
    patterns = (call.outputs[:, group] > 0).int()  # (N, group)
    sizes = Counter(map(tuple, patterns.tolist())).values()
    if len(sizes) < FEWEST_ROWS + 1:
        return []
    alone = sum(size == 1 for size in sizes)
    sentence = (
        f"{len(group)} parallel rows divide {len(patterns)} images into {len(sizes)} cells, {alone} with one image."
    )
    return [Finding("bias-ladder", call.name, "imprint", len(sizes) / len(patterns), sentence)]


def _one_bin(call: _Call, learnt: Tensor) -> Iterator[Finding]:
    """Yield findings of rows that read a single bin of the images; ``learnt`` (N,) are the images with any loss."""
    if call.outputs is None or call.inputs is None:
        return
    flat = ramps(call.outputs, call.passed) if call.passed is not None else []
    count = len(call.layer.weight)
    if flat and len(flat) >= RAMPS * count:
        sentence = (
            f"{len(flat)} of {count} rows are constant for low and for high responses, and few images lie between."
        )
        yield Finding("ramp", call.name, "imprint", len(flat) / count, sentence)
    if call.slopes is not None:
        parts = _parts(call.slopes, learnt)
        for first, second in twins(call.inputs[learnt], call.outputs[learnt], parts)[:1]:
            sentence = f"rows {first} and {second} differ in their thresholds; so their gradients differ by one bin."
            yield Finding("twin-rows", call.name, "imprint", 2 / count, sentence)


def _parts(slopes: Tensor, learnt: Tensor) -> Tensor:
    """Return the share of each image that has any loss in each row of the gradient; its norm over the rows is 1."""
    return F.normalize(slopes[learnt].double(), dim=1, eps=1e-100)  # (images, rows)


def _traps(name: str, rows: Tensor) -> Iterator[Finding]:
    """Yield findings of rows whose negative half has the magnitudes of the positive half, or nearly so."""
    count, entries = rows.shape
    if not count:
        return
    mirrored = int(_mirrored(rows).sum()) if entries >= 16 else 0
    if mirrored >= FEWEST_ROWS:
        sentence = f"the positive entries of {mirrored} of {count} rows are the negative ones times a constant."
        yield Finding("mirrored-rows", name, "trap-weights", mirrored / count, sentence)
    norms = rows.norm(dim=1)
    balances = (rows.sum(1) / norms)[norms > 0].sort().values
    balances = balances[balances.abs() < 0.2 * math.sqrt(entries)]  # beyond this, most entries have the same sign
    for width in WINDOWS:
        inside = torch.searchsorted(balances, balances + width, right=True) - torch.arange(
            len(balances), device=rows.device
        )
        most = int(inside.max()) if len(inside) else 0
        if most >= FEWEST_ROWS and count * bdtrc(most - 1, count, width / 2) < CHANCE:
            sentence = (
                f"the sum of a row over its norm is the same up to {width:g} in {most} of {count} rows; "
                f"at most {count * width / 2:.1f} are expected."
            )
            yield Finding("balanced-rows", name, "trap-weights", most / count, sentence)
            return


def _mirrored(rows: Tensor) -> Tensor:
    """Return (rows,) whether the sorted positive entries are the sorted negative ones times a constant."""
    half = rows.shape[1] // 2
    ordered = rows.sort(dim=1).values
    negative, positive = -ordered[:, :half], ordered.flip(1)[:, :half]  # both in descending order of magnitude
    factor = (positive * negative).sum(1) / negative.square().sum(1).clamp_min(1e-30)
    rest = (positive - factor[:, None] * negative).norm(dim=1)
    mixed = (positive >= 0).all(1) & (negative >= 0).all(1) & (negative[:, 0] > 0)
    spread = positive.std(1, correction=0) > 0.1 * positive.mean(1)  # rows of +c and -c only say nothing
    found: Tensor = mixed & spread & (rest < MIRROR * positive.norm(dim=1))
    return found


def _single(name: str, owners: Tensor, check: str, what: str) -> list[Finding]:
    """Return a finding if too many rows belong to a single image each, and to three or more different images.

    ``owners`` (images, rows) is true for the only image of a row; all false for rows with several images, or none.
    """
    images, count = owners.shape
    found = int(owners.any(0).sum())
    too_many = found >= FEWEST_ROWS and bdtrc(found - 1, count, LOG_UNIFORM) < CHANCE
    if not too_many or int(owners.any(1).sum()) < FEWEST_IMAGES:
        return []
    sentence = f"{found} of {count} rows {what} (of {images} images); at most {count * LOG_UNIFORM:.1f} are expected."
    return [Finding(check, name, "trap-weights", found / count, sentence)]


def _alone(parts: Tensor) -> Tensor:
    """Return (images, rows) whether an image makes up nearly all of a row of ``parts`` (images, rows)."""
    sizes = parts.abs()
    return sizes > ALONE * sizes.sum(0)


def _isolated_by_differences(parts: Tensor) -> Sequence[int]:
    """Return the images that the difference of two rows isolates; ``parts`` is (N, rows).

    Only rows with at least `SHARED` images count: two honest rows may agree on one image by chance, but not on five.
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
