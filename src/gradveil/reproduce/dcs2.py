"""DCS2 (Wu et al. 2024): its protection and its price beside noise, pruning and Soteria, on four data sets."""

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
from gradveil.reproduce.dcs2_attacks import Case, attack_case, make_case, scores
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
"""As in the authors' code: no signed steps, no box, TV 1e-4, labels known, and no word of the defence."""
GGL = "ggl:optimiser=adam,iterations={}"
"""With Adam as in the authors' code; its prior are the principal components of public images, not a trained GAN."""
IMPRINT = "imprint:bins=10,query=dct,mode=0,distribution=laplace"
"""Likewise."""
PLAIN, KNOWS, JOINT = "plain", "knows it", "searches both"
"""The paper's attacker; one with the first of the defence's countermoves; one who searches concealed samples too."""
Played = tuple[str, str]
"""A defence, by the paper's name, and an attacker."""
Row = dict[str, Any]
Told = Mapping[str, Mapping[str, float]]
"""The paper's figures by the name of a defence, accuracies in percent as it prints them."""


@dataclass(frozen=True)
class Plan:
    """One half of a table: a task, who is attacked how, and what the paper says.

    Attributes:
        task: a name of `TASKS`.
        defences: by the paper's names.
        told: the paper's figures.
        attack: ``{}`` stands for the iterations.
        adaptive: whether attackers who know the defence come too.
        trains: whether accuracy is measured.
        everyone: whether it is measured again with all clients defending.
        by_class: whether clients have two classes each.
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
        """Each defence with the paper's attacker, and with those who know it where there is something to know."""
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


# --- A plan at work ---------------------------------------------------------------------------------------------------


def played(lab: Lab, plans: Sequence[Plan], *notes: str, images: Images | None = None) -> Result:
    """The rows of all plans, one a defence and attacker, with pictures of what came back."""
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


def _attacked(lab: Lab, plan: Plan, case: Case, telling: Telling) -> dict[Played, Tensor]:
    """What comes back from each defence's updates."""
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


def _guess(case: Case, defence: str, attack: str, *, adaptive: bool, seed: int) -> Tensors:
    return {"guess": attack_case(case, defence, attack, adaptive=adaptive, seed=seed)}


def _trainings(lab: Lab, plan: Plan) -> list[tuple[str, bool]]:
    """Which defences train, of one client or (True) of all."""
    if not plan.trains or not TASKS[plan.task].sizes[lab.scale].rounds:
        return []
    return [(name, everyone) for name in plan.defences for everyone in (False, True)[: 1 + plan.everyone]]


def _price(lab: Lab, plan: Plan, images: Images, telling: Telling) -> dict[tuple[str, bool], Accuracy]:
    """Accuracies under each defence."""
    task, found = TASKS[plan.task], {}
    for name, everyone in _trainings(lab, plan):
        with telling(f"{task.title}, training, {name} at {'all clients' if everyone else 'one client'}"):
            defence = plan.defences[name]
            settings = training(lab, task, images, defence, everyone=everyone, by_class=plan.by_class)
            found[name, everyone] = train(lab, settings, images, tell)
    return found


def _row(
    lab: Lab, plan: Plan, case: Case, key: Played, guess: Tensor, price: Mapping[tuple[str, bool], Accuracy]
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
    """What was run of a plan, and what the paper did."""
    task = TASKS[plan.task]
    size, whole = (task.sizes[scale] for scale in (lab.scale, "full"))
    words = [
        f"{task.title} ({images.data.name.rpartition('/')[2]}): `{task.model(lab)}`, untrained, "
        f"attacked by `{plan.attack.format(size.iterations)}` on single images, "
        f"{size.targets} of client 5's (there are {whole.targets} at full scale); concealing takes {size.steps} steps "
        f"(the paper: {whole.steps})"
    ]
    if plan.trains and size.rounds:
        words.append(
            f"trained: 10 clients of {images_each(lab, task, images)} images (the paper: {whole.images}), "
            f"{'two classes each, ' if plan.by_class else ''}batch 64, SGD {task.lr:g} times 0.99 a round, "
            "momentum 0.9, "
            f"{size.rounds} rounds (the authors: {whole.rounds}), concealing in {size.training_steps} steps "
            f"({whole.training_steps})"
        )
    elif plan.trains:
        words.append("no accuracy at this scale")
    return "; ".join(words) + "."


def _notes(lab: Lab) -> list[str]:
    return [
        "`accuracy` and `accuracy_sensitive` (the images of the client that defends): client 5 alone defends, as in "
        "the authors' code, and all of its images are sensitive; after the last round, where the authors take the best "
        "one. In their code clients with noise or pruning never train, nor does Soteria's last layer; here all do.",
        "`knows it`: the attacker knows the defence, and plays the first of the countermoves that its file names; for "
        "DCS2 it takes the concealed sample's part out of the gradient where linear algebra can. `searches both`: it "
        "searches the concealed sample, with an unknown soft label, beside the image. The paper has no such rows.",
        *(["Scale smoke shows that it runs, and nothing else."] if lab.scale == "smoke" else []),
    ]


# --- The tables -------------------------------------------------------------------------------------------------------


def _told(**columns: Sequence[float | None]) -> Told:
    """The paper's columns, in the order None, DP-Gaussian, Prune, Soteria, DCS2."""
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
    "The given faces stand for CelebA: LFW, grey, 32x32, 59 people to be told apart where CelebA's label is the "
    "gender. GGL searches 64 principal components of public faces, where the paper has a GAN."
)


