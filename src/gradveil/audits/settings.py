"""The settings of an audit: everything that decides its rows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gradveil.attacks import MembershipAttack, build_any_attack
from gradveil.config import TrainSettings, absolute_dataset, absolute_path, absolute_spec, names_options, setting
from gradveil.defences import build_defence
from gradveil.errors import ConfigError
from gradveil.federated.protocol import AGGREGATIONS, check_taps, default_taps
from gradveil.metrics import build_metric, schema_of
from gradveil.metrics.columns import STANDARD
from gradveil.models.base import model_uses_aux
from gradveil.registry import Component, convert, split_specs
from gradveil.rows import Schema
from gradveil.threat import Knowledge, ThreatModel
from gradveil.validate import in_range, one_of

FACTS = ("kind", "command")
"""What settings.toml says beside the settings."""
PROTOCOLS: dict[str, dict[str, Any]] = {
    "lab": {"rounds": 500, "attacks": ("standard",), "knows": ("labels", "num-examples")},
    "fedavg": {
        "rounds": 20,
        "attacks": ("standard", "labels", "boundary"),
        "knows": ("labels", "num-examples", "local-steps"),
    },
}
"""The protocols, and the settings that each has by default: clients that train on hundreds of images need attacks that
scale, and a server that tells clients how to train knows it."""
REPLACED = {
    "update": "Use --protocol lab (gradients) or --protocol fedavg (local training), and a new --out.",
    "algorithm": "Use --protocol lab (fedsgd) or --protocol fedavg, and a new --out.",
}
"""Settings that audits had once, and what to use in their place."""
LISTS = ("defences", "attacks", "knows", "metrics")
"""Settings that are lists, written with commas on the command line."""


@dataclass(frozen=True)
class AuditSettings:
    """Everything that decides the result of ``gradveil audit``. The command line has one option per field."""

    dataset: str = setting("mnist-5k", "A named set (gradveil list datasets), a .npz file or a folder of pictures.")
    model: str = setting("lenet-dlg", "A model of the zoo (gradveil list models) or your own file.py:factory.")
    defences: tuple[str, ...] = setting(
        ("none",), "Defences, a list a,b:key=value; a+b chains two. `none` is always included."
    )
    attacks: tuple[str, ...] = setting(
        ("standard",), "Attacks, a list (gradveil list attacks); fedavg: standard,labels,boundary by default."
    )
    effort: str = setting("standard", "How hard the attack `standard` tries: quick, standard or thorough.")
    adaptive: bool = setting(False, "Run each attack a second time with knowledge of the defence.")
    protocol: str = setting(
        "lab",
        "How clients train and what is attacked: lab (each sends the gradient of --images images per round) or fedavg "
        "(--epochs over all its images).",
    )
    tap: tuple[int, ...] = setting((), "Rounds whose updates are attacked: 1/5/20; by default first, middle, last.")
    targets: int = setting(8, "Attacked clients per tapped round; with --aggregation secure it is 1, their mean.")
    images: int = setting(1, "Images behind each update, with --protocol lab.")
    looks: int = setting(1, "Rounds of each client that the server sees, on the same weights; decoders need many.")
    aggregation: str = setting("none", "What the server sees: none (each update) or secure (the mean of a round's).")
    sum_bits: int = setting(0, "With --aggregation secure: bits of the numbers that are added up; 0 adds exactly.")
    sum_range: float = setting(1.0, "With --sum-bits: largest entry of a weighted update; beyond it, it is clipped.")
    knows: tuple[str, ...] = setting(
        ("labels", "num-examples"),
        "What the attacker knows beside the model and the update (fedavg: local-steps too by default); by default "
        "also public-data if an attack can use it.",
    )
    seeds: int = setting(1, "Number of seeds: everything is repeated with seed, seed + 1, ...")
    seed: int = setting(0, "The first seed, for the model, the clients and the attacks; it also chooses the targets.")
    metrics: tuple[str, ...] = setting(STANDARD, "Metrics, a list (gradveil list metrics), or your own file.py:Class.")
    weights: str = setting("", "Attack and train from these weights (safetensors).")
    normalise: str = setting("dataset", "Input normalisation: dataset, imagenet, none, or mean/std as 0.5/0.5.")
    rounds: int = setting(
        500, "Rounds of training under each defence (fedavg: 20 by default); 0 attacks first updates without training."
    )
    clients: int = setting(10, "Number of clients in that training.")
    sampled: int = setting(0, "Clients per round; 0 is all.")
    partition: str = setting(
        "iid", "How training images are split among clients: iid, by-class, label-parts, dirichlet."
    )
    aux: str = setting("", "Data set of public images, for defences and models that use them; a guard trains on them.")
    sensitive: str = setting("0.1", "Images marked sensitive: a fraction of each client's, or positions 0/5/7.")
    epochs: int = setting(1, "Local epochs per round, with --protocol fedavg.")
    batch_size: int = setting(32, "Images per local step, with --protocol fedavg; 0 is all images of the client.")
    lr: float = setting(0.05, "Learning rate of the clients' SGD.")
    momentum: float = setting(0.9, "Momentum of the clients' SGD, with --protocol fedavg.")
    weight_decay: float = setting(0.0, "L2 penalty of the clients' SGD.")
    batch_norm: str = setting("average", "Running statistics: average (sent and averaged), local (kept), or freeze.")
    canaries: int = setting(0, "Random canaries played beside each training to measure its epsilon, such as 16.")
    device: str = setting("cpu", "cpu, cuda or cuda:1.")

    @names_options
    def __post_init__(self) -> None:
        for kind, specs in (("defences", self.defences), ("attacks", self.attacks), ("metrics", self.metrics)):
            if not specs:
                raise ConfigError(f"{kind} must name at least one, got an empty list. Add --{kind} with a name.")
        object.__setattr__(self, "defences", _once(build_defence, ["none", *self.defences]))
        one_of("effort", self.effort, EFFORTS)
        object.__setattr__(self, "attacks", _once(build_any_attack, [_tried(s, self.effort) for s in self.attacks]))
        object.__setattr__(self, "metrics", _once(build_metric, self.metrics))
        _ = self.schema  # raises if two metrics have the same field
        inferring = [spec for spec in self.attacks if isinstance(build_any_attack(spec), MembershipAttack)]
        if inferring and not self.rounds:
            raise ConfigError(
                f"rounds must be at least 1 for attack {inferring[0]!r}, which attacks trained models, got 0. "
                "Raise --rounds, or drop the attack."
            )
        in_range("targets", self.targets, 1, 100_000)
        in_range("images", self.images, 1, 10_000)
        in_range("looks", self.looks, 1, 10_000)
        in_range("seeds", self.seeds, 1, 10_000)
        in_range("seed", self.seed, 0, 2**62)
        one_of("protocol", self.protocol, list(PROTOCOLS))
        one_of("aggregation", self.aggregation, AGGREGATIONS)
        if self.aggregation == "secure":
            self._check_secure()
        check_taps(self.tap, self.rounds or 1)
        if "defence" in self.knows:
            raise ConfigError(
                "knows must not name 'defence', got it there. Add --adaptive, which grants it in rows of their own."
            )
        ThreatModel.of(*self.knows)
        self.training("none", self.seed)

    def _check_secure(self) -> None:
        """Raise ConfigError if sums of updates can't be attacked like this; there is one target, the mean."""
        object.__setattr__(self, "targets", 1)
        if not self.rounds:
            raise ConfigError("rounds must be at least 1 with aggregation secure, got 0. Raise --rounds.")
        if self.looks > 1:
            raise ConfigError(
                f"looks must be 1 with aggregation secure, got {self.looks}. Drop --looks, or --aggregation."
            )
        for spec in self.defences:
            if build_defence(spec).overrides("on_server"):
                raise ConfigError(
                    f"aggregation must be none for defence {spec!r}, whose server works on single updates, got "
                    "'secure'. Drop the defence, or --aggregation."
                )

    @property
    def schema(self) -> Schema:
        """The columns of the audit's rows, those of its metrics included."""
        return schema_of(self.metrics)

    @property
    def added_later(self) -> list[str]:
        """Settings that earlier versions did not have, as far as they have their default values."""
        usual = {"metrics": STANDARD, "canaries": 0, "effort": "standard", "sum_bits": 0, "sum_range": 1.0}
        return [name for name, value in usual.items() if getattr(self, name) == value]

    @property
    def unused(self) -> list[str]:
        """Settings that were changed but have no effect with this protocol."""
        idle = ("epochs", "batch_size", "momentum") if self.protocol == "lab" else ("images",) * bool(self.rounds)
        usual = {field.name: field.default for field in fields(self)}
        return [name for name in idle if getattr(self, name) != usual[name]]

    @property
    def taps(self) -> tuple[int, ...]:
        """The tapped rounds; without training, the first alone."""
        return self.tap or default_taps(self.rounds or 1)

    @property
    def all_seeds(self) -> range:
        """The seeds, one per repetition."""
        return range(self.seed, self.seed + self.seeds)

    def training(self, defence: str, seed: int) -> TrainSettings:
        """Return the settings of the training whose updates are attacked and whose price is measured."""
        mine = {field.name for field in fields(self)}
        same = {field.name: getattr(self, field.name) for field in fields(TrainSettings) if field.name in mine}
        aux = self.aux if build_defence(defence).uses_aux or model_uses_aux(self.model) else ""
        lab = {"algorithm": "fedsgd", "batch_size": self.images, "weighting": "uniform"}  # equally many images each
        how = lab if self.protocol == "lab" else {}
        asked = TrainSettings(**same | how | {"defence": defence, "seed": seed, "aux": aux})
        return build_defence(defence).training(asked)


