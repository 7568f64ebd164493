"""Attacks on updates under Model Entanglement and other defences: reconstruction by GS, and membership inference."""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from gradveil.attacks import MembershipAttack, build_attack
from gradveil.audits.membership import infer_membership
from gradveil.config import TrainSettings
from gradveil.data import Dataset, Split, load_dataset
from gradveil.data.pixels import to_batch
from gradveil.defences import Defence, build_defence
from gradveil.errors import DivergedError
from gradveil.metrics.mse import Mse
from gradveil.metrics.psnr import Psnr
from gradveil.metrics.ssim import Ssim
from gradveil.models import Normalisation, create_model
from gradveil.progress import listening, part, tell
from gradveil.randomness import derive_seed, stream
from gradveil.registry import build
from gradveil.reproduce.base import Lab, Result, rounded
from gradveil.reproduce.entangle_training import DEFENCES, PARTITION_NOTE, STAND_INS, images, training, training_note
from gradveil.threat import ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch, Tensors

# --- Figure 6: reconstruction by GS -----------------------------------------------------------------------------------

MODELS = {"lenet5": "lenet5:activation=sigmoid,init=uniform", "lenet-dlg": "lenet-dlg"}
"""Two readings of the paper's LeNet-5 "following Zhu and Han": their sigmoids and initialisation, or their network."""
TRIALS = 5
GS = {
    "mnist": "gs:sign=none,schedule=cosine,lr=0.3,tv=1e-6,iterations={}",
    "cifar10": "gs:sign=none,schedule=cosine,lr=0.1,tv=1e-3,iterations={}",
}
"""GS with the settings that reconstruct best here."""
PAPER_6 = {("mnist", "FedAvg"): "< 0.05", ("mnist", "ME"): "0.9835"}


@dataclass(frozen=True)
class EntangleCase:
    """The network and images of an attack on one data set.

    Attributes:
        network: the untrained network with its normalisation.
        private: one image per target, each of a different class.
        guard: one public image of a class that no target has.
        std: standard deviation of each channel, for the MSE in normalised units.
        num_classes: number of classes.
    """

    network: nn.Module
    private: Batch
    guard: Batch
    std: tuple[float, ...]
    num_classes: int


@dataclass(frozen=True)
class Trials:
    """The best reconstructions out of several trials of an attack, (targets, C, H, W) each.

    Attributes:
        chosen: for each target, the guess with the lowest attacker loss.
        closest: for each target, the guess nearest to the truth, which no attacker can choose.
    """

    chosen: Tensor
    closest: Tensor


def figure_6(lab: Lab) -> Result:
    """Attack single images by GS under four defences, with and without knowledge of the defence."""
    tasks = lab.pick(("mnist",), ("mnist", "cifar10"), ("mnist", "cifar10"))
    models = lab.pick(("lenet-dlg",), ("lenet5", "lenet-dlg"), ("lenet5", "lenet-dlg"))
    iterations, targets = lab.pick(80, 400, 4000), lab.pick(1, 2, 8)
    cells = [(task, model, *attacker) for task in tasks for model in models for attacker in attackers()]
    sets = {task: load_dataset(training(lab, task).dataset, lab.data_root) for task in tasks}
    cases = {
        (task, model): make_case(sets[task], MODELS[model], targets, lab.seed) for task in tasks for model in models
    }
    found: dict[tuple[str, str, str, bool], Trials] = {}
    for number, cell in enumerate(cells):
        task, model, name, adaptive = cell
        with _told(lab, f"{task}, {model}, {name}{', adaptive' if adaptive else ''}"), part(number, len(cells)):
            case, attack = cases[task, model], GS[task].format(iterations)
            work = partial(_guesses, case, build_defence(DEFENCES[name]), attack, adaptive, lab.seed)
            found[cell] = Trials(**lab.tensors_once(("figure 6", cell, DEFENCES[name], attack, targets), work))
            tell(1.0)
    rows = [
        {"dataset": sets[task].name, "model": model, "defence": DEFENCES[name],
         "attacker": "knows it" if adaptive else "plain",
         **scores(cases[task, model], found[task, model, name, adaptive]),
         "paper_mse": None if adaptive else PAPER_6.get((task, name))}
        for task, model, name, adaptive in cells
    ]  # fmt: skip
    figures = {
        f"pictures-{task}-{model}": _pictures(case, {column: found[task, model, *column] for column in COLUMNS})
        for (task, model), case in cases.items()
    }
    return Result(rows, _notes_6(lab, targets, iterations), figures)


def _guesses(case: EntangleCase, defence: Defence, attack: str, adaptive: bool, seed: int) -> Tensors:
    return vars(attack_case(case, defence, attack, adaptive, seed))


def _told(lab: Lab, doing: str) -> AbstractContextManager[None]:
    """Return a context in which reported progress goes to the lab."""
    return listening(lab.telling(doing))


