"""The configurations among which a recommendation is sought, and what arithmetic says of each before any training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradveil.config import TrainSettings
from gradveil.defences.parts.accounting import poisson_noise
from gradveil.errors import ConfigError
from gradveil.runs.wish import DELTA, ROUNDED, Wish

HEAD_ROUNDS = (60, 120)
"""Rounds in which a head on frozen features is trained; more rounds have more noise each."""
SUM_BITS = 22
"""Bits of the whole numbers in secure sums, as they are added up over Flower."""
LARGER = (1, 4)
"""Batches of dp-sgd, in units of the user's; all images of a client are tried too."""
UNPROVEN = {
    "secure sums alone": "none",
    "the largest 1 % of each update, in secure sums": "prune:fraction=0.99",
    "the largest 10 % of each update with noise, in secure sums": "prune:fraction=0.9+gaussian:std=0.001",
}
"""What people use without a proof: names, and defences of the user's own model."""


@dataclass(frozen=True)
class Protection:
    """A configuration that is meant to keep a wish, or the reason why it is none.

    Attributes:
        name: one per candidate.
        training: its settings; None if arithmetic alone rules it out.
        proven: whether a theorem bounds what anybody learns, as the wish asks.
        signal: how strongly the largest possible signal of the whole training stands out of its noise; only comparable
            between candidates that train the same network. None if it is not known.
        steps: local steps of the whole training, if ``signal`` is known.
        worst: the defence's text for one update that spends the whole training's budget.
        why_not: why it is not trained, or "".
    """

    name: str
    training: TrainSettings | None
    proven: bool = True
    signal: float | None = None
    steps: int = 0
    worst: str = ""
    why_not: str = ""

    def without(self, why: str) -> "Protection":
        """Return the candidate ruled out, with the reason."""
        return replace(self, training=None, why_not=why)


@dataclass(frozen=True)
class ClientSizes:
    """What arithmetic needs to know: how many images clients have, and how many numbers the user's model trains.

    Attributes:
        images: number of images of each client, none of them 0.
        entries: trained entries of the user's model.
    """

    images: Sequence[int]
    entries: int


def candidates(wish: Wish, sizes: ClientSizes, share: float = 1.0) -> list[Protection]:
    """Return all configurations, those included that arithmetic rules out.

    With a ``share`` below 1 each is planned for that share of its rounds. It then spends all of its budget in them, and
    keeps the wish as well; names stay the same.
    """
    heads = [one for model, aux in _trunks(wish).items() for one in _heads(wish, model, aux, share)]
    return [*heads, *undominated(_whole(wish, sizes, share)), *_unproven(wish, share)]


def _rounds(rounds: int, share: float) -> int:
    return max(1, round(rounds * share))


def _trunks(wish: Wish) -> dict[str, str]:
    """Return models with frozen parts, and the public images that each is made of."""
    own = wish.model.partition(":")[0]
    trunks = {wish.reference().model: wish.aux} if own in ("patches", "frozen") else {"patches": wish.aux}
    if wish.weights and own != "frozen":
        network, weights = wish.reference().model.replace(",", ";"), wish.reference().weights
        trunks[f"frozen:network={network},weights={weights}"] = wish.aux
    return trunks


def _heads(wish: Wish, model: str, aux: str, share: float) -> list[Protection]:
    """Return veil on frozen features: noise at each client or shared in secure sums, in fewer or more rounds."""
    name, found = model.partition(":")[0], []
    plain = "veil:mu={:g}" + (",unit=client" if wish.protect == "client" else "")
    for rounds in HEAD_ROUNDS:
        head = replace(
            wish.reference(), model=model, weights="", aux=aux, rounds=_rounds(rounds, share),
            defence=plain.format(wish.mu),
        )  # fmt: skip
        found.append(Protection(f"veil on {name}, noise at each client, {rounds} rounds", head, worst=head.defence))
        title = f"veil on {name}, noise shared in secure sums, {rounds} rounds"
        if wish.server == "malicious" or wish.clients < 2:
            why = "the server may break secure aggregation" if wish.clients > 1 else "there is only one client"
            found.append(Protection(title, None, why_not=why))
        else:
            shared = replace(head, defence=f"{head.defence},at=sum", aggregation="secure", sum_bits=SUM_BITS)
            found.append(Protection(title, shared, worst=shared.defence))
    return found


def _whole(wish: Wish, sizes: ClientSizes, share: float) -> list[Protection]:
    """Return dp-sgd on the user's own model, with batches of several sizes."""
    reference, name = wish.reference(), f"dp-sgd on {wish.model.partition(':')[0]}"
    if wish.protect == "client":
        return [Protection(name, None, why_not="it hides single images, not clients")]
    rounds, found = _rounds(reference.rounds, share), []
    largest = max(sizes.images)
    batches = {min(factor * (reference.batch_size or largest), largest) for factor in LARGER} | {largest}
    worst = f"dp-sgd:noise={_up(poisson_noise(wish.whole_epsilon, 1.0, 1, DELTA))}"
    for batch in sorted(batches):
        title = f"{name}, batches of {'all' if batch == largest else batch} images"
        try:
            noise, signal = _noise(wish, sizes, batch, rounds * reference.epochs)
        except ConfigError as error:
            found.append(Protection(title, None, why_not=str(error)))
            continue
        size = 0 if batch == largest else batch
        training = replace(reference, rounds=rounds, batch_size=size, defence=f"dp-sgd:noise={_up(noise)}")
        steps = rounds * reference.epochs * -(-largest // batch)
        found.append(Protection(title, training, signal=signal, steps=steps, worst=worst))
    return found


def _noise(wish: Wish, sizes: ClientSizes, batch: int, epochs: int) -> tuple[float, float]:
    """Return dp-sgd's noise for the client whose images are in most danger, and the signal that is left.

    Over S steps the clipped gradients of a batch of B add up to at most S in units of the clip, and the noise of d
    entries to sigma sqrt(S d) / B; a mean of K clients has the noise of one divided by sqrt(K).
    """
    needed = []
    for size in set(sizes.images):
        drawn, steps = min(batch, size), epochs * -(-size // min(batch, size))
        noise = poisson_noise(wish.whole_epsilon, drawn / size, steps, DELTA)
        needed.append((noise, math.sqrt(steps * len(sizes.images) / sizes.entries) * drawn / noise))
    return max(noise for noise, _ in needed), min(signal for _, signal in needed)


def undominated(same: list[Protection]) -> list[Protection]:
    """Rule out those that train a network in no more steps than another one, with less signal for their noise."""
    kept = []
    for one in same:
        better = [
            other
            for other in same
            if one.signal is not None and other.signal is not None
            if other.steps >= one.steps and other.signal > one.signal
        ]
        kept.append(one.without(f"fewer steps and more noise for its signal than {better[0].name}") if better else one)
    return kept


def _unproven(wish: Wish, share: float) -> list[Protection]:
    """Return what many use without a proof; without ``--proof measured`` it is listed and not trained."""
    found = []
    for name, defence in UNPROVEN.items():
        asked = replace(wish.reference(), defence=defence, rounds=_rounds(wish.rounds, share))
        training = replace(asked, aggregation="secure", sum_bits=SUM_BITS) if wish.clients > 1 else None
        one = Protection(f"{name} (no proof)", training, proven=False, worst=defence)
        if wish.proof == "required":
            one = one.without("it has no proof; --proof measured attacks it")
        elif training is None:
            one = one.without("there is only one client")
        found.append(one)
    return found


def _up(noise: float) -> str:
    return f"{(int(noise * 10**ROUNDED) + 1) / 10**ROUNDED:g}"
