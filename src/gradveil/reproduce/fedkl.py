"""FedKL (Ren et al.): the cost of a key-lock, a model's accuracy without its key, and the attacks that it stops."""

import statistics
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from gradveil.config import TrainSettings
from gradveil.data import Dataset, load_dataset
from gradveil.engines.devices import make_network
from gradveil.engines.simulation import Simulation, chosen_normalisation
from gradveil.federated.client import Score, score
from gradveil.randomness import stream
from gradveil.reproduce.base import Experiment, Lab, Paper, Result, rounded
from gradveil.reproduce.fedkl_attacks import table_6, table_7
from gradveil.reproduce.timing import overhead, round_seconds, seconds_in_turns
from gradveil.reproduce.trainings import thinned, trained
from gradveil.storage import PrivateFolder
from gradveil.types import Tensors

DEFENCE, OWN = "fedkl:lock=common,scale=paper", "fedkl:scale=paper"
"""The paper's defence, whose server hands out the initial locks, and a variant whose clients draw their own."""
CLIENTS = 3


class FedklTask(NamedTuple):
    """One training: a data set, a model and the number of rounds.

    Attributes:
        dataset: name of the data set.
        model: spec of the model.
        images: number of training and test images to use, or None for all of them.
        rounds: number of rounds of one epoch each.
        paper: the paper's name for this training, to look up its figures.
    """

    dataset: str
    model: str
    images: tuple[int, int] | None
    rounds: int
    paper: str


def tasks(lab: Lab) -> list[FedklTask]:
    """Return the trainings of a scale."""
    full = [
        FedklTask("mnist", "lenet5", None, 200, "LeNet MNIST"),
        FedklTask("cifar10", "resnet20", None, 200, "ResNet-20 C-10"),
        FedklTask("cifar10", "resnet32", None, 200, "ResNet-32 C-10"),
    ]
    small = [
        FedklTask("mnist-5k", "lenet5", None, 30, "LeNet MNIST"),
        FedklTask("cifar10", "resnet20", (3000, 1000), 10, "ResNet-20 C-10"),
        FedklTask("cifar10", "resnet32", (3000, 1000), 10, "ResNet-32 C-10"),
    ]
    return lab.pick([FedklTask("mnist-5k", "lenet5", (600, 300), 3, "LeNet MNIST")], small, full)


def training(task: FedklTask, defence: str, clients: int, seed: int) -> TrainSettings:
    """Return the authors' settings: Nesterov momentum, learning rate divided by 5 at 30, 60 and 80 % of the rounds."""
    steps = tuple(sorted({max(1, round(share * task.rounds)) for share in (0.3, 0.6, 0.8)}))
    return TrainSettings(
        dataset=task.dataset, model=task.model, defence=defence, clients=clients, rounds=task.rounds, batch_size=64,
        lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4, lr_steps=steps, lr_factor=0.2, seed=seed,
    )  # fmt: skip


def images_of(task: FedklTask, lab: Lab) -> Dataset:
    """Load the images of a task, spread evenly over the data set if it uses only some."""
    data = load_dataset(task.dataset, lab.data_root)
    if task.images is None:
        return data
    return replace(data, train=thinned(data.train, task.images[0]), test=thinned(data.test, task.images[1]))


def _note(task: FedklTask, data: Dataset) -> str:
    return (
        f"{task.model} on {task.dataset}: {len(data.train):,} training and {len(data.test):,} test images, "
        f"{task.rounds} rounds of one epoch (the paper: all images, 200 rounds). {data.note}".rstrip()
    )


# --- Tables 1 and 2: accuracy with and without the lock ---------------------------------------------------------------

PAPER_1 = {
    ("LeNet MNIST", "centralised", "none"): 98.09,
    ("LeNet MNIST", "centralised", DEFENCE): 98.07,
    ("LeNet MNIST", "federated", "none"): 98.14,
    ("LeNet MNIST", "federated", DEFENCE): 97.45,
    ("ResNet-20 C-10", "centralised", "none"): 91.63,
    ("ResNet-20 C-10", "centralised", DEFENCE): 90.58,
    ("ResNet-20 C-10", "federated", "none"): 91.20,
    ("ResNet-20 C-10", "federated", DEFENCE): 88.45,
    ("ResNet-32 C-10", "centralised", "none"): 92.34,
    ("ResNet-32 C-10", "centralised", DEFENCE): 91.05,
    ("ResNet-32 C-10", "federated", "none"): 91.37,
    ("ResNet-32 C-10", "federated", DEFENCE): 89.29,
}
Curve = list[tuple[float, float]]


