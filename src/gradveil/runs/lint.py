"""The epsilon that settings of differential privacy really give, per round and per training.

A mechanism's name and settings become a `LintFinding`: the noise that is really added, the largest change that one
client or image can make, and what both amount to, whatever epsilon the settings state. Epsilon of Gaussian noise is
exact (`gradveil.defences.parts.gaussian_dp`); that of sampled batches is the accountant's.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gradveil.config import TrainSettings
from gradveil.defences import build_defence, planned_defence
from gradveil.defences.parts.accounting import epsilon as sampled_epsilon
from gradveil.defences.parts.gaussian_dp import MOST_EPSILON, epsilon_of
from gradveil.federated.budgets import weakest_budget
from gradveil.federated.protocol import Protocol
from gradveil.metrics.epsilon_hat import USUAL_DELTA
from gradveil.validate import in_range

Values = Mapping[str, object]
SLACK = 1.05
"""An epsilon that is above the stated one by less than this factor counts as the stated one: formulas round."""


@dataclass(frozen=True)
class Use:
    """How the settings are used, as far as their file does not say it.

    Attributes:
        rounds: of the training.
        images: of the smallest client.
        batch_size: images per step.
        epochs: passes over a client's images in a round.
        entries: numbers in the model; 0 if unknown.
    """

    rounds: int = 1
    images: int = 0
    batch_size: int = 0
    epochs: int = 1
    entries: int = 0

    def __post_init__(self) -> None:
        in_range("rounds", self.rounds, 1)
        in_range("epochs", self.epochs, 1)
        for name in ("images", "batch_size", "entries"):
            in_range(name, getattr(self, name), 0)


@dataclass(frozen=True)
class LintFinding:
    """What one mechanism really gives.

    Attributes:
        where: file, and line or key.
        mechanism: its name.
        stated: the epsilon that its settings state, or None.
        round: epsilon of one round, or None if it can't be told.
        training: epsilon of the whole training, or None.
        delta: at which both hold.
        unit: what is hidden, and from whom.
        why: what is wrong, missing or assumed; may be empty.
    """

    where: str
    mechanism: str
    stated: float | None
    round: float | None
    training: float | None
    delta: float
    unit: str
    why: str = ""

    @property
    def weaker(self) -> bool:
        """Return whether one round already costs more than stated, or nothing is guaranteed at all."""
        if self.round is None:
            return False
        return self.round >= MOST_EPSILON or (self.stated is not None and self.round > SLACK * self.stated)


def local_dp_mod(values: Values, use: Use) -> LintFinding:
    """Judge Flower's LocalDpMod: clips to ``clipping_norm``, but scales its noise by ``sensitivity``.

    Example:
        >>> shipped = {"clipping_norm": 1.0, "sensitivity": 1e-4, "epsilon": 10.0, "delta": 1e-5}
        >>> found = local_dp_mod(shipped, Use())
        >>> f"{found.round:.1e}", found.weaker
        ('2.1e+08', True)
    """
    clip, sensitivity, stated, delta = _numbers(values, "clipping_norm", "sensitivity", "epsilon", "delta")
    unit = "a client's whole update, from the server"
    if clip is None or sensitivity is None or stated is None or not delta:
        return _unknown("LocalDpMod", stated, delta, unit, "clipping_norm, sensitivity, epsilon and delta")
    noise = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / stated if stated else math.inf
    why = ""
    if sensitivity < clip:
        why = (
            f"the noise has a standard deviation of {noise:.2g}, for a sensitivity of {sensitivity:g}, but updates are "
            f"clipped to {clip:g}: set sensitivity to the clipping norm"
        )
    elif stated > 1:
        why = "the formula behind the noise holds for an epsilon below 1 only; exact figures are given here"
    return _gaussian("LocalDpMod", _ratio(clip, noise), stated, delta, use, unit, why)


def central_dp(values: Values, use: Use) -> LintFinding:
    """Judge Flower's central strategies, of any clipping: noise of ``noise_multiplier`` times the clipping norm."""
    noise, stated = *_numbers(values, "noise_multiplier"), None
    unit = "a client, from whoever sees the models; the server itself sees every update"
    if noise is None:
        return _unknown("central DP", stated, USUAL_DELTA, unit, "noise_multiplier")
    why = "no amplification by sampling clients is counted; all updates are taken to have the same weight in the mean"
    return _gaussian("central DP", _ratio(1.0, noise), stated, USUAL_DELTA, use, unit, why)


def svt_privacy(values: Values, use: Use) -> LintFinding:
    """Judge NVFlare's SVTPrivacy: ``epsilon`` pays for the selection alone, each released value costs ``noise_var``.

    That is NVFlare 2.9.0. In earlier versions ``epsilon`` paid for the threshold alone, and selecting n values cost
    epsilon times (2 n)^(2/3) on top. n is the ``fraction`` of the entries that are sent, running statistics included.

    Example:
        >>> round(svt_privacy({}, Use(entries=1_000_000)).round, 1)
        10000.1
    """
    first, release, fraction = _numbers({"epsilon": 0.1, "noise_var": 0.1, "fraction": 0.1} | dict(values), *_SVT)
    unit = "one entry's worth of change in a client's update, clipped to gamma, from the server"
    if first is None or release is None or fraction is None or not use.entries:
        return _unknown("SVTPrivacy", first, 0.0, unit, "the number of the model's entries (--entries)")
    sent = min(math.ceil(use.entries * fraction), use.entries)
    (planned,) = _numbers(values, "epsilon_release")
    whole = first + (release * sent if planned is None else planned)
    released = f"each of {sent:,} released values costs {release:g}"
    released = released if planned is None else f"{sent:,} released values cost {planned:g}"
    why = (
        f"for {use.entries:,} entries, {released}; epsilon={first:g} is that of the selection alone. That is NVFlare "
        f"2.9.0; earlier versions cost {first * (2 * sent) ** (2 / 3):,.4g} more"
    )
    return LintFinding("", "SVTPrivacy", first, whole, whole * use.rounds, 0.0, unit, why)


def gaussian_privacy(values: Values, use: Use) -> LintFinding:
    """Judge the GaussianPrivacy filter of NVFlare's examples: noise in proportion to the update itself, no clipping."""
    unit = "nothing"
    why = (
        "its noise is a fraction (sigma0) of the update's own values, and nothing is clipped: no change of an update "
        "is bounded, and the noise tells its size. Clip updates to a norm, and scale the noise by that norm"
    )
    return LintFinding("", "GaussianPrivacy", None, MOST_EPSILON, MOST_EPSILON, USUAL_DELTA, unit, why)


def percentile_privacy(values: Values, use: Use) -> LintFinding:
    """Judge NVFlare's PercentilePrivacy, which truncates and adds no noise."""
    unit, why = "nothing", "it truncates values and adds no noise, which is no differential privacy"
    return LintFinding("", "PercentilePrivacy", None, MOST_EPSILON, MOST_EPSILON, USUAL_DELTA, unit, why)


