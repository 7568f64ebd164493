"""Attacks on single updates under DCS2 and its baselines."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.attacks import Scene, build_attack
from gradveil.data.federated import federate
from gradveil.data.pixels import to_batch
from gradveil.defences import build_defence
from gradveil.engines.simulation import chosen_normalisation
from gradveil.metrics import MetricUnavailable, score_targets
from gradveil.metrics.lpips_alex import LpipsAlex
from gradveil.metrics.ssim import WINDOW, Ssim
from gradveil.models import create_model
from gradveil.randomness import stream
from gradveil.reproduce.base import rounded
from gradveil.reproduce.dcs2_training import CLIENTS, DEFENDED, Images
from gradveil.threat import Knowledge, PublicKnowledge, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch

FIGURES = ("psnr", "ssim", "lpips")


@dataclass(frozen=True)
class Dcs2Case:
    """The network and images of an attack.

    Attributes:
        network: the untrained network with its normalisation.
        private: single images of the defending client, one per target.
        public: images that belong to no client, which the attacker knows.
        aux: public images on the client's device.
        averages: (classes, C, H, W), the mean public image of each class.
        num_classes: number of classes.
    """

    network: nn.Module
    private: Sequence[Batch]
    public: Batch
    aux: Batch
    averages: Tensor
    num_classes: int

    @property
    def truth(self) -> Tensor:
        """The private images, (targets, 1, C, H, W)."""
        return torch.stack([batch.images for batch in self.private])


def make_case(images: Images, model: str, partition: str, targets: int, seed: int) -> Dcs2Case:
    """Take the first images of the defending client, all sensitive, and the network before the first round."""
    data = images.data
    mine = federate(data, partition, CLIENTS, "1.0", seed).client(DEFENDED)
    public, aux = (to_batch(known.train.images, known.train.labels) for known in (images.public, images.aux))
    network = create_model(model, data.shape, data.num_classes, seed, chosen_normalisation("dataset", data))
    private = [mine[slice(number, number + 1)] for number in range(min(targets, len(mine)))]
    return Dcs2Case(network.eval(), private, public, aux, class_averages(public, data.num_classes), data.num_classes)


def class_averages(public: Batch, num_classes: int) -> Tensor:
    """Return the mean image of each class, (classes, C, H, W); the mean of all images for an empty class.

    Example:
        >>> images = torch.tensor([0.0, 1.0, 0.5]).view(3, 1, 1, 1)
        >>> class_averages(Batch(images, torch.tensor([0, 0, 2]), torch.zeros(3) > 0), 3).flatten().tolist()
        [0.5, 0.5, 0.5]
    """
    own = [public.images[public.labels == kind] for kind in range(num_classes)]
    return torch.stack([(some if len(some) else public.images).mean(0) for some in own])


def attack_case(case: Dcs2Case, defence: str, attack: str, *, adaptive: bool, seed: int) -> Tensor:
    """Attack the updates of all targets, and return the reconstructions (targets, 1, C, H, W)."""
    built, defending = build_attack(attack), build_defence(defence)
    shape = tuple(case.private[0].images.shape[1:])
    scene = Scene((shape[0], shape[1], shape[2]), case.num_classes)
    alters = Knowledge.ALTERS_MODEL in built.needs
    knows = ["labels", "num-examples", "class-averages"]
    knows += [*built.needs] + ["defence"] * adaptive
    alter = (lambda network: built.alter(network, scene, stream(seed, "alter"))) if alters else None
    seen = observe(
        case.network,
        case.private,
        threat=ThreatModel.of(*knows),
        num_classes=case.num_classes,
        defence=defending,
        public=PublicKnowledge(case.public, case.averages),
        federation=Federation(aux=case.aux if defending.uses_aux else None, seed=seed, alter=alter),
    )
    return built(seen, stream(seed, "dcs2", "attack")).images


def scores(case: Dcs2Case, guess: Tensor, root: Path | None) -> dict[str, float | None]:
    """Return mean and standard deviation over the targets of each metric, or None if it cannot be measured."""
    figures, _ = score_targets(case.truth, guess, root)
    found: dict[str, float | None] = {}
    for name in FIGURES:
        values = [value for row in figures if (value := row[name]) is not None]
        found[name] = rounded(statistics.fmean(values)) if values else None
        found[f"{name}_std"] = rounded(statistics.pstdev(values), 2) if values else None
    return found | authors_scores(case.truth[:, 0], guess[:, 0], root)


def authors_scores(truth: Tensor, guess: Tensor, root: Path | None) -> dict[str, float | None]:
    """Return the means of the authors' own metrics over images (N, C, H, W).

    Their SSIM also counts windows that reach beyond the image, where it is black; their LPIPS is fed images in [0, 1],
    though its network expects -1 to 1.
    """
    edge = [WINDOW // 2] * 4
    padded = Ssim()(F.pad(truth, edge), F.pad(guess, edge))
    lpips = LpipsAlex() if root is None else LpipsAlex(weights=str(root / "weights" / LpipsAlex.default_file))
    try:
        shifted = float(lpips((truth + 1) / 2, (guess.clamp(0, 1) + 1) / 2).nanmean())
    except MetricUnavailable:
        shifted = None
    return {"ssim_authors": rounded(float(padded.nanmean())), "lpips_authors": rounded(shifted)}