def train_curve(
    task: FedklTask, data: Dataset, defence: str, clients: int, lab: Lab, tell: Callable[[float], None]
) -> Curve:
    """Return accuracy and loss after each round; under the defence the mean over clients, each with its own key."""
    rows = trained(lab, training(task, defence, clients, lab.seed), tell, dataset=data).rows
    return [(float(row["accuracy"]), float(row["loss"])) for row in rows]


def _trained(lab: Lab, modes: Mapping[str, int]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Curve]], list[str]]:
    """Train each task in each mode under each defence; return the rows, the curves by task and mode, and the notes."""
    chosen = tasks(lab)
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[str, Curve]] = {}
    defences = {mode: ("none", DEFENCE, *[OWN] * (clients > 1)) for mode, clients in modes.items()}
    total = len(chosen) * sum(map(len, defences.values()))
    notes = []
    for task in chosen:
        data = images_of(task, lab)
        notes.append(_note(task, data))
        for mode, clients in modes.items():
            for defence in defences[mode]:
                title = f"{task.paper}, {mode}"
                curve = train_curve(task, data, defence, clients, lab, lab.telling(title, len(rows), total))
                curves.setdefault(title, {})[defence] = curve
                rows.append(
                    {"task": task.paper, "training": mode, "defence": defence,
                     "accuracy": rounded(100 * curve[-1][0]), "best_round": rounded(100 * max(a for a, _ in curve)),
                     "paper": PAPER_1.get((task.paper, mode, defence))}
                )  # fmt: skip
    notes.append(
        "Accuracy in percent after the last round; `best_round` is the best test accuracy of all rounds, which the "
        f"paper reports. Federated: {CLIENTS} clients with equally many images. One seed. With `lock=common` the "
        "server hands out the initial values of all locks, as in the paper; otherwise each client draws its own."
    )
    return rows, curves, notes


def table_1(lab: Lab) -> Result:
    """Compare test accuracy with and without the key-lock, centralised and federated."""
    rows, _, notes = _trained(lab, {"centralised": 1, "federated": CLIENTS})
    return Result(rows, notes)


def table_2(lab: Lab) -> Result:
    """Plot accuracy and loss over the epochs of centralised training."""
    rows, curves, notes = _trained(lab, {"centralised": 1})
    figure = Figure(figsize=(7.5, 3.2 * len(curves)), layout="constrained")
    grid = figure.subplots(len(curves), 2, squeeze=False)
    for panels, (title, both) in zip(grid, curves.items(), strict=True):
        for index, (axes, what) in enumerate(zip(panels, ("test accuracy", "test loss"), strict=True)):
            for defence, curve in both.items():
                style = "--" if defence == "none" else "-"
                axes.plot(range(1, len(curve) + 1), [pair[index] for pair in curve], style, label=defence)
            axes.set(title=title, xlabel="epoch", ylabel=what)
            axes.grid(alpha=0.3)
            axes.legend(frameon=False, fontsize=8)
    return Result(rows, notes, {"curves": figure})


# --- Table 3: other keys ----------------------------------------------------------------------------------------------

PAPER_3 = {
    "LeNet MNIST": {"client 0": 97.88, "client 1": 97.90, "client 2": 97.66, "average": 97.45, "random": 10.45},
    "ResNet-20 C-10": {"client 0": 88.59, "client 1": 87.88, "client 2": 88.63, "average": 88.45, "random": 79.17},
    "ResNet-32 C-10": {"client 0": 89.26, "client 1": 89.42, "client 2": 88.83, "average": 89.29, "random": 75.91},
}
PAPER_PROPORTION = {"LeNet MNIST": "22.43 %", "ResNet-20 C-10": "10.49 %", "ResNet-32 C-10": "6.46 %"}


