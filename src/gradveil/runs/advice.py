"""What a user does with a recommendation: settings for `train` and for Flower, commands, and what stays unprotected."""

import math
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradveil.config import TrainSettings, to_toml, values_to_toml
from gradveil.defences.parts.gaussian_dp import epsilon_of, identification_bound
from gradveil.runs.candidates import Protection
from gradveil.runs.wish import DELTA, Wish
from gradveil.storage import write_atomic

ALWAYS = ("clients", "dataset", "defence", "model", "rounds", "seed", "batch_size", "epochs", "lr", "momentum")
"""Settings that a Flower app states even if they have their default values."""
PLACES = ("device",)
"""Settings of the machine that was used here; each site has its own."""


@dataclass(frozen=True)
class Advice:
    """Files and commands for a chosen configuration; paths are of the recommendation's folder.

    Attributes:
        train: the command that trains the configuration.
        attack: the command that attacks it in the worst case.
        flower: the command that starts it over Flower.
        site: the policy with which a site agrees to it, as TOML.
        unprotected: what it does not protect.
    """

    train: str
    attack: str
    flower: str
    site: str
    unprotected: list[str]


def advise(chosen: Protection, wish: Wish, out: Path, attack_settings: str, data_root: Path | None) -> Advice:
    """Write ``recommended.toml``, ``flower.toml`` and ``site.toml``; return the commands and what stays unprotected."""
    training = chosen.training
    if training is None:
        raise ValueError("a chosen candidate has settings")
    site = values_to_toml(site_policy(training)).decode()
    write_atomic(out / "recommended.toml", to_toml(training))
    write_atomic(out / "flower.toml", values_to_toml(run_config(training)))
    write_atomic(out / "site.toml", site.encode())
    root = f" --data-root {shlex.quote(str(data_root))}" if data_root else ""

    def given(name: str) -> str:
        return shlex.quote(str(out / name))

    return Advice(
        train=f"gradveil train --config {given('recommended.toml')}{root} --out runs/protected",
        attack=f"gradveil audit --config {given(attack_settings)}{root} --out runs/attacked" if attack_settings else "",
        flower=f"flwr run examples/flower study --stream --run-config {given('flower.toml')}",
        site=site,
        unprotected=unprotected(chosen, wish),
    )


def run_config(training: TrainSettings) -> dict[str, Any]:
    """Return the settings as a Flower app's run config: keys with dashes, lists as texts, defaults left out."""
    usual, mine = asdict(TrainSettings()), asdict(training)
    told = {key: value for key, value in mine.items() if key not in PLACES and (key in ALWAYS or value != usual[key])}
    return {
        key.replace("_", "-"): "/".join(map(str, value)) if isinstance(value, tuple) else value
        for key, value in told.items()
    }


def site_policy(training: TrainSettings) -> dict[str, Any]:
    """Return the keys of a site's policy that agree to exactly this training."""
    limits: dict[str, Any] = {"max-rate": training.lr, "max-rounds": training.rounds}
    if training.aggregation == "secure":
        limits |= {"aggregation": "secure", "min-sum": training.num_sampled}
    files = [path for path in (training.aux, training.weights) if "/" in path]
    return {
        "defence": training.defence, "model": training.model, **limits, **({"files": ",".join(files)} if files else {})
    }  # fmt: skip


def unprotected(chosen: Protection, wish: Wish) -> list[str]:
    """Return what the configuration does not protect, with figures if there are any."""
    training, found = chosen.training, []
    if not chosen.proven:
        found.append("anything, by proof: it withstood the attackers that were run here, and no others")
    if training is not None and "at=sum" in training.defence:
        alone = wish.mu * math.sqrt(wish.clients)
        picked, epsilon = identification_bound(alone), epsilon_of(alone, DELTA)
        found.append(
            f"against a server that sees single updates: then \u03bc is {alone:.3g} in place of {wish.mu:.3g}, "
            f"\u03b5 = {epsilon:.3g}, and an image is picked of 1,000 with a chance of up to {picked:.0%}; "
            "the same if all other clients leave their noise out"
        )
    if wish.protect != "client":
        found.append("what many images of a client have in common, such as a person who is in many of them")
    found.append("the number of a client's images; the public pictures from which frozen features are made")
    found.append("the comparison behind this page, which looked at held-out training images without noise")
    found.append("the training against clients who send wrong updates")
    return found