def table_1(lab: Lab) -> Result:
    """GS on MNIST and CIFAR-10 under five defences."""
    plans = [
        Plan("mnist", TASKS["mnist"].defences, MNIST, everyone=True),
        Plan("cifar10", TASKS["cifar10"].defences, CIFAR10),
    ]
    return played(lab, plans)


def table_2(lab: Lab) -> Result:
    """GGL on faces, and the imprint on Tiny-ImageNet."""
    plans = [
        Plan("faces", TASKS["faces"].defences, CELEBA, attack=GGL),
        Plan("tiny", TASKS["tiny"].defences, TINY, attack=IMPRINT),
    ]
    return played(lab, plans, FACES_NOTE, TINY_NOTE)


TINY_NOTE = (
    "Tiny-ImageNet at its own 64x64 (the paper: enlarged to 224x224), 1,600 images of 200 classes, and a ResNet-18 "
    "with random weights (the paper's is pre-trained): accuracies say little. The imprint stands before the network."
)


def table_3(lab: Lab) -> Result:
    """DCS2 with several lambda_g against the imprint."""
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
    """GS that starts from the average image of each class."""
    return played(lab, [_informed("None", "DCS2")], AVERAGES_NOTE)


AVERAGES_NOTE = "Averages are of public images of each class, which are none of the clients'."


def _informed(*names: str) -> Plan:
    defences = {name: TASKS["mnist"].defences[name] for name in names}
    return Plan("mnist", defences, INFORMED, attack=f"{GS},start=class-average", trains=False)


def table_5(lab: Lab) -> Result:
    """Where concealed samples start."""
    told = {
        "another image": {"psnr": 7.84, "ssim": 0.17, "accuracy_sensitive": 86.98, "accuracy": 86.98},
        "another image, MixUP": {"psnr": 7.97, "ssim": 0.18, "accuracy_sensitive": 86.56, "accuracy": 86.99},
        "noise": {"psnr": 7.40, "ssim": 0.16, "accuracy_sensitive": 85.94, "accuracy": 86.94},
    }
    starts = {"another image": "dcs2", "another image, MixUP": "dcs2:start=mixup", "noise": "dcs2:start=noise"}
    note = (
        "Which of the paper's four lines is which start is our reading of its ticks, and of the authors' code, whose "
        "main runs start at another image; its line with 7.69 dB was not told apart."
    )
    return played(lab, [Plan("mnist", starts, told)], note)


def table_6(lab: Lab) -> Result:
    """Faces concealed behind images of another data set."""
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
    note = "Concealed samples start at CIFAR-10 images without colours, with their labels of CIFAR-10."
    return played(lab, [plan], FACES_NOTE, note, images=replace(faces, starts=public))


def table_7(lab: Lab) -> Result:
    """Pruning, DCS2, and one after the other."""
    mnist = TASKS["mnist"].defences
    defences = {name: mnist[name] for name in ("Prune", "DCS2")}
    defences["Prune & DCS2"] = f"{mnist['DCS2']}+{mnist['Prune']}"
    told = dict(MNIST) | {"Prune & DCS2": {"psnr": 6.08, "ssim": 0.12, "accuracy_sensitive": 86.15, "accuracy": 86.92}}
    return played(lab, [Plan("mnist", defences, told)])


def table_9(lab: Lab) -> Result:
    """DCS2 beside ATS on CIFAR-10."""
    defences = {name: TASKS["cifar10"].defences[name] for name in ("None", "DCS2")} | {"ATS": "ats:crop=4,mirror=true"}
    ats = {"psnr": 19.68, "ssim": 0.59, "accuracy_sensitive": 67.99, "accuracy": 75.70}
    note = "The paper trains for 50 rounds more under ATS; here all train equally long."
    return played(lab, [Plan("cifar10", defences, {**CIFAR10, "ATS": ats})], note)


def table_10(lab: Lab) -> Result:
    """MNIST with different classes at each client."""
    note = "The paper does not say how its clients' data differ; two digits for each client is our reading."
    return played(lab, [Plan("mnist", TASKS["mnist"].defences, NON_IID, by_class=True)], note)


def table_11(lab: Lab) -> Result:
    """GS from the average image of each class, under all five."""
    return played(lab, [_informed(*TASKS["mnist"].defences)], AVERAGES_NOTE)


PAPER = Paper(
    "dcs2",
    "Wu et al. 2024, Concealing Sensitive Samples against Gradient Leakage in Federated Learning, AAAI, "
    "https://arxiv.org/abs/2209.05724",
    {
        "1": Experiment("GS on MNIST and CIFAR-10", table_1),
        "2": Experiment("Faces, and the imprint on Tiny-ImageNet", table_2),
        "3": Experiment("Shares of the concealed sample's own label", table_3),
        "4": Experiment("GS that starts from class averages", table_4),
        "5": Experiment("Where concealed samples start", table_5),
        "6": Experiment("Faces concealed behind CIFAR-10", table_6),
        "7": Experiment("Together with pruning", table_7),
        "9": Experiment("CIFAR-10", table_9),
        "10": Experiment("MNIST, two classes a client", table_10),
        "11": Experiment("Class averages, all defences", table_11),
    },
)
