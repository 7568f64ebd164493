"""What a site received in each round, as digests that sites compare: one victim can't be given another model unnoticed.

A server that wants one client's images can send this client alone a model that isolates its update in the aggregate, or
reads images off it (Pasquini et al. 2021, https://arxiv.org/abs/2111.07380). An honest server broadcasts one model, so
the digests of all sites agree. Each site computes them from the tensors that arrived, before anything is done with
them, and adds one line to ``broadcasts-NUMBER.jsonl`` in its private folder. The lines hold nothing private.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from gradveil.errors import ConfigError
from gradveil.limits import parse_json
from gradveil.storage import make_folder, write_atomic

WHAT = {
    "model": "the model",
    "public": "what was broadcast beside the model",
    "network": "the description of images and classes",
}
"""The digests of a line, and what they are of."""


@dataclass(frozen=True)
class Heard:
    """What one site was sent in one round.

    Attributes:
        run: hash of the run's settings, as this site got them.
        round: number of the round.
        work: train or score.
        model: digest of all tensors of the model: names, shapes, types and bytes.
        public: digest of the tensors beside the model, or "" if there were none, as for clients that train early.
        network: digest of the shape of images, the number of classes and the normalisation.
    """

    run: str
    round: int
    work: str
    model: str
    public: str = ""
    network: str = ""


def note(path: Path, heard: Heard) -> bool:
    """Add a line to a site's file, unless the very same line is there; return whether it is new."""
    before = read_heard(path) if path.exists() else []
    if heard in before:
        return False
    make_folder(path.parent, 0o700)
    lines = [json.dumps(asdict(each)) + "\n" for each in (*before, heard)]
    write_atomic(path, "".join(lines).encode(), mode=0o600)
    return True


def read_heard(path: Path) -> list[Heard]:
    """Return the lines of a site's file.

    Raises:
        ConfigError: it can't be read, or has other lines than a site writes.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be a site's file of broadcasts, got one that can't be read.") from error
    return [_parsed(line, path) for line in text.splitlines()]


def _parsed(line: str, path: Path) -> Heard:
    try:
        values = parse_json(line)
        kinds = {field.name: int if field.name == "round" else str for field in fields(Heard)}
        if set(values) != set(kinds) or any(type(values[name]) is not kind for name, kind in kinds.items()):
            raise ValueError("other fields")
        return Heard(**values)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} must have a line per broadcast, as a site writes it, got another one. Ask the site for its file."
        ) from error


def disagreements(sites: Mapping[str, Sequence[Heard]]) -> list[str]:
    """Return a sentence for each broadcast that was not the same for all sites, and for each site without a common one.

    Args:
        sites: the lines of each site, by a name for it.

    Example:
        >>> one, other = Heard("r", 1, "train", "aa"), Heard("r", 1, "train", "bb")
        >>> disagreements({"a": [one], "b": [one]}), disagreements({"a": [one], "b": [one], "c": [other]})
        ([], ['Round 1 (train) of run r: the model differs: aa at a, b; bb at c.'])
    """
    found, met = [], set()
    for (run, number, work), heard in sorted(_by_round(sites).items()):
        names = {name for name, _ in heard}
        if len(names) > 1:
            met |= names
        for field, what in WHAT.items():
            values = _by_value(heard, field)
            if len(values) > 1:
                told = "; ".join(f"{value[:12]} at {', '.join(who)}" for value, who in values.items())
                found.append(f"Round {number} ({work}) of run {run[:12]}: {what} differs: {told}.")
    alone = sorted(set(sites) - met)
    return found + [f"{name} has no round in common with the others: its run had other settings." for name in alone]


def _by_round(sites: Mapping[str, Sequence[Heard]]) -> dict[tuple[str, int, str], list[tuple[str, Heard]]]:
    rounds = defaultdict[tuple[str, int, str], list[tuple[str, Heard]]](list)
    for name, lines in sites.items():
        for heard in lines:
            rounds[heard.run, heard.round, heard.work].append((name, heard))
    return rounds


def _by_value(heard: Sequence[tuple[str, Heard]], field: str) -> dict[str, list[str]]:
    """Return which sites got each value; an empty one, of a client that trains early, is left out."""
    values = defaultdict[str, list[str]](list)
    for name, each in heard:
        value = getattr(each, field)
        if value and name not in values[value]:
            values[value].append(name)
    return dict(values)
