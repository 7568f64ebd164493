"""Attack veil as strongly as its guarantee allows, and write what the attackers got beside the bounds.

The attacker knows everything but one image: all other images of the federation, the label, the noise's law, the weights
of all rounds, and 5,000 public digits that are nobody's. It subtracts what the others contributed from what was really
sent, in all rounds, and decodes the rest. All settings below were fixed before the first figure was seen. Run from the
root of the repository; finished cells in the folder of ``--cells`` are not repeated:

    python benchmarks/veil_attacked.py --data-root DIR --cells DIR --out results/veil-attacked.json
"""

import argparse
import base64
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.attacks.parts.evidence import gathered, picked
from gradveil.attacks.parts.inversion_examples import Examples
from gradveil.attacks.parts.inverters import learn
from gradveil.attacks.parts.learned_priors import LearnedPrior, learned_priors
from gradveil.attacks.posterior import LINEAR, MIXTURE, guessed, rehearsed
from gradveil.config import TrainSettings
from gradveil.data import load_dataset
from gradveil.data.auxiliary import image_keys
from gradveil.data.pixels import to_batch
from gradveil.defences.parts.gaussian_dp import epsilon_of, identification_bound
from gradveil.defences.veil import Veil
from gradveil.engines.simulation import Simulation
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.models import create_model
from gradveil.models.trunk import FeatureMemo, FeatureNetwork, learn_features
from gradveil.randomness import stream
from gradveil.report.pictures import lines_png
from gradveil.threat import Observation, PublicKnowledge, ThreatModel
from gradveil.threat.informed import alone
from gradveil.threat.observe import Federation, observe
from gradveil.threat.seen import SUM, Seen
from gradveil.threat.tap import Tap, TappedRound, observation
from gradveil.types import Batch

ROUNDS, CLIENTS, TARGETS, PER_CLASS, OTHERS, DRAWS = 10, 10, 40, 500, 999, 50
SEEDS = (0, 1, 2)
QUIET = 1_000_000
MUS = (QUIET, 5, 3, 2, 1)
PARTITIONS = ("iid", "dirichlet:alpha=0.5")
SHOWN = 6
"""Images whose pictures are kept."""
SEARCHED, STEPS = 8, 60
"""Targets of the search with a denoiser, and its steps under each of five priors."""
LEARNED = 800
"""Played images that lti learns from."""
CANARIES = ("client", "sum", "broken")
"""Where canaries look: at one client's update, at a secure sum, or at one update of a sum that is not secure."""
KNOWS = ThreatModel.of("labels", "num-examples", "defence", "public-data")


class Case(NamedTuple):
    """One federation under attack."""

    scene: str
    mu: float
    partition: str
    seed: int

    @property
    def name(self) -> str:
        """Return the name of the case's file."""
        return f"{self.scene}-{self.mu:g}-{self.partition.partition(':')[0]}-{self.seed}"


def cases() -> Iterator[Case]:
    """Yield all cases, in the order in which they are worth having."""
    for seed in SEEDS:
        yield from (Case("client", mu, "iid", seed) for mu in MUS)
    for scene, partition in (("altered head", "iid"), ("sum", "iid"), ("client", "dirichlet:alpha=0.5")):
        yield from (Case(scene, mu, partition, seed) for seed in SEEDS for mu in (1, 3))
    for kind in CANARIES:
        yield from (Case(f"canaries {kind}", mu, "iid", seed) for seed in SEEDS for mu in (1, 3))
    yield from (Case("search", mu, "iid", 0) for mu in (QUIET, 3, 1))


# --- what the attacker sees -------------------------------------------------------------------------------------------


@cache
def public_digits(root: Path | None) -> Batch:
    """Return MNIST images that are not in mnist-5k, `PER_CLASS` of each class."""
    whole, private = load_dataset("mnist", root).train, load_dataset("mnist-5k", root)
    known = np.concatenate([image_keys(split.images) for split in (private.train, private.test)])
    order = np.random.default_rng(0).permutation(len(whole.labels))[:20_000]
    free = order[~np.isin(image_keys(whole.images[order]), known)]
    chosen = np.concatenate([free[whole.labels[free] == label][:PER_CLASS] for label in range(10)])
    return to_batch(whole.images[chosen], whole.labels[chosen])