def attackers() -> list[tuple[str, bool]]:
    """Return each defence with the plain attacker, and with an adaptive one if it has a countermove."""
    return [
        (name, adaptive)
        for name, spec in DEFENCES.items()
        for adaptive in ((False, True) if build_defence(spec).overrides("adaptive") else (False,))
    ]


def make_case(data: Dataset, model: str, targets: int, seed: int) -> EntangleCase:
    """Draw private training images of different classes, and a public test image of one more class."""
    rng = np.random.default_rng(derive_seed(seed, "entangle", "targets"))
    kinds = rng.permutation(data.num_classes)
    places = [rng.choice(np.flatnonzero(data.train.labels == kind)) for kind in kinds[:targets]]
    public = rng.choice(np.flatnonzero(data.test.labels == kinds[targets]))
    network = create_model(model, data.shape, data.num_classes, seed, Normalisation(data.mean, data.std))
    return EntangleCase(
        network.eval(), _batch(data.train, places), _batch(data.test, [public]), data.std, data.num_classes
    )


def _batch(split: Split, places: Sequence[int]) -> Batch:
    return to_batch(split.images[places], split.labels[places], np.ones(len(places), bool))


def attack_case(case: EntangleCase, defence: Defence, attack: str, adaptive: bool, seed: int) -> Trials:
    """Attack the same updates of all targets several times, from different starts."""
    targets = len(case.private)
    seen = observe(
        case.network,
        [case.private[slice(number, number + 1)] for number in range(targets)],
        threat=ThreatModel.of("labels", "num-examples", *(["defence"] if adaptive else [])),
        num_classes=case.num_classes,
        defence=defence,
        federation=Federation(guards=[case.guard] * len(defence.early_clients(targets + 1)), seed=seed),
    )
    guesses, losses = [], []
    for trial in range(TRIALS):
        with part(trial, TRIALS):
            result = build_attack(attack)(seen, stream(seed, "entangle", "trial", trial))
        guesses.append(result.images[:, 0])
        losses.append(result.loss)
    everything = torch.stack(guesses)  # (trials, targets, C, H, W)
    errors = torch.stack([Mse()(case.private.images, guess) for guess in guesses])
    each = torch.arange(targets)
    return Trials(everything[_least(torch.stack(losses)), each], everything[_least(errors), each])


def _least(values: Tensor) -> Tensor:
    """Return the trial with the lowest value for each target, (targets,); NaN counts as infinite."""
    return values.nan_to_num(torch.inf).argmin(0)


def scores(case: EntangleCase, trials: Trials) -> dict[str, float | None]:
    """Return means over the targets."""
    truth = case.private.images
    oracle = Mse()(truth, trials.closest)
    return {
        "mse": rounded(float(Mse()(truth, trials.chosen).mean())),
        "mse_normalised": rounded(float(normalised_mse(truth, trials.chosen, case.std).mean())),
        "psnr": rounded(float(Psnr()(truth, trials.chosen).mean())),
        "ssim": rounded(float(Ssim()(truth, trials.chosen).mean())),
        f"mse_oracle_of_{TRIALS}": rounded(float(oracle.mean())),
        f"mse_normalised_oracle_of_{TRIALS}": rounded(float(normalised_mse(truth, trials.closest, case.std).mean())),
    }


def normalised_mse(truth: Tensor, guess: Tensor, std: Sequence[float]) -> Tensor:
    """Return the MSE (N,) in units of each channel's standard deviation, as after the network's normalisation.

    Example:
        >>> normalised_mse(torch.zeros(1, 2, 1, 1), torch.tensor([0.5, 1.0]).view(1, 2, 1, 1), (0.5, 0.5))
        tensor([2.5000])
    """
    return ((truth - guess) / torch.tensor(std)[:, None, None]).square().flatten(1).mean(1)


def _notes_6(lab: Lab, targets: int, iterations: int) -> list[str]:
    return [
        f"Attacked: one gradient of one image on an untrained network, label known; targets: {targets}, each of a "
        f"different class; {iterations:,} steps. The guard's gradient is of one public image of yet another class.",
        f"Two readings of the paper's LeNet5 after Zhu and Han: `{MODELS['lenet5']}`, and `lenet-dlg`, their network "
        "with one fully connected layer.",
        f"{TRIALS} trials from different starts on the same update; the trial with the lowest attacker loss counts. "
        "`oracle` is the trial nearest to the truth, as the paper's best of five may be; no attacker can choose it. "
        "Learning rate, schedule and total variation of GS are those that reconstruct best here; published GS takes "
        "signed steps.",
        "`knows it`: the attacker knows the defence and what the server broadcast, as any server does. The paper has "
        "only the plain attacker.",
        "`mse` is on images in [0, 1]; on MNIST a black image has about 0.1, and uniform noise about 0.3. The paper's "
        "0.9835 and 0.05 are therefore likely in normalised units, as `mse_normalised` (on MNIST 10.5 times `mse`). "
        "The other cells of the paper's figure have no numbers.",
        STAND_INS,
        *(["Scale smoke omits CIFAR-10 and lenet5."] if lab.scale == "smoke" else []),
    ]