def opacus(values: Values, use: Use) -> LintFinding:
    """Judge Opacus's ``make_private``; without the numbers of images and batches, without amplification."""
    (noise,) = _numbers(values, "noise_multiplier")
    unit = "one image, from the server"
    if noise is None:
        return _unknown("make_private", None, USUAL_DELTA, unit, "noise_multiplier")
    if noise == 0:
        return _gaussian("make_private", math.inf, None, USUAL_DELTA, use, unit, "there is no noise")
    if not (use.images and use.batch_size):
        why = "give --images and --batch-size for a whole training; this is one step, without amplification"
        return replace(_gaussian("make_private", 1 / noise, None, USUAL_DELTA, use, unit, why), training=None)
    rate = min(1.0, use.batch_size / use.images)
    if values.get("poisson_sampling") is False:
        steps, rate, why = use.epochs, 1.0, "batches are not sampled, so that nothing is amplified"
    else:
        steps, why = use.epochs * -(-use.images // use.batch_size), ""
    each, whole = (sampled_epsilon(noise, rate, steps * count, USUAL_DELTA) for count in (1, use.rounds))
    return LintFinding("", "make_private", None, each, whole, USUAL_DELTA, unit, why)


def opacus_with_epsilon(values: Values, use: Use) -> LintFinding:
    """Judge Opacus's ``make_private_with_epsilon``, whose target is that of one call."""
    stated, delta = _numbers(values, "target_epsilon", "target_delta")
    unit = "one image, from the server"
    if stated is None or not delta:
        return _unknown("make_private_with_epsilon", stated, delta, unit, "target_epsilon and target_delta")
    why = "" if use.rounds == 1 else f"the target is for one call; {use.rounds} calls add up, and their deltas too"
    return LintFinding("", "make_private_with_epsilon", stated, stated, stated * use.rounds, delta, unit, why)


def ours(spec: str, settings: TrainSettings, use: Use) -> LintFinding | None:
    """Judge a defence of gradveil in a training, or return None if it is `none`."""
    if build_defence(spec).spec == "none":
        return None
    given = replace(settings, defence=spec, rounds=max(settings.rounds, use.rounds))
    played = build_defence(spec).training(given)
    defence, how = planned_defence(played), Protocol.of(played).local
    images = use.images or played.batch_size or 1
    one, whole = (weakest_budget(defence, how, [images], count, use.entries) for count in (1, played.rounds))
    if one is None or whole is None:
        why = "it states no differential privacy: what it adds or leaves out has no proof"
        return LintFinding("", spec, None, MOST_EPSILON, MOST_EPSILON, USUAL_DELTA, "nothing", why)
    why = "" if use.images else f"give --images, the images of the smallest client; {images:,} are assumed"
    return LintFinding("", spec, None, one.epsilon, whole.epsilon, whole.delta, "one image, from the server", why)


MECHANISMS: Mapping[str, Callable[[Values, Use], LintFinding]] = {
    "LocalDpMod": local_dp_mod,
    "DifferentialPrivacyServerSideFixedClipping": central_dp,
    "DifferentialPrivacyServerSideAdaptiveClipping": central_dp,
    "DifferentialPrivacyClientSideFixedClipping": central_dp,
    "DifferentialPrivacyClientSideAdaptiveClipping": central_dp,
    "SVTPrivacy": svt_privacy,
    "PercentilePrivacy": percentile_privacy,
    "GaussianPrivacy": gaussian_privacy,
    "make_private": opacus,
    "make_private_with_epsilon": opacus_with_epsilon,
}
"""Classes and functions of other packages, by name."""
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "LocalDpMod": ("clipping_norm", "sensitivity", "epsilon", "delta"),
    "SVTPrivacy": ("fraction", "epsilon", "noise_var", "gamma", "tau"),
    **{name: ("strategy", "noise_multiplier", "clipping_norm") for name in MECHANISMS if "Fixed" in name},
    **{name: ("strategy", "noise_multiplier", "num_sampled_clients") for name in MECHANISMS if "Adaptive" in name},
}
"""The order of positional arguments."""
_SVT = ("epsilon", "noise_var", "fraction")


def _gaussian(name: str, mu: float, stated: float | None, delta: float, use: Use, unit: str, why: str) -> LintFinding:
    each, whole = (epsilon_of(mu * math.sqrt(count), delta) for count in (1, use.rounds))
    return LintFinding("", name, stated, each, whole, delta, unit, why)


def _unknown(name: str, stated: float | None, delta: float | None, unit: str, needs: str) -> LintFinding:
    why = f"the file must give numbers for {needs}, got others"
    return LintFinding("", name, stated, None, None, delta or USUAL_DELTA, unit, why)


def _ratio(clip: float, noise: float) -> float:
    return clip / noise if noise > 0 else math.inf


def _numbers(values: Values, *names: str) -> list[float | None]:
    found = [values.get(name) for name in names]
    return [float(v) if isinstance(v, int | float) and not isinstance(v, bool) and v >= 0 else None for v in found]
