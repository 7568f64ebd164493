"""DCS2 (Wu et al. 2024): privacy and accuracy compared with noise, pruning and Soteria, on four data sets."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from gradveil.attacks import build_attack
from gradveil.attacks.matching import Matching
from gradveil.data import load_dataset
from gradveil.defences import Defence, build_defence
from gradveil.defences.dcs2 import Dcs2
from gradveil.progress import listening, tell
from gradveil.reproduce.base import Experiment, Lab, Paper, Result, picture_lines, rounded
from gradveil.reproduce.dcs2_attacks import Dcs2Case, attack_case, make_case, scores
from gradveil.reproduce.dcs2_training import (
    TASKS,
    Accuracy,
    Images,
    chosen,
    images_each,
    load_images,
    partition_of,
    resized,
    train,
    training,
    with_steps,
)
from gradveil.types import Tensors

GS = "gs:sign=none,boxed=false,iterations={}"
"""As in the authors' code: unsigned steps, no box, TV 1e-4, known labels, and no knowledge of the defence."""
GGL = "ggl:optimiser=adam,iterations={},distance=cosine,tv=1e-4,kl=1e-4"
"""Search as in the authors' code; the prior is the principal components of public images, not a trained GAN."""
IMPRINT = "imprint:bins=10,query=dct,mode=0,distribution=laplace"
"""Bins and query as in the authors' code; see ``gain`` of the attack for the strength of its rows."""
PLAIN, KNOWS, JOINT = "plain", "knows it", "searches both"
"""The paper's attacker; one who plays the first countermove; one who also searches the concealed samples."""
Played = tuple[str, str]
"""The paper's name of a defence, and an attacker."""
Row = dict[str, Any]
Told = Mapping[str, Mapping[str, float]]
"""The paper's figures by name of the defence; accuracies are in percent, as printed."""


@dataclass(frozen=True)
class Plan:
    """One half of a table: a task, its defences, the attack on them, and the paper's figures.

    Attributes:
        task: a name in `TASKS`.
        defences: specs by the paper's names.
        told: the paper's figures.
        attack: spec of the attack; ``{}`` stands for the number of iterations.
        adaptive: whether attackers who know the defence are included.
        trains: whether accuracy is measured.
        everyone: whether accuracy is also measured with all clients defending.
        by_class: whether each client has two classes only.
    """

    task: str
    defences: Mapping[str, str]
    told: Told
    attack: str = GS
    adaptive: bool = True
    trains: bool = True
    everyone: bool = False
    by_class: bool = False

    @property
    def attackers(self) -> list[Played]:
        """Each defence with the paper's attacker, and with adaptive attackers if it has countermoves."""
        knowing = self.adaptive and isinstance(build_attack(self.attack.format(1)), Matching)
        return [
            (name, attacker)
            for name, spec in self.defences.items()
            for attacker in (PLAIN, *(_knowing(build_defence(spec)) if knowing else ()))
        ]


def _knowing(defence: Defence) -> tuple[str, ...]:
    if isinstance(defence, Dcs2):
        return KNOWS, JOINT
    return (KNOWS,) if defence.overrides("adaptive") else ()


# --- Running a plan ---------------------------------------------------------------------------------------------------


def played(lab: Lab, plans: Sequence[Plan], *notes: str, images: Images | None = None) -> Result:
    """Run all plans; return one row per defence and attacker, with pictures of the reconstructions."""
    total, done = sum(len(plan.attackers) + len(_trainings(lab, plan)) for plan in plans), itertools.count()

    def telling(doing: str) -> AbstractContextManager[None]:
        return listening(lab.telling(doing, next(done), total))

    rows: list[Row] = []
    said: list[str] = []
    figures = {}
    for plan in plans:
        task = TASKS[plan.task]
        mine = images or load_images(lab, task)
        partition = partition_of(lab, task, mine, by_class=plan.by_class)
        case = make_case(mine, task.model(lab), partition, task.sizes[lab.scale].targets, lab.seed)
        guesses = _attacked(lab, plan, case, telling)
        price = _price(lab, plan, mine, telling)
        lines = {_words(*key): guess[:, 0] for key, guess in guesses.items()}
        figures[f"pictures-{plan.task}"] = picture_lines({"truth": case.truth[:, 0], **lines})
        rows += [_row(lab, plan, case, key, guess, price) for key, guess in guesses.items()]
        said.append(_said(lab, plan, mine))
    return Result(rows, [*said, *_notes(lab), *notes], figures)


Telling = Callable[[str], AbstractContextManager[None]]