def table_3(lab: Lab) -> Result:
    """Test the trained global model with each client's key, with another client's key, and with random keys."""
    chosen = tasks(lab)
    rows: list[dict[str, Any]] = []
    notes = []
    for number, task in enumerate(chosen):
        data = images_of(task, lab)
        notes.append(_note(task, data))

        for more, defence in enumerate((DEFENCE, OWN)):
            tell = lab.telling(f"{task.paper}, {defence}", 2 * number + more, 2 * len(chosen))
            rows += lab.once(("keys", task, defence), partial(_keys_tried, lab, task, data, defence, tell))
    notes.append(
        "Accuracy of the global model in percent. `client N` uses the client's own key and lock, as the paper's "
        "`Client`. `another's key` (mean over the other clients) and `random key, own lock` keep the client's lock. "
        "`random` draws key and lock at random, as in the paper (mean of 5); `gap` is the difference to it. With "
        "`lock=common` the server's first lock is the one that all clients started from. lenet5 has 6 channels in its "
        "first layer and takes 28x28 images; the paper uses another LeNet, in which the lock has a larger share."
    )
    return Result(rows, notes)


def _keys_tried(
    lab: Lab, task: FedklTask, data: Dataset, defence: str, tell: Callable[[float], None]
) -> list[dict[str, Any]]:
    settings = replace(training(task, defence, CLIENTS, lab.seed), eval_every=task.rounds)
    with (
        TemporaryDirectory(prefix="gradveil-keys-") as folder,
        Simulation(settings, dataset=data, workers=0, clients_folder=Path(folder)) as simulation,
    ):
        for row in simulation.run():
            tell(int(str(row["round"])) / task.rounds)
        return _with_keys(simulation, task, Path(folder), lab.seed)


def _with_keys(simulation: Simulation, task: FedklTask, folder: Path, seed: int) -> list[dict[str, Any]]:
    net = simulation.net
    net.receive(net.shared_vector(simulation.model))
    first = net.private_tensors()
    own = [_secrets(folder, client, task.rounds) for client in range(CLIENTS)]
    rng = stream(seed, "reproduce", "fedkl", "keys")

    def accuracy(secrets: Tensors) -> float:
        net.set_private(secrets)
        total = sum((score(net.module, batch) for batch in _test_batches(simulation)), Score())
        return 100 * total.accuracy

    def mixed(lock: Tensors, key: Tensors) -> dict[str, Tensor]:
        return {**lock, **{name: tensor for name, tensor in key.items() if name.endswith(".key")}}

    others = [accuracy(mixed(own[i], own[j])) for i in range(CLIENTS) for j in range(CLIENTS) if i != j]
    strange = [_random(own[0], rng) for _ in range(5)]
    found = {f"client {client}": accuracy(own[client]) for client in range(CLIENTS)}
    found |= {
        "average": statistics.fmean(found.values()),
        "another's key": statistics.fmean(others),
        "random key, own lock": statistics.fmean(accuracy(mixed(own[i % CLIENTS], s)) for i, s in enumerate(strange)),
        "random key, server's first lock": statistics.fmean(accuracy(mixed(first, secrets)) for secrets in strange),
        "random": statistics.fmean(accuracy(secrets) for secrets in strange),
    }
    locks = sum(t.numel() for name, t in own[0].items() if not name.endswith(".key"))
    share = locks / sum(parameter.numel() for parameter in net.module.parameters())
    defence = simulation.defence.spec
    told = PAPER_3[task.paper] if defence == DEFENCE else {}
    return [
        {"task": task.paper, "defence": defence, "key": key, "accuracy": rounded(value),
         "gap": rounded(value - found["random"]), "paper": told.get(key), "lock_proportion": f"{100 * share:.2f} %",
         "paper_proportion": PAPER_PROPORTION[task.paper]}
        for key, value in found.items()
    ]  # fmt: skip


