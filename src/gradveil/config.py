"""Settings of a training as a frozen dataclass, checked when it is built, and settings as TOML."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tomli_w

from gradveil.errors import ConfigError
from gradveil.limits import LONGEST_SETTINGS, parse_toml, read_bytes
from gradveil.own import names_code, trusts_code
from gradveil.registry import convert, own_files, split_specs
from gradveil.validate import in_range, one_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
LARGEST = 1e38
"""Largest rate and penalty: far beyond any sensible value, and just within float32."""
MOST_CANARIES = 10_000


def setting(default: Any, text: str) -> Any:  # noqa: ANN401 - stands for a value of the field's own type
    """Return a dataclass field with the help text that the command line shows."""
    return field(default=default, metadata={"help": text})


def names_options(check: Callable[[T], None]) -> Callable[[T], None]:
    """Let a check of settings name the option to change in the error for a value out of its range.

    Example:
        >>> TrainSettings(clients=0)
        Traceback (most recent call last):
        gradveil.errors.ConfigError: clients must be at least 1, got 0. Change --clients.
    """

    @functools.wraps(check)
    def checked(settings: T) -> None:
        try:
            check(settings)
        except ConfigError as error:
            if not error.setting:
                raise
            raise ConfigError(f"{error} Change --{error.setting.replace('_', '-')}.") from None

    return checked


@dataclass(frozen=True)
class TrainSettings:
    """Everything that decides the result of ``gradveil train``. The command line has an option for each field."""

    dataset: str = setting("mnist-5k", "A named set (gradveil list datasets), a .npz file or a folder of pictures.")
    model: str = setting("lenet5", "A model of the zoo (gradveil list models) or your own file.py:factory.")
    defence: str = setting("none", "A defence with its settings, name:key=value; a+b chains two.")
    defended: tuple[int, ...] = setting(
        (), "Clients that use the defence, such as 0/5; by default all. Only for defences that run on single devices."
    )
    clients: int = setting(10, "Number of clients, N.")
    rounds: int = setting(20, "Number of rounds; 0 only evaluates the starting model.")
    partition: str = setting(
        "iid", "How training images are divided among clients: iid, by-class, label-parts or dirichlet."
    )
    aux: str = setting("", "Data set of public images, for defences and models that use them; a guard trains on them.")
    sensitive: str = setting(
        "", "Images marked sensitive: a fraction per client, positions 0/5/7, or positions per client 3:0/5;4:1."
    )
    sampled: int = setting(0, "Number of clients that train per round, K; 0 means all.")
    sampling: str = setting(
        "uniform", "How they are drawn: uniform (without replacement), uniform-replace, or size-replace (by data size)."
    )
    weighting: str = setting("size", "Weights of the updates in the average: size, uniform, or unbiased (N/K * p_k).")
    algorithm: str = setting("fedavg", "fedavg, or fedsgd (one gradient of one batch per round).")
    epochs: int = setting(1, "Local epochs per round (fedavg).")
    batch_size: int = setting(32, "Images per local step; 0 means all images of the client.")
    lr: float = setting(0.05, "Learning rate of the clients' SGD.")
    lr_decay: float = setting(1.0, "Factor on the learning rate after each round (exponential decay).")
    lr_steps: tuple[int, ...] = setting(
        (), "Rounds after which the learning rate is multiplied by --lr-factor: 60/120."
    )
    lr_factor: float = setting(0.1, "Factor on the learning rate at each of --lr-steps.")
    momentum: float = setting(0.9, "Momentum of the clients' SGD, reset each round. Ignored by fedsgd.")
    nesterov: bool = setting(False, "Nesterov momentum.")
    weight_decay: float = setting(0.0, "L2 penalty of the clients' SGD.")
    batch_norm: str = setting(
        "average", "BatchNorm running statistics: average (sent and averaged), local (kept on the device), or freeze."
    )
    normalise: str = setting("dataset", "Input normalisation: dataset, imagenet, none, or mean/std as 0.5/0.5.")
    weights: str = setting("", "Start from these weights (safetensors).")
    tripwire: str = setting("off", "Clients check the model they receive for traps: off, warn, or refuse (to train).")
    bad_answers: str = setting(
        "stop", "If a client's answer is missing or invalid: stop, or drop it and average the others (over Flower)."
    )
    eval_every: int = setting(1, "Evaluate after every n-th round, and after the last.")
    aggregation: str = setting(
        "none", "What the server sees: none (each client's update) or secure (only the mean of a round's updates)."
    )
    sum_bits: int = setting(
        0, "With --aggregation secure: bits of the whole numbers that are added up, such as 22; 0 adds exactly."
    )
    sum_range: float = setting(1.0, "With --sum-bits: largest entry of a weighted update; beyond it, it is clipped.")
    save_rounds: tuple[int, ...] = setting((), "Rounds whose model and updates are saved: 1/10/20.")
    canaries: int = setting(0, "Random canaries played beside the training to measure its epsilon, such as 16.")
    seed: int = setting(0, "Every random draw comes from this seed.")
    device: str = setting("cpu", "cpu, cuda or cuda:1.")

    @names_options
    def __post_init__(self) -> None:
        in_range("clients", self.clients, 1)
        for client in self.defended:
            in_range("defended", client, 0, self.clients - 1)
        in_range("rounds", self.rounds, 0)
        in_range("sampled", self.sampled, 0, 10_000_000)
        one_of("sampling", self.sampling, ["uniform", "uniform-replace", "size-replace"])
        if self.sampling == "uniform" and self.sampled > self.clients:
            raise ConfigError(
                f"sampled must be at most clients without replacement, got {self.sampled} of {self.clients}. "
                "Lower --sampled, or draw with replacement: --sampling uniform-replace."
            )
        one_of("weighting", self.weighting, ["size", "uniform", "unbiased"])
        one_of("algorithm", self.algorithm, ["fedavg", "fedsgd"])
        in_range("epochs", self.epochs, 1)
        in_range("batch_size", self.batch_size, 0)
        in_range("lr", self.lr, 0, LARGEST, open_low=True)
        in_range("lr_decay", self.lr_decay, 0, 1, open_low=True)
        for step in self.lr_steps:
            in_range("lr_steps", step, 1)
        in_range("lr_factor", self.lr_factor, 0, 1, open_low=True)
        in_range("momentum", self.momentum, 0, 1, open_high=True)
        if self.nesterov and not self.momentum:
            raise ConfigError("momentum must be more than 0 for nesterov, got 0. Raise --momentum, or drop --nesterov.")
        in_range("weight_decay", self.weight_decay, 0, LARGEST)
        one_of("batch_norm", self.batch_norm, ["average", "local", "freeze"])
        one_of("tripwire", self.tripwire, ["off", "warn", "refuse"])
        one_of("aggregation", self.aggregation, ["none", "secure"])
        if self.aggregation == "secure" and self.rounds and self.num_sampled < 2:
            raise ConfigError(
                f"aggregation secure needs two clients or more per round, got {self.num_sampled}: the mean of one is "
                "its update. Raise --clients or --sampled, or drop --aggregation."
            )
        check_sums(self.aggregation, self.sum_bits, self.sum_range)
        one_of("bad_answers", self.bad_answers, ["stop", "drop"])
        in_range("eval_every", self.eval_every, 1)
        for saved in self.save_rounds:
            in_range("save_rounds", saved, 1, max(self.rounds, 1))
        check_canaries(self.canaries, self.rounds)
        in_range("seed", self.seed, 0, 2**63 - 1)

    @property
    def num_sampled(self) -> int:
        """K: number of clients that train per round."""
        return self.sampled or self.clients


def check_sums(aggregation: str, bits: int, largest: float) -> None:
    """Raise ConfigError unless sums can be made of whole numbers as asked."""
    in_range("sum_bits", bits, 0, 32)
    in_range("sum_range", largest, 0, LARGEST, open_low=True)
    if bits and aggregation != "secure":
        raise ConfigError(
            f"sum_bits is for sums under secure aggregation, got {bits} with aggregation {aggregation!r}. "
            "Add --aggregation secure, or drop --sum-bits."
        )


def check_canaries(canaries: int, rounds: int) -> None:
    """Raise ConfigError if there are too many or too few canaries for an estimate, or no round to play them in.

    Example:
        >>> check_canaries(1, rounds=20)
        Traceback (most recent call last):
        gradveil.errors.ConfigError: canaries must be 0, or 2 or more for an interval, got 1. Raise --canaries.
    """
    in_range("canaries", canaries, 0, MOST_CANARIES)
    if canaries == 1:
        raise ConfigError("canaries must be 0, or 2 or more for an interval, got 1. Raise --canaries.")
    if canaries and not rounds:
        raise ConfigError(
            f"canaries are played beside the rounds of a training, got {canaries} with rounds = 0. "
            "Raise --rounds, or drop --canaries."
        )


def read_settings(path: Path) -> dict[str, Any]:
    """Return the keys of a TOML file of settings; ``[defence] name = ..`` tables become ``name:key=value`` texts."""
    try:
        values = parse_toml(read_bytes(path, LONGEST_SETTINGS))
        return {key: _component_text(key, value, path) for key, value in values.items()}
    except FileNotFoundError as error:
        raise ConfigError(f"There is no settings file {str(path)!r}. Check the path.") from error
    except (ValueError, OSError, RecursionError) as error:  # ValueError: no TOML, no UTF-8, a number of 5,000 digits
        raise ConfigError(f"Settings file {path} must be valid TOML, got: {error}.") from error


def refuse_code(values: object, source: Path, typed: object = ()) -> None:
    """Raise ConfigError if values that were read from a file name Python files, unless the user named the same.

    A component by file, ``path/file.py:Name``, is code that runs. The user's own words are trusted; a folder or file,
    which may come from elsewhere, is not, unless `gradveil.own.trusting_code` is in force (``--trust-code``).

    Args:
        values: what was read: texts, also in lists and dictionaries.
        source: the file, for the message.
        typed: what the user wrote, in the same forms.
    """
    if isinstance(values, Mapping):  # an audit's command line is shown and never built
        values = {key: value for key, value in values.items() if key != "command"}
    named = [text for text in _texts(values) if names_code(text)]
    if not named or trusts_code():
        return
    known = {absolute_spec(spec) for text in _texts(typed) for spec in (text, *split_specs(text))}
    strange = next((text for text in named if text not in known), None)
    if strange is not None:
        raise ConfigError(
            f"{source} must not name Python files, which would be run, got {strange!r}. If you trust it, add "
            "--trust-code (in Python: trust_code=True), or give the same setting yourself."
        )


def _texts(values: object) -> Iterator[str]:
    """Yield all texts in nested lists and dictionaries."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        yield from _texts([*values.values()])
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _texts(value)