EFFORTS = ("quick", "standard", "thorough")


def _tried(spec: str, effort: str) -> str:
    """Return the spec of an attack; `standard` without settings of its own tries as hard as ``effort`` says."""
    return f"standard:effort={effort}" if spec == "standard" and effort != "standard" else spec


def _once(build: Callable[[str], Component], specs: Iterable[str]) -> tuple[str, ...]:
    """Return the specs of different components, each as it was first written."""
    found: dict[Component, str] = {}
    for spec in specs:
        found.setdefault(build(spec), spec)
    return tuple(found.values())


def _wanted(attacks: object) -> list[str]:
    """Return public-data if an attack needs it or is much weaker without it."""
    specs = split_specs(attacks) if isinstance(attacks, str) else attacks
    built = [build_any_attack(spec) for spec in specs] if isinstance(specs, list | tuple) else []
    use = any(Knowledge.PUBLIC_DATA in attack.needs | attack.wants for attack in built)
    return [Knowledge.PUBLIC_DATA.value] * use


def make_audit_settings(values: Mapping[str, object]) -> AuditSettings:
    """Build settings from texts or TOML values; lists may be texts with commas. An unknown key is an error."""
    for gone, instead in REPLACED.items():
        if gone in values:
            raise ConfigError(f"{gone} is a setting of audits before --protocol, got {values[gone]!r}. {instead}")
    usual = dict(PROTOCOLS.get(str(values.get("protocol", "lab")), {}))
    if usual and "knows" not in values:
        usual["knows"] = (*usual["knows"], *_wanted(values.get("attacks", usual["attacks"])))
    split = {
        key: split_specs(value) if key in LISTS and isinstance(value, str) else value
        for key, value in (usual | dict(values)).items()
        if key not in FACTS
    }
    settings = AuditSettings(**convert(AuditSettings, split, owner="an audit"))
    return replace(
        settings,
        dataset=absolute_dataset(settings.dataset),
        aux=absolute_dataset(settings.aux) if settings.aux else "",
        weights=absolute_path(settings.weights),
        model=absolute_spec(settings.model),
        defences=tuple(absolute_spec(spec) for spec in settings.defences),
        attacks=tuple(absolute_spec(spec) for spec in settings.attacks),
        metrics=tuple(absolute_spec(spec) for spec in settings.metrics),
    )
