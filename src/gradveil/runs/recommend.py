"""Recommend a protection: the least costly configuration that keeps a wish, and a check that it really does."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scipy.special import ndtri

from gradveil.config import TrainSettings, names_options, setting, to_toml, with_absolute_paths
from gradveil.data import load_dataset
from gradveil.defences.parts.accounting import poisson_noise
from gradveil.defences.parts.gaussian_dp import CANDIDATES, epsilon_of, identification_bound, mu_of
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError, GradveilError
from gradveil.report.recommendation import write_recommendation
from gradveil.runs.train import train
from gradveil.storage import write_atomic
from gradveil.validate import in_range, one_of

DELTA = 1e-5
SERVERS, PROTECTED = ("honest", "malicious"), ("image", "membership", "client")
HEAD_ROUNDS = 60
"""Rounds in which a head on frozen features is trained."""
ROUNDED = 3
"""Digits of mu and of noise in the texts of defences; mu is rounded down and noise up."""

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class RecommendSettings:
    """What is to be protected, against whom, and what it may cost. The command line has one option per field."""

    dataset: str = setting("mnist-5k", "A named set (gradveil list datasets), a .npz file or a folder of pictures.")
    model: str = setting("lenet5", "The model that would be trained without protection; accuracy is compared with it.")
    weights: str = setting("", "Weights of that model from public data; a head on its frozen trunk is tried too.")
    aux: str = setting("", "Data set of public images, for features; by default two photographs.")
    server: str = setting("honest", "The server: honest (it sums as agreed) or malicious (it may do anything).")
    protect: str = setting("image", "What is protected: image (its content), membership, or client (all its images).")
    max_loss: float = setting(1.0, "Largest loss of test accuracy in percentage points.")
    identified: float = setting(0.02, "Largest chance to pick an image among 1,000, with --protect image.")
    epsilon: float = setting(8.0, "Largest epsilon at delta 1e-5, with --protect membership or client.")
    clients: int = setting(10, "Number of clients.")
    partition: str = setting("iid", "How training images are divided among clients.")
    rounds: int = setting(20, "Rounds of the unprotected training.")
    epochs: int = setting(1, "Local epochs per round of the unprotected training.")
    batch_size: int = setting(32, "Images per local step of the unprotected training.")
    lr: float = setting(0.05, "Learning rate of the unprotected training.")
    seed: int = setting(0, "Every random draw comes from this seed; the check takes the next one.")
    device: str = setting("cpu", "cpu, cuda or cuda:1.")

    @names_options
    def __post_init__(self) -> None:
        one_of("server", self.server, SERVERS)
        one_of("protect", self.protect, PROTECTED)
        in_range("max_loss", self.max_loss, 0, 100)
        in_range("identified", self.identified, 1 / CANDIDATES, 1, open_low=True, open_high=True)
        in_range("epsilon", self.epsilon, 0, open_low=True)
        in_range("rounds", self.rounds, 1)
        if self.protect == "client" and self.clients < 2:
            raise ConfigError(
                f"clients must be at least 2 to hide one among others, got {self.clients}. Raise --clients."
            )
        self.reference()

    def reference(self) -> TrainSettings:
        """Return the settings of the unprotected training."""
        mine = asdict(self)
        same = {name: mine[name] for name in TrainSettings.__dataclass_fields__ if name in mine}
        return with_absolute_paths(TrainSettings(**same | {"aux": ""}))

    @property
    def mu(self) -> float:
        """The largest mu that keeps the wish, rounded down."""
        exact = (
            ndtri(self.identified) - ndtri(1 / CANDIDATES) if self.protect == "image" else mu_of(self.epsilon, DELTA)
        )
        return float(int(float(exact) * 10**ROUNDED) / 10**ROUNDED)

    @property
    def promise(self) -> str:
        """The wish as a sentence."""
        if self.protect == "image":
            return f"nobody picks a training image among {CANDIDATES:,} with a chance above {self.identified:.1%}"
        whose = "whether an image was used" if self.protect == "membership" else "whether a client took part"
        return f"nobody can tell {whose} (epsilon {self.epsilon:g} at delta {DELTA:g})"


@dataclass(frozen=True)
class Protection:
    """A configuration that keeps the wish by proof, or the reason why it can't be one."""

    name: str
    training: TrainSettings | None
    why_not: str = ""