COLUMNS = (("FedAvg", False), ("POGZ-FL", False), ("CA-FL", False), ("ME", False), ("ME", True))


def _pictures(case: EntangleCase, found: Mapping[tuple[str, bool], Trials]) -> Figure:
    """Draw one row per target: the true image, and the attacker's choice under each defence."""
    truth = case.private.images
    figure = Figure(figsize=(1.35 * (1 + len(COLUMNS)), 1.55 * len(truth) + 0.3), layout="constrained")
    grid = figure.subplots(len(truth), 1 + len(COLUMNS), squeeze=False)
    columns = [("truth", truth)] + [
        ("undefended" if name == "FedAvg" else f"{name}, adaptive" if adaptive else name, found[name, adaptive].chosen)
        for name, adaptive in COLUMNS
    ]
    for column, (title, pictures) in enumerate(columns):
        errors = Mse()(truth, pictures)
        for row, picture in enumerate(pictures):
            axes = grid[row][column]
            axes.imshow(picture.clamp(0, 1).permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            if column:
                axes.set_xlabel(f"MSE {errors[row]:.3g}", fontsize=7)
        grid[0][column].set_title(title, fontsize=8)
    return figure


# --- Figure 5b: membership --------------------------------------------------------------------------------------------

PAPER_5B = {"FedAvg": 0.5453, "ME": 0.5245, "POGZ-FL": 0.5235, "CA-FL": 0.5357}
"""Mean AUC of the boundary attack, Section 5.3.2."""


def figure_5b(lab: Lab) -> Result:
    """Measure how well the boundary attack distinguishes a client's images from others, every five rounds."""
    attack = build(
        MembershipAttack,
        lab.pick("boundary:images=20,queries=100,every=1", "boundary:images=200,queries=500", "boundary"),
    )
    data = images(lab, "mnist")
    rows: list[dict[str, Any]] = []
    curves: dict[str, list[tuple[int, float]]] = {}
    for number, (name, defence) in enumerate(DEFENCES.items()):
        with _told(lab, f"membership under {name}"), part(number, len(DEFENCES)):
            settings = training(lab, "mnist", defence)
            every = lab.once(("membership", settings, attack), partial(_memberships, settings, attack, data, lab))
            tell(1.0)
        found = [figures for figures in every if figures["auc"] is not None]
        curves[name] = [(figures["round"], figures["auc"]) for figures in found]
        rows.append({"defence": defence, "paper_name": name} | membership_means(found) | {"paper_auc": PAPER_5B[name]})
    notes = [
        training_note(lab, "mnist", data),
        f"{PARTITION_NOTE}.",
        f"`{attack.spec}` attacks the model of a random client other than the guard, every {attack.every} rounds, as "
        "the server knows it from the update. Members are the client's images. Non-members are test images with the "
        "same number per class, so that classes reveal nothing (the paper: 500 members and 500 images from external "
        "sources).",
        "`auc_standard_error` is that of guessing with the same number of images; the paper gives none. Differences "
        "below two standard errors are not significant. `auc_loss` ranks by the loss, without the boundary attack.",
        STAND_INS,
    ]
    return Result(rows, notes, {"membership": _areas(curves)})


def _memberships(settings: TrainSettings, attack: MembershipAttack, data: Dataset, lab: Lab) -> list[dict[str, Any]]:
    """Return the membership figures of each measured round, up to the round in which the training diverges."""
    found: list[dict[str, Any]] = []
    with suppress(DivergedError):
        found.extend(infer_membership(settings, attack, dataset=data, data_root=lab.data_root))
    return found


def membership_means(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return means over the measured rounds, and the standard error that guessing would have.

    The AUC of guessing in one round has a variance of about 1 / (6 n) with n members and n non-members.
    """
    keys = {"auc": "auc", "auc_loss": "auc_loss", "accuracy_members": "accuracy_members",
            "accuracy_others": "accuracy_non_members"}  # fmt: skip
    means = {
        ours: rounded(statistics.fmean(row[theirs] for row in found)) if found else None
        for ours, theirs in keys.items()
    }
    error = math.sqrt(sum(1 / (6 * row["members"]) for row in found)) / len(found) if found else None
    first, *rest = means.items()
    return dict([first, ("auc_standard_error", rounded(error, 2)), *rest, ("rounds_measured", len(found))])


def _areas(curves: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Plot the AUC over the rounds."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0.5, color="black", lw=0.8, ls=":", label="guessing")
    for name, points in curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", ms=3.5, lw=1.2, label=name)
    farthest = max([0.05, *(abs(auc - 0.5) for points in curves.values() for _, auc in points)])
    axes.set(xlabel="round", ylabel="AUC of the boundary attack", ylim=(0.48 - farthest, 0.52 + farthest))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure
