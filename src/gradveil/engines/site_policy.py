"""What one site agrees to: its policy, read from its own node config or TOML file, never from a run.

A run's settings come from whoever starts it. A site compares them with its policy as plain text and numbers, before
anything that they name is built, opened or imported, and refuses the run with a short code if it asks for more.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from gradveil.catalogue import catalogue
from gradveil.config import TrainSettings, read_settings
from gradveil.engines.site_codes import refused
from gradveil.errors import ConfigError
from gradveil.own import own_files
from gradveil.registry import convert, split_specs
from gradveil.validate import in_range, one_of

MOST_CLIENTS = 10_000_000
"""Clients of a run at most: a site keeps a number for each of them."""
ANY = "any"
"""The text with which a site agrees to every defence, or every model, of the package."""
_STRICTNESS = ("off", "warn", "refuse")
_WEIGHTS = re.compile(r"\bweights\s*=")
"""The one setting of a component that names a file whatever its value looks like."""


@dataclass(frozen=True)
class SitePolicy:
    """What a site is, what it agrees to, and its limits. Keys of a node config or a TOML file have these names.

    Attributes:
        partition_id: number of this client, from 0.
        private_folder: folder for keys, the ledger and all other private state.
        data: the site's own images, an .npz file or a folder; "" is the client's part of the run's data set.
        data_root: folder of the named data sets.
        sensitive: which of its images are marked, in the form of ``--sensitive``; ``none`` says that none is. The
            run's own setting is ignored.
        defence: the defences that it trains under, as the same texts, separated by commas; ``any`` is every defence of
            the package.
        model: the networks that it trains, in the same way; ``any`` is every model of the package.
        files: files that a run may name as data set, public images or starting weights, separated by commas. Other
            paths of a run are ignored (``aux``, ``weights``) or refused.
        tripwire: off, warn or refuse; a run can only be stricter.
        device: cpu, cuda or cuda:1; "" is the run's.
        reports: whether to send the numbers that the defence reports.
        repeatable: whether all randomness comes from the run's seed, for tests; it protects nothing then.
        max_rate: largest learning rate. A server that chooses a larger one makes the update larger, and noise of a
            fixed size hides less.
        max_momentum: largest momentum, which makes the update up to 1 / (1 - momentum) times as large. Weight decay has
            a fixed limit: times the learning rate it is at most 1, as a larger one moves weights beyond zero.
        max_epochs: largest number of local epochs.
        min_batch: smallest batch; gradients of few images leak more.
        max_batch: largest batch.
        max_rounds: number of updates that the site sends in all its runs together.
        training_scores: ε of each score of its training images, which is then given with noise; 0 gives none.
        training_budget: the sum of ε over all such scores, after which no more are given.
        max_epsilon: ε of all its answers in all its runs together; 0 is no limit. With a limit, only defences with a
            guarantee of differential privacy are accepted.
        max_delta: the δ at which this ε is computed.
        warm_minutes: idle minutes after which the site's worker ends, see `gradveil.engines.warm_site`; 0 has none.
        aggregation: ``secure`` agrees only to runs in which the server gets the sum of updates, never a single one;
            ``any`` agrees to both kinds.
        min_sum: smallest number of clients in such a sum.
        min_weight: smallest weight of a client in such a sum, as a share of the largest one; 1 is equal weights. With
            weights of 0 for all but one client, the sum would be this one's update.
        peers: TOML file with the public key of each client's site, ``0 = "02ab.."``; then keys that others signed are
            refused. "" believes the server whose keys are whose.
    """

    partition_id: int = -1
    private_folder: str = ""
    data: str = ""
    data_root: str = ""
    sensitive: str = ""
    defence: str = ""
    model: str = ANY
    files: str = ""
    tripwire: str = "off"
    device: str = ""
    reports: bool = False
    repeatable: bool = False
    max_rate: float = 0.1
    max_momentum: float = 0.95
    max_epochs: int = 10
    min_batch: int = 8
    max_batch: int = 4096
    max_rounds: int = 1000
    training_scores: float = 0.0
    training_budget: float = 1.0
    max_epsilon: float = 0.0
    max_delta: float = 1e-4
    warm_minutes: float = 10.0
    aggregation: str = ANY
    min_sum: int = 2
    min_weight: float = 0.1
    peers: str = ""

    def __post_init__(self) -> None:
        one_of("tripwire", self.tripwire, _STRICTNESS)
        one_of("aggregation", self.aggregation, (ANY, "secure"))
        in_range("min_sum", self.min_sum, 2)
        in_range("min_weight", self.min_weight, 0, 1, open_low=True)
        in_range("max_rate", self.max_rate, 0, open_low=True)
        in_range("max_momentum", self.max_momentum, 0, 1, open_high=True)
        in_range("max_epochs", self.max_epochs, 1)
        in_range("min_batch", self.min_batch, 1)
        in_range("max_batch", self.max_batch, self.min_batch)
        in_range("max_rounds", self.max_rounds, 0)
        if self.training_scores:
            in_range("training_scores", self.training_scores, 0.001, 10)
        in_range("training_budget", self.training_budget, 0)
        in_range("max_epsilon", self.max_epsilon, 0)
        in_range("warm_minutes", self.warm_minutes, 0)
        in_range("max_delta", self.max_delta, 0, 1, open_low=True, open_high=True)

    @property
    def allowed_files(self) -> frozenset[str]:
        """Return the paths that a run may name."""
        return frozenset(filter(None, (path.strip() for path in self.files.split(","))))


def read_policy(node_config: Mapping[str, object]) -> SitePolicy:
    """Return the policy in a node config, or in the TOML file that its key ``policy`` names together with the rest.

    Keys of Flower's own in a node config (``num-partitions``) are ignored; an unknown key in the file is an error.

    Raises:
        RefusedError: a value is invalid, or a key is both in the file and in the node config.
    """
    known = {field.name for field in fields(SitePolicy)}
    given = {key.replace("-", "_"): value for key, value in node_config.items() if key.replace("-", "_") in known}
    try:
        path = node_config.get("policy")
        in_file = read_settings(Path(str(path))) if path else {}
        written = {key.replace("-", "_"): _joined(value) for key, value in in_file.items()}
        twice = sorted(written.keys() & given.keys())
        if twice:
            raise ConfigError(f"A policy must state each key once, got {', '.join(twice)} in file and node config.")
        return SitePolicy(**convert(SitePolicy, written | given, owner="a site's policy"))
    except ConfigError as error:
        raise refused("policy", str(error)) from error


def _joined(value: object) -> object:
    """Return a list of texts as one text, separated by commas; every other value as it is."""
    texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return ",".join(value) if isinstance(value, list) and texts else value


def accepts(agreed: str, text: str) -> bool:
    """Return whether a site that agreed to some texts, separated by commas, accepts a run's text.

    Example:
        >>> [accepts("veil:mu=2,at=sum, prune", text) for text in ("veil:mu=2,at=sum", "prune", "veil", "none")]
        [True, True, False, False]
    """
    return bool({ANY, text.strip()} & {agreed.strip(), *split_specs(agreed)})


def agree(policy: SitePolicy, settings: TrainSettings, *, own_data: bool = False) -> TrainSettings:
    """Return a run's settings as this site plays them. Raise RefusedError if it does not agree to the run.

    Nothing that the settings name is built or opened here. Marks, and paths that the policy does not name, are the
    site's own; the tripwire is the stricter of both. ``own_data`` says that the site ignores the run's data set.
    """
    if not 0 <= policy.partition_id < settings.clients:
        raise refused("number", f"partition-id must be in 0..{settings.clients - 1}, got {policy.partition_id}.")
    if not policy.private_folder:
        raise refused("policy", "private-folder in a site's policy must name a folder of the site, got none.")
    _agree_on_texts(policy, settings)
    if not (own_data or policy.data or _is_known_set(policy, settings.dataset)):
        raise refused("file", f"A run must name a data set that this site allows, got {settings.dataset!r}.")
    agree_on_limits(policy, settings)
    if policy.aggregation not in (ANY, settings.aggregation):
        raise refused("aggregation", f"This site sends updates into secure sums only, got {settings.aggregation!r}.")
    return replace(
        settings,
        sensitive=policy.sensitive,
        aux=settings.aux if settings.aux and _is_known_set(policy, settings.aux) else "",
        weights=settings.weights if settings.weights in policy.allowed_files else "",
        tripwire=max(policy.tripwire, settings.tripwire, key=_STRICTNESS.index),
        device=policy.device or settings.device,
    )


def _agree_on_texts(policy: SitePolicy, settings: TrainSettings) -> None:
    """Compare the defence and the model with the agreed texts; refuse files in texts that were not agreed on."""
    if not policy.defence:
        raise refused("policy", "A site's policy must name the defence that it agrees to, got none. Add defence='...'.")
    left_out = bool(settings.defended) and policy.partition_id not in settings.defended
    asked = "none" if left_out else settings.defence
    for what, agreed, text in (("defence", policy.defence, asked), ("model", policy.model, settings.model)):
        if not accepts(agreed, text):
            raise refused(what, f"The run's {what} must be {agreed!r}, to which this site agreed, got {text!r}.")
    agreed_texts = {policy.defence, policy.model, *split_specs(policy.defence), *split_specs(policy.model)} - {ANY}
    for key in ("defence", "model", "partition"):
        text = getattr(settings, key)
        if text.strip() not in agreed_texts and (".py" in text or own_files(text) or _WEIGHTS.search(text)):
            raise refused("file", f"A run must not name a file that this site did not agree to, got {key} = {text!r}.")


def _is_known_set(policy: SitePolicy, text: str) -> bool:
    """Return whether a text names a data set of the package, or a data file that the policy allows."""
    if ".py" in text:
        return False
    return text in policy.allowed_files or text.partition(":")[0] in catalogue("datasets").entries


def agree_on_limits(policy: SitePolicy, settings: TrainSettings) -> None:
    """Raise RefusedError if a run's numbers are beyond the limits of a policy."""
    batch, momentum, decay = settings.batch_size, settings.momentum, settings.lr * settings.weight_decay
    for code, fine, got in (
        ("config", settings.clients <= MOST_CLIENTS, f"{settings.clients:,} clients above {MOST_CLIENTS:,}"),
        ("rate", settings.lr <= policy.max_rate, f"lr = {settings.lr:g} above max-rate {policy.max_rate:g}"),
        ("step", momentum <= policy.max_momentum, f"momentum {momentum:g} above max-momentum {policy.max_momentum:g}"),
        ("step", decay <= 1, f"lr * weight-decay = {decay:g} above 1"),
        ("epochs", settings.epochs <= policy.max_epochs, f"{settings.epochs} above max-epochs {policy.max_epochs}"),
        ("batch", batch == 0 or batch >= policy.min_batch, f"{batch} below min-batch {policy.min_batch}"),
        ("batch", batch <= policy.max_batch, f"{batch} above max-batch {policy.max_batch}"),
        ("rounds", settings.rounds <= policy.max_rounds, f"{settings.rounds} above max-rounds {policy.max_rounds}"),
    ):
        if not fine:
            raise refused(code, f"A run must keep the limits of this site's policy, got {got}.")