def patches() -> FeatureNetwork:
    """Return the model."""
    return create_model("patches", (1, 28, 28), 10, seed=0)


@cache
def memo_of(root: Path | None) -> FeatureMemo:
    """Return the features of all digits, so that they are computed once."""
    split, network = load_dataset("mnist-5k", root).train, patches()
    images = torch.cat([to_batch(split.images, split.labels).images, public_digits(root).images])
    return learn_features(network, network.trunk, images)


def remembering(network: FeatureNetwork, root: Path | None) -> FeatureNetwork:
    """Return the network, which finds features that are already known."""
    network.trunk.memo = memo_of(root)
    return network


def split_off(
    tapped: TappedRound, one: Seen, places: Sequence[int], defence: Veil, network: FeatureNetwork
) -> list[Seen]:
    """Return the round of each unknown image alone; the others' part never includes the image itself."""
    network.load_state_dict(tapped.model)
    rest = torch.ones(len(one.private), dtype=torch.bool)
    rest[list(places)] = False
    known = defence.contributions(network, one.private[rest])
    own = [defence.contributions(network, one.private[torch.tensor([place])]) for place in places]
    found = []
    for number, place in enumerate(places):
        others = {
            name: tensor + sum(each[name] for place_of, each in enumerate(own) if place_of != number)
            for name, tensor in known.items()
        }
        found.append(alone(one, place, others, tapped.lr))
    return found


def seen_alone(
    tapped: TappedRound,
    found: Sequence[Seen],
    network: FeatureNetwork,
    defence: Veil,
    public: Batch,
    local: LocalSettings,
) -> Observation:
    """Return the observation of several unknown images, each as a client of its own."""
    numbered = tuple(replace(one, client=number) for number, one in enumerate(found))
    return observation(
        replace(tapped, seen=numbered, mean=None),
        range(len(numbered)),
        network,
        defence=defence,
        protocol=Protocol(replace(local, batch_size=0), tapped.lr),
        threat=KNOWS,
        num_classes=10,
        public=PublicKnowledge(public),
    )


def together(rounds: Sequence[Observation]) -> Observation:
    """Return all rounds as one observation."""
    return replace(rounds[0], later=tuple(rounds[1:]), from_the_first=True)