def _attacked(lab: Lab, plan: Plan, case: Dcs2Case, telling: Telling) -> dict[Played, Tensor]:
    """Return the reconstructions by defence and attacker."""
    task, found = TASKS[plan.task], {}
    size = task.sizes[lab.scale]
    for name, attacker in plan.attackers:
        with telling(f"{task.title}, attack on {_words(name, attacker)}"):
            defence = with_steps(plan.defences[name], size.steps)
            attack = plan.attack.format(size.iterations) + ",adapt=joint" * (attacker == JOINT)
            knows = attacker != PLAIN
            work = partial(_guess, case, defence, attack, adaptive=knows, seed=lab.seed)
            part = ("attack", plan.task, plan.by_class, defence, attack, knows)
            found[name, attacker] = lab.tensors_once(part, work)["guess"]
            tell(1.0)
    return found


def _words(name: str, attacker: str) -> str:
    return name if attacker == PLAIN else f"{name}, {attacker}"


def _guess(case: Dcs2Case, defence: str, attack: str, *, adaptive: bool, seed: int) -> Tensors:
    return {"guess": attack_case(case, defence, attack, adaptive=adaptive, seed=seed)}


def _trainings(lab: Lab, plan: Plan) -> list[tuple[str, bool]]:
    """Return the defences to train under, each with whether all clients defend (True) or only one."""
    if not plan.trains or not TASKS[plan.task].sizes[lab.scale].rounds:
        return []
    return [(name, everyone) for name in plan.defences for everyone in (False, True)[: 1 + plan.everyone]]


def _price(lab: Lab, plan: Plan, images: Images, telling: Telling) -> dict[tuple[str, bool], Accuracy]:
    """Return the accuracies under each defence."""
    task, found = TASKS[plan.task], {}
    for name, everyone in _trainings(lab, plan):
        with telling(f"{task.title}, training, {name} at {'all clients' if everyone else 'one client'}"):
            defence = plan.defences[name]
            settings = training(lab, task, images, defence, everyone=everyone, by_class=plan.by_class)
            found[name, everyone] = train(lab, settings, images, tell)
    return found


def _row(
    lab: Lab, plan: Plan, case: Dcs2Case, key: Played, guess: Tensor, price: Mapping[tuple[str, bool], Accuracy]
) -> Row:
    name, attacker = key
    knows = attacker != PLAIN
    own, all_ = (None if knows else price.get((name, everyone)) for everyone in (False, True))
    row = {
        "dataset": TASKS[plan.task].title, "paper_name": name, "defence": plan.defences[name],
        "attacker": attacker, **scores(case, guess, lab.data_root),
        "accuracy_sensitive": rounded(own.sensitive) if own else None, "accuracy": rounded(own.test) if own else None,
    }  # fmt: skip
    if plan.everyone:
        row["accuracy_all_defend"] = rounded(all_.test) if all_ else None
    told = {figure: value / 100 if "accuracy" in figure else value for figure, value in plan.told.get(name, {}).items()}
    return row | {f"paper_{figure}": None if knows else rounded(value) for figure, value in told.items()}


def _said(lab: Lab, plan: Plan, images: Images) -> str:
    """Describe how a plan was run, and how the paper's experiment differs."""
    task = TASKS[plan.task]
    size, whole = (task.sizes[scale] for scale in (lab.scale, "full"))
    words = [
        f"{task.title} ({images.data.name.rpartition('/')[2]}): `{task.model(lab)}`, untrained, "
        f"attacked by `{plan.attack.format(size.iterations)}` on single images, "
        f"{size.targets} images of client 5 ({whole.targets} at full scale); concealing takes {size.steps} steps "
        f"(the paper: {whole.steps})"
    ]
    if plan.trains and size.rounds:
        words.append(
            f"trained: 10 clients of {images_each(lab, task, images)} images (the paper: {whole.images}), "
            f"{'two classes each, ' if plan.by_class else ''}batch 64, SGD with learning rate {task.lr:g} times 0.99 "
            "per round, momentum 0.9, "
            f"{size.rounds} rounds (the authors: {whole.rounds}), concealing takes {size.training_steps} steps "
            f"(the authors: {whole.training_steps})"
        )
    elif plan.trains:
        words.append("accuracy is not measured at this scale")
    return "; ".join(words) + "."


def _notes(lab: Lab) -> list[str]:
    return [
        "`accuracy` and `accuracy_sensitive` (on the images of the defending client): only client 5 defends, as in the "
        "authors' code, and all its images are sensitive. Both are measured after the last round; the authors report "
        "the best round. In their code clients with noise or pruning never train, nor does Soteria's last layer; here "
        "all of them train.",
        "`ssim_authors` and `lpips_authors` are the paper's metrics as its code computes them: windows of SSIM reach "
        "beyond the image, where it is black, and LPIPS is fed pixels in [0, 1] in place of [-1, 1].",
        "`knows it`: the attacker knows the defence and plays its first countermove; against DCS2 it removes the "
        "concealed sample's share from the gradient wherever linear algebra allows it. `searches both`: the attacker "
        "searches the concealed sample, with an unknown soft label, together with the image. The paper has neither.",
        *(["Scale smoke only shows that the experiment runs."] if lab.scale == "smoke" else []),
    ]


