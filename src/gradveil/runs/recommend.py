"""Recommend a protection: a staged search for the least costly configuration that keeps a wish, and its verification.

1. Arithmetic rules out what can't keep the wish, and what is dominated by another one.
2. Short trainings of all others, each of which spends all of its budget in a quarter of the rounds.
3. Full trainings of the finalists; the standard attackers on those that lose little enough, in their worst case.
4. The finalist that loses least is trained at half and twice the budget too, for the picture.
5. The verification: trainings on all training images with several seeds, and only here test images.

Stages 2 to 4 score on held-out training images. Finished parts are kept, so that a killed search goes on.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gradveil.audits.run import AuditResult
from gradveil.audits.settings import AuditSettings
from gradveil.config import TrainSettings, to_toml
from gradveil.data import Dataset, load_dataset
from gradveil.data.held_out import hold_out
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError
from gradveil.report.recommendation import write_recommendation
from gradveil.runs.advice import advise
from gradveil.runs.candidates import ClientSizes, Protection, candidates
from gradveil.runs.judged import check_of, judged, line_of
from gradveil.runs.trials import Progress, TrialRuns
from gradveil.runs.wish import Wish
from gradveil.runs.worst_case import Figures, attacked, run_audit
from gradveil.storage import write_atomic

SHORT = 0.25
"""Share of the rounds in a short training."""
FINALISTS = 3
"""Full trainings at most, of candidates with a proof; if asked for, of those without one too."""
BUDGETS = (0.5, 2.0)
"""Other budgets at which the best configuration is trained for the picture, in units of the wish's mu."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Recommendation:
    """What was found.

    Attributes:
        out: the folder, with report.html and, if there is one, recommended.toml.
        document: everything that the page shows, as in recommendation.json.
    """

    out: Path
    document: dict[str, Any]

    @property
    def lines(self) -> list[Line]:
        """One per candidate: stage, accuracy, points lost, guarantee, attackers, and why it is not the one."""
        return list(self.document["lines"])

    @property
    def chosen(self) -> str:
        """The name of the recommended candidate, or "" if none keeps the wish."""
        return str(self.document["chosen"])

    @property
    def confirmed(self) -> bool:
        """Whether the verification on all training images kept the wish too."""
        check = self.document["check"]
        return bool(check and check["holds"])


def recommend(
    wish: Wish,
    out: Path,
    *,
    workers: int | None = None,
    data_root: Path | None = None,
    progress: Progress = lambda share, doing: None,
) -> Recommendation:
    """Search, choose, verify, and write everything to ``out``; the same call again goes on where it was killed.

    Raises ConfigError if ``out`` holds another wish, or if the wish can't be tried on this data.
    """
    _refuse_other_wish(out, wish)
    whole = load_dataset(wish.dataset, data_root)
    trials = TrialRuns(out, hold_out(whole, wish.held_out, wish.seed), whole, workers, data_root, progress)
    sizes = _sizes(wish, trials)
    every = candidates(wish, sizes)
    write_atomic(out / "wish.toml", to_toml(wish))  # from here on the folder is this wish's
    left = [one for one in every if one.training is not None]
    trials.expect(2 + len(left) + min(FINALISTS, len(left)) + len(BUDGETS) + 2 * wish.seeds)
    reference = trials.compared(wish.reference(), "reference", "training without protection")["accuracy"]
    short = _short(trials, wish, sizes, left)
    finalists = _finalists(left, short)
    full = {one.name: _row(trials, one, f"full-{every.index(one)}") for one in finalists}
    good = [one for one in finalists if _lost(full[one.name], reference) <= wish.max_loss]
    attacks = _attacked(trials, good, out)
    lines = [judged(line_of(one, short, full, attacks), reference, wish) for one in every]
    kept = [line for line in lines if line["holds"]]
    best = _least(kept) or _least([line for line in lines if line["stage"] == "full"])
    chosen = next((one for one in every if kept and best and one.name == best["candidate"]), None)
    for line in kept:
        line["why"] = "" if line is best else "it keeps the wish too, and loses more"
    frontier = _frontier(trials, wish, sizes, best) if best else []
    check, advice = None, None
    if chosen is not None:
        check = _verify(trials, wish, chosen, attacks.get(chosen.name, {}))
        settings = attacks.get(chosen.name, {}).get("attack_settings", "")
        advice = asdict(advise(chosen, wish, out, settings, data_root))
    measured = sorted((line for line in lines if line["loss"] is not None), key=lambda line: float(line["loss"]))
    document = {
        "promise": wish.promise, "max_loss": wish.max_loss, "model": wish.model, "dataset": wish.dataset,
        "mu": wish.mu, "held_out": len(trials.held.test), "reference": reference, "lines": lines,
        "chosen": chosen.name if chosen else "", "frontier": frontier, "check": check, "advice": advice,
        "nearest": [] if chosen else [line for line in measured if line["proven"]][:2],
    }  # fmt: skip
    write_atomic(out / "recommendation.json", json.dumps(document, indent=1).encode())
    write_recommendation(out, document)
    return Recommendation(out, document)