def make_train_settings(values: Mapping[str, object]) -> TrainSettings:
    """Return settings from texts or TOML values; an unknown key is an error with a did-you-mean."""
    return TrainSettings(**convert(TrainSettings, values, owner="a training"))


def with_absolute_paths(settings: TrainSettings) -> TrainSettings:
    """Return the settings with absolute paths of the user's own files, so that a run can be resumed from anywhere."""
    return replace(
        settings,
        dataset=absolute_dataset(settings.dataset),
        aux=absolute_dataset(settings.aux) if settings.aux else "",
        weights=absolute_path(settings.weights),
        model=absolute_spec(settings.model),
        defence=absolute_spec(settings.defence),
    )


def absolute_path(text: str) -> str:
    """Return the absolute path of a file that exists, or any other text unchanged."""
    path = Path(text).expanduser()
    return str(path.resolve()) if text and path.exists() else text


def absolute_spec(spec: str) -> str:
    """Return a component's text with absolute paths of the user's own files."""
    for file in own_files(spec):
        spec = spec.replace(file, absolute_path(file), 1)
    return spec


def absolute_dataset(text: str) -> str:
    """Return a data set's text with an absolute path, if it names a file or folder of the user's."""
    if ".py:" in text:
        return absolute_spec(text)
    path, separator, rest = text.partition(":")
    is_path = "/" in path or path.endswith(".npz")
    return absolute_path(path) + separator + rest if is_path else text


def to_toml(settings: "DataclassInstance") -> bytes:
    """Return all settings as TOML, in the order of the fields."""
    return values_to_toml(dataclasses.asdict(settings))


def values_to_toml(values: Mapping[str, Any]) -> bytes:
    """Return settings by name as TOML, in their order."""
    return tomli_w.dumps({k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}).encode()


def _component_text(key: str, value: object, path: Path) -> object:
    if isinstance(value, list):
        return [_component_text(key, item, path) for item in value]
    if not isinstance(value, dict):
        return value
    settings = dict(value)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"Table [{key}] in {path} must have a name, got {sorted(value)}. Add a line: name = ...")
    pairs = ",".join(f"{k}={_setting_text(v)}" for k, v in settings.items())
    return f"{name}:{pairs}" if pairs else name


def _setting_text(value: object) -> str:
    if isinstance(value, list):
        return "/".join(map(_setting_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