# --- The tables -------------------------------------------------------------------------------------------------------


def _told(**columns: Sequence[float | None]) -> Told:
    """Return the paper's figures from columns in the order None, DP-Gaussian, Prune, Soteria, DCS2."""
    names = ("None", "DP-Gaussian", "Prune", "Soteria", "DCS2")
    return {
        name: {figure: value for figure, values in columns.items() if (value := values[row]) is not None}
        for row, name in enumerate(names)
    }


MNIST = _told(
    psnr=(59.20, 35.38, 14.13, 9.67, 7.84), ssim=(1.00, 0.83, 0.37, 0.30, 0.17),
    accuracy_sensitive=(86.98, 85.94, 85.94, 86.98, 86.98), accuracy=(87.16, 86.91, 86.91, 86.94, 86.98),
)  # fmt: skip
CIFAR10 = _told(
    psnr=(20.41, 12.34, 11.26, 11.48, 8.04), ssim=(0.73, 0.28, 0.22, 0.29, 0.15),
    accuracy_sensitive=(90.35, 77.19, 77.80, 84.70, 80.39), accuracy=(80.41, 79.65, 79.51, 79.76, 79.79),
)  # fmt: skip
CELEBA = _told(
    psnr=(19.92, 13.95, 9.57, 8.89, 8.24), ssim=(0.75, 0.44, 0.24, 0.24, 0.17),
    accuracy_sensitive=(100.0, 90.51, 91.41, 100.0, 100.0), accuracy=(93.79, 93.19, 93.25, 93.86, 94.31),
)  # fmt: skip
TINY = _told(
    ssim=(1.00, 1.00, 0.91, 1.00, 0.79), lpips=(0.00, 0.00, 0.16, 0.00, 0.22),
    accuracy_sensitive=(73.94, 53.28, 52.77, 41.84, 59.88), accuracy=(66.41, 65.65, 65.73, 52.06, 65.68),
)  # fmt: skip
NON_IID = _told(
    psnr=(57.50, 34.73, 14.49, 7.28, 7.27), ssim=(1.00, 0.83, 0.39, 0.23, 0.16),
    accuracy_sensitive=(89.84, 83.59, 83.59, 85.42, 89.32), accuracy=(76.60, 75.75, 75.75, 75.92, 75.19),
)  # fmt: skip
INFORMED = _told(psnr=(59.22, 35.28, 14.23, 9.94, 7.87), ssim=(1.00, 0.82, 0.37, 0.31, 0.18))
FACES_NOTE = (
    "LFW faces stand in for CelebA: grey, 32x32; the label is one of 59 people instead of CelebA's gender. GGL "
    "searches 64 principal components of public faces; the paper uses a GAN."
)


def table_1(lab: Lab) -> Result:
    """Attack MNIST and CIFAR-10 by GS under five defences."""
    plans = [
        Plan("mnist", TASKS["mnist"].defences, MNIST, everyone=True),
        Plan("cifar10", TASKS["cifar10"].defences, CIFAR10),
    ]
    return played(lab, plans)


def table_2(lab: Lab) -> Result:
    """Attack faces by GGL, and Tiny-ImageNet by the imprint attack."""
    plans = [
        Plan("faces", TASKS["faces"].defences, CELEBA, attack=GGL),
        Plan("tiny", TASKS["tiny"].defences, TINY, attack=IMPRINT),
    ]
    return played(lab, plans, FACES_NOTE, TINY_NOTE)


TINY_NOTE = (
    "Tiny-ImageNet at its original 64x64 (the paper: enlarged to 224x224), 1,600 images of 200 classes, and a "
    "ResNet-18 with random weights (the paper's is pre-trained), so accuracies say little. The imprint layer comes "
    "before the network."
)


def table_3(lab: Lab) -> Result:
    """Attack DCS2 with several values of lambda_g by the imprint attack."""
    told = {0.5: (0.80, 0.22, 60.33, 65.76), 0.7: (0.79, 0.22, 59.88, 65.68), 1.0: (0.78, 0.23, 58.54, 65.24)}
    names = ("ssim", "lpips", "accuracy_sensitive", "accuracy")
    plain = TASKS["tiny"].defences["DCS2"]
    plan = Plan(
        "tiny",
        {f"lambda_g = {share}": f"{plain},lambda_g={share}" for share in told},
        {f"lambda_g = {share}": dict(zip(names, values, strict=True)) for share, values in told.items()},
        attack=IMPRINT,
    )
    return played(lab, [plan], TINY_NOTE)


def table_4(lab: Lab) -> Result:
    """Attack by GS starting from the average image of each class."""
    return played(lab, [_informed("None", "DCS2")], AVERAGES_NOTE)