@dataclass(frozen=True)
class Recommendation:
    """What was found.

    Attributes:
        out: the folder, with report.html and, if there is one, recommended.toml.
        reference: accuracy of the unprotected training.
        lines: one line per candidate: accuracy, points lost, mu, epsilon, whether it keeps the wish, and why not.
        chosen: name of the recommended candidate, or "" if none keeps the wish.
        check: the line of the chosen one with another seed, or None.
    """

    out: Path
    reference: float
    lines: list[dict[str, Any]]
    chosen: str
    check: dict[str, Any] | None

    @property
    def confirmed(self) -> bool:
        """Whether the check with another seed kept the wish too."""
        return bool(self.check and self.check["holds"])

    @property
    def nearest(self) -> list[dict[str, Any]]:
        """The two candidates that lose least, for a wish that none keeps."""
        measured = [line for line in self.lines if line["loss"] is not None]
        return sorted(measured, key=lambda line: float(line["loss"]))[:2]


def candidates(settings: RecommendSettings, sizes: Iterable[int]) -> list[Protection]:
    """Return the configurations to try; ``sizes`` are the numbers of images of the clients.

    Each bounds what any attacker learns, by proof. Published obfuscations are not among them: all fall to an attacker
    who knows them. Noise that is shared under secure aggregation holds only if the server keeps to the protocol.
    """
    reference, found = settings.reference(), list[Protection]()
    trunks = {"patches": settings.aux}
    if settings.weights:
        trunks[f"frozen:network={settings.model.replace(',', ';')},weights={reference.weights}"] = ""
    unit = ",unit=client" if settings.protect == "client" else ""
    for model, aux in trunks.items():
        name = model.partition(":")[0]
        head = replace(
            reference, model=model, weights="", aux=aux, rounds=HEAD_ROUNDS, defence=f"veil:mu={settings.mu:g}{unit}"
        )
        found.append(Protection(f"veil on {name}, noise at each client", head))
        shared = replace(head, defence=f"{head.defence},at=sum", aggregation="secure") if settings.clients > 1 else None
        reason = "the server may break secure aggregation" if settings.server == "malicious" else ""
        reason = reason or ("" if shared else "there is only one client")
        found.append(Protection(f"veil on {name}, noise shared in secure sums", None if reason else shared, reason))
    return [*found, _whole(settings, reference, sizes)]