def unknown_places(sizes: Sequence[int], seed: int, count: int) -> list[list[int]]:
    """Return the places of the attacked images of each client: equally many of each, drawn at random."""
    rng = np.random.default_rng([seed, 7])
    each = -(-count // len(sizes))
    return [rng.permutation(size)[: min(each, size)].tolist() for size in sizes]


def trained(case: Case, root: Path | None) -> tuple[dict[str, Observation], Batch, float]:
    """Train; return what is left of the attacked images in each view, these images, and the accuracy.

    Views: ``client`` (single updates) or, with ``at=sum``, ``sum`` and ``broken`` (single updates all the same).
    """
    shared = case.scene == "sum"
    settings = TrainSettings(
        dataset="mnist-5k", model="patches", clients=CLIENTS, rounds=ROUNDS, eval_every=ROUNDS,
        defence=f"veil:mu={case.mu:g}" + ",at=sum" * shared, aggregation="secure" if shared else "none",
        partition=case.partition, seed=case.seed, save_rounds=tuple(range(1, ROUNDS + 1)),
    )  # fmt: skip
    public = public_digits(root)
    views: dict[str, list[Observation]] = {}
    with Simulation(settings, workers=0, data_root=root) as simulation:
        tap = Tap({number: tuple(range(CLIENTS)) for number in settings.save_rounds}, settings.aggregation)
        simulation.attach(tap)
        defence, local = simulation.defence, Protocol.of(settings).local
        places, accuracy = unknown_places(simulation.sizes, case.seed, TARGETS), 0.0
        known, network = remembering(patches(), root), patches()
        for row in simulation.run():
            tapped, accuracy = tap.rounds.pop(row["round"]), row.get("accuracy") or accuracy
            single = [
                one
                for mine, there in zip(tapped.seen, places, strict=True)
                for one in split_off(tapped, mine, there, defence, known)
            ]
            views.setdefault("broken" if shared else "client", []).append(
                seen_alone(tapped, single, network, defence, public, local)
            )
            if shared:
                whole = split_off(tapped, tapped.of(SUM), joined_places(simulation.sizes, places), defence, known)
                mine = replace(defence, at="client")  # the law of the sum's noise
                views.setdefault("sum", []).append(seen_alone(tapped, whole, network, mine, public, local))
    truth = Batch(*(torch.cat([getattr(one.private, part) for one in single]) for part in vars(single[0].private)))
    return {name: together(rounds) for name, rounds in views.items()}, truth, accuracy


def joined_places(sizes: Sequence[int], places: Sequence[Sequence[int]]) -> list[int]:
    """Return the places of the attacked images among all images of all clients, one client after the other."""
    starts = np.cumsum([0, *sizes])
    return [int(start + place) for start, own in zip(starts, places, strict=False) for place in own]


def tricked(case: Case, root: Path | None) -> tuple[dict[str, Observation], Batch, float]:
    """Let clients of one image answer a new random head in every round; return the same as `trained`.

    Such heads make every gradient as long as the bound, and the gradients of different images as different as can be.
    """
    split = load_dataset("mnist-5k", root).train
    chosen = np.random.default_rng([case.seed, 8]).permutation(len(split.labels))[:TARGETS]
    truth = to_batch(split.images[chosen], split.labels[chosen])
    defence, network, rounds = Veil(mu=case.mu, rounds=ROUNDS, clients=CLIENTS), patches(), []
    for number in range(1, ROUNDS + 1):
        head = 1000.0 * torch.randn(network.head.weight.shape, generator=stream(case.seed, "heads", number))
        rounds.append(
            observe(
                network,
                [truth[torch.tensor([place])] for place in range(len(truth))],
                threat=ThreatModel.of(*KNOWS.names, "alters-model"),
                num_classes=10,
                defence=defence,
                protocol=Protocol(first_round=number),
                public=PublicKnowledge(public_digits(root)),
                federation=Federation(seed=case.seed, alter=partial(with_head, head=head)),
            )
        )
    return {case.scene: together(rounds)}, truth, float("nan")


def with_head(network: FeatureNetwork, head: Tensor) -> FeatureNetwork:
    """Return the network with another head."""
    network.head.weight.data.copy_(head)
    return network


# --- the attackers ----------------------------------------------------------------------------------------------------


def attacked(seen: Observation, truth: Batch, mu: float, rng: torch.Generator, root: Path | None) -> dict[str, Any]:
    """Return the figures of all attackers on one view; for truth, they get the candidates to pick from, no more."""
    blind = blind_guesses(seen.public_data, truth.labels)
    guesses = {**decoded(seen, seen.labels[:, 0], rng), "lti": learned(seen, rng)}
    hits, simulated = named(seen, truth, rng)
    return {
        "mu": mu,
        "psnr": {name: psnr(truth.images, guess) for name, guess in {**guesses, "blind": blind}.items()},
        "picked": hits.tolist(),
        "picked_simulated": simulated,
        "bound": identification_bound(mu, OTHERS + 1),
        "pictures": pictures({"true": truth.images, "blind": blind, LINEAR: guesses[LINEAR]}),
    }


def blind_guesses(public: Batch, labels: Tensor) -> Tensor:
    """Return the mean public image of each label."""
    return torch.stack([public.images[public.labels == label].mean(0) for label in labels.tolist()])


def searches(seen: Observation, truth: Batch, mu: float, rng: torch.Generator, root: Path | None) -> dict[str, Any]:
    """Return the figures of searches with learned priors, for the first few images."""
    few = list(range(SEARCHED))
    seen, truth = seen.only(few), truth[torch.tensor(few)]
    blind = blind_guesses(seen.public_data, truth.labels)
    guesses = {**decoded(seen, seen.labels[:, 0], rng), "blind": blind}
    guesses |= {kind: searched(seen, blind, priors_of(kind, root)) for kind in ("normal", "denoiser")}
    return {"mu": mu, "psnr": {name: psnr(truth.images, guess) for name, guess in guesses.items()}}


def decoded(seen: Observation, labels: Tensor, rng: torch.Generator) -> dict[str, Tensor]:
    """Return the guesses of the linear decoder and of the mean of likely images, from public images of the label."""
    guesses = {name: torch.empty(len(labels), *seen.shape) for name in (LINEAR, MIXTURE)}
    for label in labels.unique().tolist():
        own = (labels == label).nonzero().flatten()
        candidates = seen.public_data[seen.public_data.labels == label]
        evidence = gathered(seen.only(own.tolist()), candidates)
        ways, _ = rehearsed(evidence, candidates.images, rng)
        for name, guess in guesses.items():
            way = min((each for each in ways if each.name == name), key=lambda each: each.error)
            guess[own] = guessed(evidence, candidates.images, way).view(-1, *seen.shape).float()
    return guesses


def named(seen: Observation, truth: Batch, rng: torch.Generator) -> tuple[Tensor, float]:
    """Return who was picked among 999 others of any class, and the share over many more draws of the noise."""
    public = seen.public_data
    others = public[torch.randperm(len(public), generator=rng)[:OTHERS]]
    evidence = gathered(seen, joined(others, truth))
    rows = torch.arange(OTHERS, OTHERS + len(truth))
    hits = picked(evidence, rows.tolist(), OTHERS)
    drawn = replace(evidence, cross=evidence.of_candidates(rows, DRAWS, rng))
    many = picked(drawn, rows.repeat_interleave(DRAWS).tolist(), OTHERS)
    return hits, float(many.float().mean())


def learned(seen: Observation, rng: torch.Generator) -> Tensor:
    """Return the guesses of lti's learner, from the features that all rounds together show.

    Each round's update is weighted by the mean residual of public images of the label, as if all had the same.
    """
    public = seen.public_data[torch.randperm(len(seen.public_data), generator=rng)[:LEARNED]]
    features = seen.network.trunk(public.images).detach()
    labels, mine = seen.labels[:, 0], public.labels
    shown, played = torch.zeros(len(labels), features.shape[1]), torch.zeros(len(public))
    power = torch.zeros(10)
    std = seen.defence._std
    for one in (seen, *seen.later):
        left = clipped_residuals(one, features, mine)
        mean = torch.stack([left[mine == label].mean(0) for label in range(10)])  # (classes, classes)
        arrived = one.mean_gradients["head.weight"].view(len(labels), 10, -1)
        shown += torch.einsum("tc,tcd->td", mean[labels], arrived)
        played += (mean[mine] * left).sum(1)
        power += mean.square().sum(1)
    noise = torch.randn(features.shape, generator=rng) * (std * power.sqrt()[mine])[:, None]
    sketches = {"features": played[:, None] * features + noise}
    held = torch.arange(len(public)) < LEARNED // 10
    examples = Examples(sketches, public.images[:, None], mine[:, None], held)
    return learn(examples, 10, "kernel", 0, 0, 0)({"features": shown}, labels[:, None]).view(-1, 1, 28, 28)


def clipped_residuals(one: Observation, features: Tensor, labels: Tensor) -> Tensor:
    """Return the left factors (N, classes) of clipped gradients of a head."""
    left = torch.softmax(features @ one.network.head.weight.detach().T, -1) - F.one_hot(labels, 10)
    norms = left.norm(dim=-1) * features.norm(dim=-1)
    return left / (norms / one.defence.clip).clamp_min(1)[..., None]


@cache
def priors_of(kind: str, root: Path | None) -> list[LearnedPrior]:
    """Return the priors learned from all public digits, of which the denoiser takes a minute."""
    return learned_priors(kind, public_digits(root).images)


def searched(seen: Observation, start: Tensor, priors: Sequence[LearnedPrior]) -> Tensor:
    """Return the likeliest images by a search with a learned prior, keeping the best iterate by its own loss."""
    heads = torch.stack([one.network.head.weight.detach() for one in (seen, *seen.later)])  # (R, classes, D)
    arrived = torch.stack([one.mean_gradients["head.weight"] for one in (seen, *seen.later)])  # (R, T, classes, D)
    labels, clip, std = seen.labels[:, 0], seen.defence.clip, seen.defence._std
    wanted = F.one_hot(labels, 10)

    def misfit(images: Tensor) -> Tensor:
        features = seen.network.trunk(images)
        left = torch.softmax(torch.einsum("td,rcd->rtc", features, heads), -1) - wanted
        lengths = features.norm(dim=1)
        left = left / (left.norm(dim=-1) * lengths / clip).clamp_min(1)[..., None]
        shown = (torch.einsum("rtcd,td->rtc", arrived, features) * left).sum((0, 2))
        own = left.square().sum((0, 2)) * lengths.square()
        return (own / 2 - shown) / std**2 / images[0].numel()

    images = start.clone()
    for prior in priors:
        images = descended(images, partial(_sum_of, misfit, prior.penalty), prior.rate)
    return images


def _sum_of(misfit: Callable[[Tensor], Tensor], penalty: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    return misfit(images) + penalty(images)


def descended(start: Tensor, loss_of: Callable[[Tensor], Tensor], rate: float) -> Tensor:
    """Return the images with the least loss on a walk of Adam."""
    images = start.clone().requires_grad_()
    adam = torch.optim.Adam([images], lr=rate)
    best, least = start.clone(), torch.full((len(start),), torch.inf)
    for _ in range(STEPS + 1):
        loss = loss_of(images)
        better = loss.detach() < least
        best[better], least[better] = images.detach()[better], loss.detach()[better]
        images.grad = torch.autograd.grad(loss.sum(), images)[0]
        adam.step()
        images.data.clamp_(0, 1)
    return best


def joined(*batches: Batch) -> Batch:
    """Return all batches as one."""
    return Batch(*(torch.cat([getattr(batch, part) for batch in batches]) for part in vars(batches[0])))


def psnr(truth: Tensor, guess: Tensor) -> list[float]:
    """Return the PSNR of each image, rounded to a thousandth."""
    errors = (truth - guess.clamp(0, 1)).square().flatten(1).mean(1)
    return [round(float(value), 3) for value in -10 * errors.clamp_min(1e-10).log10()]


def pictures(shown: dict[str, Tensor]) -> dict[str, list[list[int]]]:
    """Return the first `SHOWN` of each kind of images as bytes."""
    return {
        name: (images[:SHOWN].clamp(0, 1) * 255).round().byte().flatten(1).tolist() for name, images in shown.items()
    }


# --- canaries ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exposed(Veil):
    """Veil that shares its noise, where canaries look at single updates all the same."""

    @property
    def fewest_clients(self) -> int:
        """Return 0: nobody waits for a sum."""
        return 0


def counted(case: Case, root: Path | None) -> dict[str, Any]:
    """Return the epsilon that canaries measure in a short training of four clients, beside the stated one."""
    kind = case.scene.removeprefix("canaries ")
    settings = TrainSettings(
        dataset="mnist-5k", model="patches", clients=4, partition="iid:images=200", rounds=4, eval_every=4,
        seed=case.seed, canaries=200, aggregation="none" if kind == "client" else "secure",
    )  # fmt: skip
    own = Exposed if kind == "broken" else Veil
    defence = own(mu=case.mu, at="client" if kind == "client" else "sum")
    with Simulation(settings, workers=0, data_root=root, defence=defence) as simulation:
        row = list(simulation.run())[-1]
    really = case.mu * math.sqrt(settings.clients) if kind == "broken" else case.mu
    fields = ("epsilon", "epsilon_hat", "epsilon_hat_low", "epsilon_hat_high", "canaries_exceed")
    return {key: row[key] for key in fields} | {"epsilon_really": epsilon_of(really, row["delta"])}


# --- files ------------------------------------------------------------------------------------------------------------


def measured(case: Case, folder: Path, root: Path | None) -> None:
    """Measure one case, unless its file is there."""
    path = folder / f"{case.name}.json"
    if path.is_file():
        return
    begun = time.process_time()
    found = counted(case, root) if case.scene.startswith("canaries") else looked(case, root)
    seconds = round(time.process_time() - begun, 1)
    path.write_text(json.dumps({**case._asdict(), **found, "seconds": seconds}))
    views = found.get("views", {})
    print(case.name, seconds, {name: summary(one) for name, one in views.items()} or found, flush=True)


def looked(case: Case, root: Path | None) -> dict[str, Any]:
    """Return the figures of all attackers on all views of a case."""
    views, truth, accuracy = (tricked if case.scene == "altered head" else trained)(case, root)
    rng, look = stream(case.seed, "veil-attacked"), searches if case.scene == "search" else attacked
    found = {}
    for name, seen in views.items():
        remembering(seen.network, root)
        mu = case.mu * math.sqrt(CLIENTS) if name == "broken" else case.mu
        found[name] = look(seen, truth, mu, rng, root)
    return {"accuracy": accuracy, "views": found}


def summary(figures: dict[str, Any]) -> dict[str, float]:
    """Return the means of a view."""
    means = {name: round(statistics.fmean(values), 2) for name, values in figures["psnr"].items()}
    rest = {key: figures[key] for key in ("picked_simulated", "bound") if key in figures}
    return {**means, **rest, **({"picked": statistics.fmean(figures["picked"])} if "picked" in figures else {})}


def collected(folder: Path) -> dict[str, Any]:
    """Return the figures of all finished cases: means over the images of each seed, and some pictures."""
    cells = [json.loads(path.read_text()) for case in cases() if (path := folder / f"{case.name}.json").is_file()]
    views = [(cell, name, one) for cell in cells for name, one in cell.get("views", {}).items()]
    return {
        "attacked": [
            {
                "view": name, "mu": cell["mu"], "partition": cell["partition"], "seed": cell["seed"],
                "accuracy": None if cell["scene"] == "altered head" else cell["accuracy"],
                "images": len(one["picked"]), "picked": sum(one["picked"]),
                "picked_simulated": round(one["picked_simulated"], 5), "bound": one["bound"],
                "psnr": {key: round(statistics.fmean(values), 3) for key, values in one["psnr"].items()},
            }
            for cell, name, one in views if "picked" in one
        ],
        "searched": [
            {"mu": cell["mu"], "psnr": {key: round(statistics.fmean(v), 3) for key, v in one["psnr"].items()}}
            for cell, _, one in views if "picked" not in one
        ],
        "canaries": [cell for cell in cells if cell["scene"].startswith("canaries")],
        "pictures": kept_pictures(folder),
        "computing_minutes": round(sum(cell["seconds"] for cell in cells) / 60, 1),
    }  # fmt: skip


def kept_pictures(folder: Path) -> dict[str, str]:
    """Return some images of the first seed, and what was recovered of them, as base64 of bytes."""
    shown = {}
    for name, mu, kind in LINES:
        path = folder / f"{Case('client', mu, 'iid', 0).name}.json"
        if path.is_file():
            rows = json.loads(path.read_text())["views"]["client"]["pictures"][kind]
            shown[name] = base64.b64encode(bytes(number for row in rows for number in row)).decode()
    return shown


LINES = (
    ("true image", QUIET, "true"), ("without noise", QUIET, LINEAR), ("mu = 3", 3, LINEAR), ("mu = 1", 1, LINEAR),
    ("blind guess", 1, "blind"),
)  # fmt: skip
"""The lines of the picture, from above: what they show, and where it is from."""


def picture(document: dict[str, Any]) -> bytes:
    """Return the picture of docs/veil.md as PNG."""
    lines = [
        torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).view(-1, 1, 28, 28).float() / 255
        for text in document["pictures"].values()
    ]
    return lines_png(lines, height=84)


NAMES = {
    "client": "single updates",
    "sum": "secure sum",
    "broken": "sum that is not secure",
    "altered head": "answers to altered heads",
}


def rows_of(document: dict[str, Any]) -> Iterator[tuple[str, float, str, list[dict[str, Any]]]]:
    """Yield view, mu and partition with the figures of all seeds."""
    found: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for row in document["attacked"]:
        found.setdefault((row["view"], row["mu"], row["partition"]), []).append(row)
    for view in NAMES:
        for (own, mu, partition), rows in found.items():
            if own == view:
                yield view, mu, partition, rows


def gain(rows: Sequence[dict[str, Any]]) -> tuple[str, float]:
    """Return the attacker with the largest mean PSNR, and what it gains over the blind guess."""
    means = {key: statistics.fmean(row["psnr"][key] for row in rows) for key in rows[0]["psnr"]}
    best = max((key for key in means if key != "blind"), key=lambda key: means[key])
    return best, means[best] - means["blind"]


def table(document: dict[str, Any]) -> str:
    """Return the attackers' table of docs/veil.md."""
    lines = [
        "| what the server sees | μ | clients | seeds | blind guess | linear decoder | likely images | `lti` "
        "| best gain | picked out of 1,000 | more draws | at most |",
        "|" + "---|" * 12,
    ]
    for view, mu, partition, rows in rows_of(document):
        psnr_of = [statistics.fmean(row["psnr"][key] for row in rows) for key in ("blind", LINEAR, MIXTURE, "lti")]
        hits, images = (sum(row[key] for row in rows) for key in ("picked", "images"))
        drawn, bound = statistics.fmean(row["picked_simulated"] for row in rows), rows[0]["bound"]
        facts = [
            NAMES[view], "no noise" if mu == QUIET else f"{mu:g}", partition.partition(":")[0], f"{len(rows)}",
            *(f"{value:.1f}" for value in psnr_of), f"{gain(rows)[1]:+.2f}",
            f"{hits} of {images}", f"{drawn:.1%}", f"{bound:.1%}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(facts) + " |")
    return "\n".join(lines)


def canary_table(document: dict[str, Any]) -> str:
    """Return the canaries' table of docs/veil.md."""
    lines = [
        "| where canaries look | μ | seeds | stated ε | ε by canaries | interval | ε of that view |",
        "|" + "---|" * 7,
    ]
    for kind, mu in ((kind, mu) for kind in CANARIES for mu in (1, 3)):
        rows = [row for row in document["canaries"] if (row["scene"], row["mu"]) == (f"canaries {kind}", mu)]
        if rows:
            hat, low, high = (
                statistics.fmean(row[f"epsilon_hat{end}"] for row in rows) for end in ("", "_low", "_high")
            )
            facts = f"{rows[0]['epsilon']:.1f} | {hat:.1f} | {low:.1f} to {high:.1f} | {rows[0]['epsilon_really']:.1f}"
            lines.append(f"| {NAMES[kind]} | {mu} | {len(rows)} | {facts} |")
    return "\n".join(lines)


def search_table(document: dict[str, Any]) -> str:
    """Return the table of searches of docs/veil.md."""
    keys = ("blind", LINEAR, MIXTURE, "normal", "denoiser")
    lines = [
        "| μ | blind guess | linear decoder | likely images | `normal` prior | `denoiser` prior |",
        "|" + "---|" * 6,
    ]
    for row in document["searched"]:
        mu = "no noise" if row["mu"] == QUIET else f"{row['mu']:g}"
        lines.append(f"| {mu} | " + " | ".join(f"{row['psnr'][key]:.1f}" for key in keys) + " |")
    return "\n".join(lines)


def verdict(document: dict[str, Any]) -> str:
    """Return what the figures say about the claims."""
    promised = [(mu, rows) for view, mu, _, rows in rows_of(document) if view != "broken" and mu <= 3]
    gained = max(gain(rows)[1] for _, rows in promised)
    picked_one = max(statistics.fmean(row["picked_simulated"] for row in rows) for mu, rows in promised if mu == 1)
    held = all(row["picked_simulated"] <= row["bound"] for _, rows in promised for row in rows)
    return (
        f"With μ of 3 or less, the best attacker gains {gained:.2f} dB over a blind guess, altered heads included. "
        f"With μ = 1 the true image is picked out of 1,000 in {picked_one:.1%} of all draws at most. "
        + ("No rate exceeds its bound." if held else "A RATE EXCEEDS ITS BOUND.")
    )


def page(document: dict[str, Any]) -> str:
    """Return docs/veil.md."""
    versions = document["versions"]
    parts = [
        PAGE_TOP.format(**document, torch=versions["torch"]),
        verdict(document),
        table(document),
        PAGE_MIDDLE,
    ]
    if document["canaries"]:
        parts += [PAGE_CANARIES, canary_table(document)]
    if document["searched"]:
        parts += [PAGE_SEARCHED.format(count=SEARCHED), search_table(document)]
    return "\n\n".join([*parts, PAGE_END]) + "\n"


PAGE_TOP = """\
# veil under attack

What remains of the promise of [`veil`](defences.md#a-protection-that-holds-veil-on-public-features) if the attacker
has all that the promise allows? This page is made from `results/veil-attacked.json` by `benchmarks/veil_attacked.py`;
a test checks that they agree. Measured {date} with Python {python}, torch {torch}: `{command}`.

The attacker knows **everything but one image**: all other images of the federation, the label, the law of the noise,
the weights and updates of all rounds, and 5,000 public digits that are nobody's (500 per class). It subtracts what
the other images contributed from what was really sent. What is left is the update of a client with this one image,
noise included. It then combines all rounds:

- the **linear decoder** with the least mean squared error, learned from public digits of the label;
- **likely images**: the mean of public digits of the label, each weighted by its likelihood (attack `posterior` plays
  the better of both);
- **`lti`**: the kernel regression of learned inversion, from the features that all rounds together show;
- **picking**: the most likely of 1,000 digits, the true one among them.

Setting: {settings}, 40 images per seed. Means of PSNR in dB; a blind guess is the mean public digit of the label.
"More draws" repeats the picking with 2,000 draws of the noise's law per seed. "At most" is the bound for the stated
μ; for the sum that is not secure, for μ times the square root of 10 clients. All settings were fixed beforehand.
After two trial cases with 60 rounds, the numbers of rounds, public digits and cases were cut to the computing time
that there was; none of the figures below had been seen. Few rounds seem to favour the attacker, since gradients stay
at the clipping bound for longer."""

PAGE_MIDDLE = """\
![From above: true images, recovered without noise, at μ = 3, at μ = 1, blind guesses](images/veil-attacked.png)

From above: true images; the linear decoder's guesses without noise, with μ = 3 and with μ = 1; blind guesses.

- Without noise the same attacker recovers digits and picks the right one nearly always: the attacker works, and it is
  the noise that protects, not the features.
- **Altered heads**: a server that may send any weights sends a new random head in every round, so that every gradient
  is as long as the bound and those of different images differ as much as they can. That is the worst head that we
  know. Heads of NaN, infinity or huge numbers don't exceed the bound either, nor do the rows of `imprint` and
  `trap-weights` before the network (`tests/defences/test_veil.py`, `tests/threat/test_informed.py`). A server that
  sends other clients a dead model to see one client alone in a **secure sum** gains nothing over this attacker, who
  knows the others' images anyway: the others' noise is still in the sum.
- **Sums that are not secure**: with `at=sum` a single update has only its share of the noise. The rates then exceed
  the bound of the stated μ, as documented: μ holds for secure sums only.
- In a sum all 40 images of a seed share one draw of the noise, so that these rows vary more than the others."""

PAGE_CANARIES = """\
Canaries measure the ε of the mechanism itself (`--canaries 200`; 4 clients of 200 images, 4 rounds, means over seeds
of the estimate and of the ends of its 99 % interval):"""

PAGE_SEARCHED = """\
Searches for the likeliest image with learned priors ([priors in noise](attacks.md#priors-in-noise)), {count} images
of seed 0. A search returns one likely image, not the mean of all, and pays for it under noise:"""

PAGE_END = """\
In an audit, clients with a single image are what such an attacker is left with, so that `--partition iid:images=1`
with all rounds tapped plays the worst case on any data:

    gradveil audit --dataset mnist-5k --model patches --protocol fedavg --clients 8 --partition iid:images=1 \\
        --rounds 3 --tap 1/2/3 --defences veil:mu=1,veil:mu=3 --attacks posterior,lti --adaptive --out runs/veil

Not measured: other data than digits; heads on trained features (`frozen`); `unit=client`; membership attacks (`lira`,
`rmia`) on trainings under veil, which see less than this attacker."""


def main() -> None:
    """Measure all cases, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--cells", type=Path, required=True)
    parser.add_argument("--collect", action="store_true", help="Write what is finished, and measure nothing.")
    parser.add_argument("--out", type=Path, default=Path("results/veil-attacked.json"))
    options = parser.parse_args()
    options.cells.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for case in () if options.collect else cases():
        measured(case, options.cells, options.data_root)
    document = {
        "command": "python benchmarks/veil_attacked.py --cells runs/veil-attacked --out results/veil-attacked.json",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {"gradveil": version("gradveil"), "torch": torch.__version__},
        "settings": f"mnist-5k, patches, {CLIENTS} clients, {ROUNDS} rounds, {10 * PER_CLASS} public digits",
        **collected(options.cells),
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    Path("docs/images/veil-attacked.png").write_bytes(picture(document))
    Path("docs/veil.md").write_text(page(document))


if __name__ == "__main__":
    main()