def _secrets(folder: Path, client: int, rounds: int) -> dict[str, Tensor]:
    state = PrivateFolder(folder / str(client) / "private").load_state(rounds + 1) or {}
    return {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")}


def _random(like: Tensors, rng: torch.Generator) -> dict[str, Tensor]:
    """Draw keys and locks as a new client would."""
    found = {}
    for name, tensor in like.items():
        drawn = torch.rand(tensor.shape, generator=rng)
        length = len(like[f"{name.rpartition('.')[0]}.key"])
        found[name] = (drawn if name.endswith(".key") else (2 * drawn - 1) / length**0.5).to(tensor)
    return found


def _test_batches(simulation: Simulation) -> list[Any]:
    count = simulation.data.count("test", None)
    return [simulation.data.images("test", None, start, start + 500) for start in range(0, count, 500)]


# --- Time -------------------------------------------------------------------------------------------------------------


def times(lab: Lab) -> Result:
    """Time a round with and without the key-lock; the contenders take turns in one process."""
    rounds = lab.pick(3, 12, 30)
    rows: list[dict[str, Any]] = []
    notes = []
    for task in tasks(lab):
        data = images_of(task, lab)
        data = replace(data, train=thinned(data.train, lab.pick(300, 1200, 12000)))
        found = measure_rounds(lab, task._replace(rounds=rounds), data)
        for name, own in found.items():
            rows.append(
                {"task": task.paper, "training": name, "round_seconds": rounded(round_seconds(own)),
                 "times_fedavg": rounded(overhead(own, found["FedAvg"])),
                 "times_with_batch_norm": rounded(overhead(own, found.get("FedAvg, BatchNorm", found["FedAvg"])))}
            )  # fmt: skip
        notes.append(f"{task.model}, {len(data.train):,} images on {CLIENTS} clients, {rounds} rounds.")
    notes.append(
        "Medians over the rounds after the first; the order of the contenders changes every round. lenet5 has no "
        "normalisation, and the lock adds BatchNorm: `FedAvg, BatchNorm` has BatchNorm without a lock, and `FedKL, no "
        "normalisation` is the paper's Eq. 30 as written. The paper gives no figures; it claims a minimal cost."
    )
    return Result(rows, notes)


def measure_rounds(lab: Lab, task: FedklTask, data: Dataset) -> dict[str, list[float]]:
    """Return the seconds of each round with FedAvg and FedKL.

    If the network has no normalisation, two more contenders run: FedAvg with BatchNorm where FedKL would add it, and
    FedKL without BatchNorm.
    """
    contenders = {"FedAvg": "none", "FedKL": DEFENCE}
    if not _has_norm(training(task, "none", CLIENTS, lab.seed), data):
        contenders |= {"FedAvg, BatchNorm": "none", "FedKL, no normalisation": f"{DEFENCE},norm=none"}
    with ExitStack() as stack:
        runs = {}
        for name, defence in contenders.items():
            settings = replace(training(task, defence, CLIENTS, lab.seed), eval_every=task.rounds)
            network = partial(_normed, settings, data) if "BatchNorm" in name else None
            simulation = Simulation(settings, dataset=data, workers=0, network=network)
            runs[name] = stack.enter_context(simulation)
        return seconds_in_turns(runs, task.rounds, lab.telling(f"{task.paper}, rounds of all contenders"))


def _plain(settings: TrainSettings, data: Dataset) -> nn.Module:
    normalisation = chosen_normalisation(settings.normalise, data)
    return make_network(settings, data.shape, data.num_classes, normalisation)


def _has_norm(settings: TrainSettings, data: Dataset) -> bool:
    return any(isinstance(layer, nn.BatchNorm2d) for layer in _plain(settings, data).modules())


def _normed(settings: TrainSettings, data: Dataset) -> nn.Module:
    """Return the network with BatchNorm after its first convolution."""
    network = _plain(settings, data)
    name, conv = next((name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d))
    parent, _, own = name.rpartition(".")
    block = nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(conv.out_channels)))
    setattr(network.get_submodule(parent), own, block)
    return network


PAPER = Paper(
    "fedkl",
    "Ren et al., Gradient Leakage Defense with Key-Lock Module for Federated Learning, https://arxiv.org/abs/2305.04095",
    {
        "1": Experiment("Accuracy with and without the key-lock", table_1),
        "2": Experiment("Accuracy and loss over the epochs, centralised", table_2),
        "3": Experiment("Accuracy by key, and the lock's share of the parameters", table_3),
        "6": Experiment("Attacks with and without the key-lock (Tables 4 to 6)", table_6),
        "7": Experiment("Attacks by what the client shares: key, lock, both or nothing", table_7),
        "time": Experiment("Time of a round with and without the key-lock", times),
    },
)