def _whole(settings: RecommendSettings, reference: TrainSettings, sizes: Iterable[int]) -> Protection:
    """Return dp-sgd on the user's own model."""
    name = f"dp-sgd on {settings.model.partition(':')[0]}"
    if settings.protect == "client":
        return Protection(name, None, "it hides single images, not clients")
    needed = []
    for size in {size for size in sizes if size}:  # what the client needs whose images are in most danger
        batch = min(reference.batch_size or size, size)
        steps = reference.rounds * reference.epochs * -(-size // batch)
        needed.append(poisson_noise(epsilon_of(settings.mu, DELTA), batch / size, steps, DELTA))
    noise = (int(max(needed) * 10**ROUNDED) + 1) / 10**ROUNDED
    return Protection(name, replace(reference, defence=f"dp-sgd:noise={noise:g}"))


def recommend(
    settings: RecommendSettings,
    out: Path,
    *,
    workers: int | None = None,
    data_root: Path | None = None,
    progress: Progress = lambda share, doing: None,
) -> Recommendation:
    """Train all candidates, choose the one that loses least, and check it with another seed; finished parts are kept.

    The same call again goes on where a killed one stopped. Raises ConfigError if ``out`` holds another wish.
    """
    _claim(out, settings)
    dataset = load_dataset(settings.dataset, data_root)
    with Simulation(settings.reference(), workers=0, dataset=dataset, data_root=data_root) as simulation:
        some = candidates(settings, simulation.sizes)
    total, done = 3 + len(some), 0

    def trained(training: TrainSettings, name: str, doing: str) -> dict[str, Any]:
        nonlocal done
        folder = out / "trainings" / name
        rows = train(
            training, folder, resume=folder.exists(), workers=workers, data_root=data_root,
            progress=lambda rounds, row, text: progress((done + rounds / training.rounds) / total, doing),
        ).rows  # fmt: skip
        done += 1
        return dict(rows[-1])

    reference = float(trained(settings.reference(), "reference", "training without protection")["accuracy"])
    lines = []
    for number, candidate in enumerate(some):
        try:
            last = trained(candidate.training, str(number), candidate.name) if candidate.training else None
        except GradveilError as error:
            last, candidate = None, replace(candidate, why_not=str(error))
        lines.append(_line(candidate, last, reference, settings))
    kept = [line for line in lines if line["holds"]]
    chosen = min(kept, key=lambda line: line["loss"])["candidate"] if kept else ""
    check = None
    best = next((one for one in some if one.name == chosen), None)
    if best is not None and best.training is not None:
        again = replace(best.training, seed=settings.seed + 1)
        other = replace(settings.reference(), seed=settings.seed + 1)
        accuracy = float(trained(other, "check-reference", "checking with another seed")["accuracy"])
        check = _line(best, trained(again, "check", "checking with another seed"), accuracy, settings)
        write_atomic(out / "recommended.toml", to_toml(best.training))
    found = Recommendation(out, reference, lines, chosen, check)
    document = {"reference": reference, "lines": lines, "chosen": chosen, "check": check, "promise": settings.promise}
    write_atomic(out / "recommendation.json", json.dumps(document, indent=1).encode())
    write_recommendation(out, document, settings.max_loss)
    return found


def _line(
    candidate: Protection, last: Mapping[str, Any] | None, reference: float, settings: RecommendSettings
) -> dict[str, Any]:
    """Return what a candidate costs and promises, and whether it keeps the wish."""
    if last is None:
        return {
            **dict.fromkeys(("accuracy", "loss", "epsilon", "mu", "identified_bound")),
            "candidate": candidate.name, "holds": False, "why": candidate.why_not, "defence": "", "model": "",
        }  # fmt: skip
    training: TrainSettings = candidate.training  # type: ignore[assignment]  # it was trained
    loss = 100 * (reference - float(last["accuracy"]))
    epsilon = last.get("epsilon")
    mu = last.get("mu") or (mu_of(epsilon, DELTA) if epsilon else None)
    within = mu is not None and mu <= settings.mu * 1.001
    dear = f"loses {loss:.1f} points, more than {settings.max_loss:g}" if loss > settings.max_loss else ""
    return {
        "candidate": candidate.name,
        "model": training.model,
        "defence": training.defence,
        "accuracy": last["accuracy"],
        "loss": round(loss, 3),
        "epsilon": epsilon,
        "mu": mu,
        "identified_bound": None if mu is None else identification_bound(mu),
        "holds": within and not dear,
        "why": dear or ("" if within else "its guarantee is weaker than the wish"),
    }


def _claim(out: Path, settings: RecommendSettings) -> None:
    """Note the wish in the folder. Raise ConfigError if it holds another one."""
    path, text = out / "wish.toml", to_toml(settings)
    if path.exists():
        if path.read_bytes() != text:
            raise ConfigError(f"{out} must be new or hold the same wish, got another one. Choose another --out.")
        return
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} must be new or empty, got a folder with other files. Choose another --out.")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