AVERAGES_NOTE = "The class averages are of public images, which belong to no client."


def _informed(*names: str) -> Plan:
    defences = {name: TASKS["mnist"].defences[name] for name in names}
    return Plan("mnist", defences, INFORMED, attack=f"{GS},start=class-average", trains=False)


def table_5(lab: Lab) -> Result:
    """Compare the starting points of concealed samples."""
    told = {
        "another image": {"psnr": 7.84, "ssim": 0.17, "accuracy_sensitive": 86.98, "accuracy": 86.98},
        "another image, MixUP": {"psnr": 7.97, "ssim": 0.18, "accuracy_sensitive": 86.56, "accuracy": 86.99},
        "noise": {"psnr": 7.40, "ssim": 0.16, "accuracy_sensitive": 85.94, "accuracy": 86.94},
    }
    starts = {"another image": "dcs2", "another image, MixUP": "dcs2:start=mixup", "noise": "dcs2:start=noise"}
    note = (
        "We matched the paper's lines to starting points by its tick marks and by the authors' code, whose main runs "
        "start at another image; the fourth line, with 7.69 dB, could not be matched."
    )
    return played(lab, [Plan("mnist", starts, told)], note)


def table_6(lab: Lab) -> Result:
    """Conceal faces behind images of another data set."""
    told = {
        "None": {"psnr": 19.92, "ssim": 0.75, "accuracy": 93.79},
        "DCS2 from CIFAR10": {"psnr": 8.68, "ssim": 0.18, "accuracy": 94.13},
    }
    defence = TASKS["faces"].defences["DCS2"]
    plan = Plan("faces", {"None": "none", "DCS2 from CIFAR10": f"{defence},start=aux"}, told, attack=GGL)
    faces = load_images(lab, TASKS["faces"])
    others = resized(load_dataset("cifar10", lab.data_root), TASKS["faces"].side, grey=True)
    count = len(faces.public.train)
    public = replace(others, train=chosen(others.train, np.arange(count)), test=chosen(others.test, np.arange(count)))
    note = "Concealed samples start at grey CIFAR-10 images with their CIFAR-10 labels."
    return played(lab, [plan], FACES_NOTE, note, images=replace(faces, starts=public))


def table_7(lab: Lab) -> Result:
    """Compare pruning, DCS2, and both combined."""
    mnist = TASKS["mnist"].defences
    defences = {name: mnist[name] for name in ("Prune", "DCS2")}
    defences["Prune & DCS2"] = f"{mnist['DCS2']}+{mnist['Prune']}"
    told = dict(MNIST) | {"Prune & DCS2": {"psnr": 6.08, "ssim": 0.12, "accuracy_sensitive": 86.15, "accuracy": 86.92}}
    return played(lab, [Plan("mnist", defences, told)])


def table_9(lab: Lab) -> Result:
    """Compare DCS2 with ATS on CIFAR-10."""
    defences = {name: TASKS["cifar10"].defences[name] for name in ("None", "DCS2")} | {"ATS": "ats:crop=4,mirror=true"}
    ats = {"psnr": 19.68, "ssim": 0.59, "accuracy_sensitive": 67.99, "accuracy": 75.70}
    note = "The paper trains 50 more rounds under ATS; here every defence trains for the same number of rounds."
    return played(lab, [Plan("cifar10", defences, {**CIFAR10, "ATS": ats})], note)


def table_10(lab: Lab) -> Result:
    """Attack and train on MNIST with different classes at each client."""
    note = "The paper does not say how its clients' data differ; two digits per client is our reading."
    return played(lab, [Plan("mnist", TASKS["mnist"].defences, NON_IID, by_class=True)], note)


def table_11(lab: Lab) -> Result:
    """Attack by GS from the average image of each class, under all five defences."""
    return played(lab, [_informed(*TASKS["mnist"].defences)], AVERAGES_NOTE)


PAPER = Paper(
    "dcs2",
    "Wu et al. 2024, Concealing Sensitive Samples against Gradient Leakage in Federated Learning, AAAI, "
    "https://arxiv.org/abs/2209.05724",
    {
        "1": Experiment("GS on MNIST and CIFAR-10", table_1),
        "2": Experiment("Faces, and the imprint on Tiny-ImageNet", table_2),
        "3": Experiment("Share lambda_g of the concealed sample's own label", table_3),
        "4": Experiment("GS starting from class averages", table_4),
        "5": Experiment("Starting points of concealed samples", table_5),
        "6": Experiment("Faces concealed behind CIFAR-10", table_6),
        "7": Experiment("DCS2 combined with pruning", table_7),
        "9": Experiment("DCS2 and ATS on CIFAR-10", table_9),
        "10": Experiment("MNIST, two classes per client", table_10),
        "11": Experiment("GS starting from class averages, all defences", table_11),
    },
)