def _sizes(wish: Wish, trials: TrialRuns) -> ClientSizes:
    """Return the clients' sizes and the size of the user's model. Raise ConfigError if there are too few images."""
    try:
        return _sizes_in(wish, trials, trials.held)
    except ConfigError as error:
        _sizes_in(wish, trials, trials.whole)  # raises if the wish is wrong in itself
        raise ConfigError(
            f"The training must be possible without the {wish.held_out:.0%} of its images that are held out. {error}"
        ) from error


def _sizes_in(wish: Wish, trials: TrialRuns, dataset: Dataset) -> ClientSizes:
    with Simulation(wish.reference(), workers=0, dataset=dataset, data_root=trials.data_root) as simulation:
        entries = sum(p.numel() for p in simulation.net.module.parameters() if p.requires_grad)
        return ClientSizes([size for size in simulation.sizes if size], entries)


def _short(trials: TrialRuns, wish: Wish, sizes: ClientSizes, left: Iterable[Protection]) -> dict[str, Line]:
    """Train all that are left in a part of their rounds; return the last row of each, or why there is none."""
    shorter = {one.name: one for one in candidates(wish, sizes, SHORT)}
    return {one.name: _row(trials, shorter[one.name], f"short-{number}") for number, one in enumerate(left)}


def _row(trials: TrialRuns, one: Protection, name: str) -> Line:
    if one.training is None:  # in fewer rounds another one dominates it
        return {"why": one.why_not}
    return trials.tried(one.training, name, one.name)


def _finalists(left: Iterable[Protection], short: dict[str, Line]) -> list[Protection]:
    """Return the most accurate ones after short trainings, as many with a proof as without one."""
    ranked = sorted(
        (one for one in left if "accuracy" in short[one.name]), key=lambda one: -float(short[one.name]["accuracy"])
    )
    return [one for proven in (True, False) for one in [c for c in ranked if c.proven is proven][:FINALISTS]]


def _lost(row: Line, reference: float) -> float:
    """Return the points that a training lost; infinite if there was none."""
    return 100 * (reference - float(row["accuracy"])) if "accuracy" in row else math.inf


def _attacked(trials: TrialRuns, finalists: list[Protection], out: Path) -> dict[str, Figures]:
    def run(settings: AuditSettings, folder: Path) -> AuditResult:
        with trials.counting("attacking the finalists") as move:
            return run_audit(settings, folder, trials.data_root, move)

    return attacked(finalists, out, run)


def _least(lines: list[Line]) -> Line | None:
    """Return the line that loses least, or None if there is none."""
    return min(lines, key=lambda line: float(line["loss"]), default=None)


def _frontier(trials: TrialRuns, wish: Wish, sizes: ClientSizes, best: Line) -> list[Line]:
    """Return the accuracy of the best configuration at other budgets, the wish's own included."""
    found = [{"mu": wish.mu, "accuracy": best["accuracy"]}]
    for factor in BUDGETS if best["proven"] else ():
        other = wish.at(factor * wish.mu)
        one = next((c for c in candidates(other, sizes) if c.name == best["candidate"] and c.training), None)
        row = {} if one is None else _row(trials, one, f"budget-{factor:g}")
        if "accuracy" in row:
            found.append({"mu": other.mu, "accuracy": row["accuracy"]})
    return sorted(found, key=lambda line: float(line["mu"]))


def _verify(trials: TrialRuns, wish: Wish, chosen: Protection, figures: Figures) -> Line:
    """Train the chosen configuration and the unprotected model on all training images, and look at test images."""
    pairs = []
    for seed in range(wish.seed, wish.seed + wish.seeds):
        doing = f"verifying with seed {seed}"
        training: TrainSettings = chosen.training  # type: ignore[assignment]  # it was trained
        ours = trials.verified(replace(training, seed=seed), f"verify-{seed}", doing)
        theirs = trials.verified(replace(wish.reference(), seed=seed), f"verify-reference-{seed}", doing)
        pairs.append((ours, theirs))
    return check_of(chosen, pairs, figures, wish)


def _refuse_other_wish(out: Path, wish: Wish) -> None:
    """Raise ConfigError if the folder holds another wish, or other files."""
    path = out / "wish.toml"
    if path.exists():
        if path.read_bytes() != to_toml(wish):
            raise ConfigError(f"{out} must be new or hold the same wish, got another one. Choose another --out.")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} must be new or empty, got a folder with other files. Choose another --out.")
