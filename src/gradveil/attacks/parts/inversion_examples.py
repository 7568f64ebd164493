"""Examples for learned inversion: updates of clients that a server plays with public images, and these images."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.metadata import version

import torch
from torch import Tensor

from gradveil.attacks.parts.augmentation import moved
from gradveil.attacks.parts.sketches import sketched
from gradveil.errors import ConfigError, DataError
from gradveil.progress import tell
from gradveil.randomness import derive_seed, stream
from gradveil.registry import own_files
from gradveil.scratch import scratch_file
from gradveil.storage import digest_of, load_tensors, save_tensors
from gradveil.threat import Knowledge, Observation
from gradveil.threat.rehearsal import rehearse
from gradveil.types import Batch, Tensors

FEWEST = 20
"""Public images below which nothing can be learned and checked."""
CHUNK = 128
"""Clients that are played between two saves."""
HELD_OUT = 0.1
"""Share of the public images that are used only to check what was learned."""


@dataclass(frozen=True)
class Examples:
    """Updates and the images behind them.

    Attributes:
        sketches: (N, places) by tensor name.
        images: (N, B, C, H, W); those of a batch are ordered by their labels, equal labels by brightness.
        labels: (N, B).
        held: (N,) bool: examples of images that are kept for checks.
    """

    sketches: Tensors
    images: Tensor
    labels: Tensor
    held: Tensor


def played_examples(seen: Observation, count: int, width: int, seed: int) -> Examples:
    """Play ``count`` clients with public images, in chunks that a killed run need not repeat.

    Each image is one of the public ones, slightly moved unless it is shown for the first time. The first tenth of the
    examples shows only images that the others don't.
    """
    public = seen.public_data
    if len(public) < FEWEST:
        raise ConfigError(f"Learned inversion needs at least {FEWEST} public images, got {len(public)}. Grant more.")
    if public.images.shape[1:] != seen.shape:
        raise ConfigError(
            f"Public images must have the shape {seen.shape} of the task, got {tuple(public.images.shape[1:])}."
        )
    batches = list(_drawn(public, count, seen.num_examples, seed))
    held = torch.arange(count) < _num_held(count)
    key, parts = fingerprint(seen, count, width, seed), list[Tensors]()
    for start in range(0, count, CHUNK):
        own = batches[start : start + CHUNK]
        parts.append(_kept(f"{key}-{start:05d}", seen, own, width, derive_seed(seed, "play", start)))
        tell(min(1.0, (start + CHUNK) / count))
    sketches = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    images, labels = (torch.stack([getattr(batch, part) for batch in batches]) for part in ("images", "labels"))
    return Examples(sketches, images, labels, held.to(images.device))


def forget_parts(seen: Observation, count: int, width: int, seed: int) -> None:
    """Delete the chunks that `played_examples` kept."""
    key = fingerprint(seen, count, width, seed)
    for start in range(0, count, CHUNK):
        path = scratch_file(f"{key}-{start:05d}.safetensors")
        if path is not None:
            path.unlink(missing_ok=True)


def _num_held(count: int) -> int:
    return max(1, round(HELD_OUT * count))


def _drawn(public: Batch, count: int, images: int, seed: int) -> Iterator[Batch]:
    """Yield the batch of each example."""
    rng = stream(seed, "examples")
    order = torch.randperm(len(public), generator=rng)
    apart = max(images, round(HELD_OUT * len(public)))
    for own, number in ((order[:apart], _num_held(count)), (order[apart:], count - _num_held(count))):
        wanted, places = number * images, list[Tensor]()
        while sum(map(len, places)) < wanted:
            places.append(own[torch.randperm(len(own), generator=rng)])
        chosen = torch.cat(places)[:wanted].to(public.images.device)
        fresh = torch.arange(wanted) < len(own)
        pictures = public.images[chosen]
        pictures = torch.where(fresh.view(-1, 1, 1, 1).to(pictures.device), pictures, moved(pictures, rng))
        labels = public.labels[chosen]
        for start in range(0, wanted, images):
            some = slice(start, start + images)
            yield _ordered(Batch(pictures[some], labels[some], torch.ones(images, dtype=torch.bool)))


def _ordered(batch: Batch) -> Batch:
    """Return the batch ordered by label, equal labels by brightness; soft labels by their likeliest class."""
    classes = batch.labels if batch.labels.dim() == 1 else batch.labels.argmax(1)
    place = classes.double() + batch.images.flatten(1).mean(1).double() / 2
    return batch[place.argsort()]


def _kept(name: str, seen: Observation, batches: list[Batch], width: int, seed: int) -> Tensors:
    """Return the sketches of one chunk's updates, from the scratch folder if they are there."""
    path = scratch_file(f"{name}.safetensors")
    if path is not None and path.exists():
        with suppress(DataError):
            return load_tensors(path)
    device = next(iter(seen.updates.values())).device
    played = rehearse(seen, [batch.to(device) for batch in batches], seed)
    found = sketched(played.mean_gradients, width, seed=0)
    if path is not None:
        save_tensors(path, found)
    return found


def fingerprint(seen: Observation, *settings: object) -> str:
    """Return a digest of everything that the played updates depend on, the code of one's own defence included."""
    script = seen.script
    known = seen.knows(Knowledge.DEFENCE)
    spec = seen.defence.spec if known else ""
    round_played = repr((script.protocol, script.num_clients) if script else None)
    sizes = repr((seen.num_examples, seen.clients, seen.num_classes))
    facts = [version("gradveil"), spec, repr(settings), round_played, sizes, repr(seen.network)]
    broadcast = seen.public if known else {}  # only the defence looks at it
    tensors = {**seen.network.state_dict(), **{f"public {name}": tensor for name, tensor in broadcast.items()}}
    held = {"": seen.public_data, **({"aux ": script.aux} if script and script.aux is not None else {})}
    images = {
        f"{owner}{field.name}": getattr(batch, field.name) for owner, batch in held.items() for field in fields(Batch)
    }
    return digest_of(facts, own_files(spec), {**tensors, **images})
