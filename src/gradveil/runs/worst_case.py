"""The standard attackers in the worst case of a protection: clients with one image, and all budget in one update.

An update of hundreds of images is out of reach of a search, which says little: a client may have one image only, or the
attacker may know all others. And what T rounds with noise leak together, one update with less noise leaks at once. So
each finalist is attacked where clients have one image each, in one update that spends the whole training's budget. The
same scene without a defence shows that the attackers work.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import binom

from gradveil.audits.run import AuditResult, audit
from gradveil.audits.settings import AuditSettings, make_audit_settings
from gradveil.config import TrainSettings, to_toml
from gradveil.errors import ConfigError, DefenceError
from gradveil.runs.candidates import Protection
from gradveil.storage import write_atomic

CLIENTS = {"none": 4, "secure": 2}
"""Clients in the scene, with one image each. A sum has few of them, which is easier for an attacker: its noise is the
same for any number of clients."""
ATTACK = "standard:effort=quick"
UNLIKELY = 0.01
"""The bound counts as broken if, were it true, the images would have been picked with a smaller probability."""
Figures = dict[str, Any]


def scene(training: TrainSettings, defences: Sequence[str]) -> AuditSettings:
    """Return the settings of the audit that attacks these defences of one configuration."""
    clients = CLIENTS[training.aggregation]
    return make_audit_settings(
        {
            "dataset": training.dataset, "model": training.model, "weights": training.weights, "aux": training.aux,
            "defences": list(defences), "attacks": [ATTACK], "adaptive": True, "protocol": "lab", "images": 1,
            "partition": "iid:images=1", "clients": clients, "rounds": 1, "targets": clients, "sensitive": "",
            "aggregation": training.aggregation, "seed": training.seed, "device": training.device,
        }
    )  # fmt: skip


def attacked(
    finalists: Iterable[Protection],
    out: Path,
    run: Callable[[AuditSettings, Path], AuditResult],
) -> dict[str, Figures]:
    """Attack all finalists, those that train the same network together; return the strongest attacker's by name."""
    groups: dict[tuple[str, str, str], list[Protection]] = {}
    for one in finalists:
        if one.training is not None:
            key = (one.training.model, one.training.aux, one.training.aggregation)
            groups.setdefault(key, []).append(one)
    found: dict[str, Figures] = {}
    for number, group in enumerate(groups.values()):
        found |= _fought(group, out / f"attack-{number}", run)
    return found


def _fought(
    group: Sequence[Protection], out: Path, run: Callable[[AuditSettings, Path], AuditResult]
) -> dict[str, Figures]:
    """Attack candidates that train the same network; if no attack could be run, say why."""
    training: TrainSettings = group[0].training  # type: ignore[assignment]  # all have been trained
    try:
        settings = scene(training, list(dict.fromkeys(one.worst for one in group)))
        result = run(settings, out)
    except (ConfigError, DefenceError) as error:
        return {one.name: strongest([], "") | {"why_not_attacked": str(error)} for one in group}
    write_atomic(out.with_suffix(".toml"), to_toml(settings))
    control, why = strongest(result.rows, "none")["psnr"], "; ".join(dict.fromkeys(result.failed.values()))
    common = {"psnr_undefended": control, "attack_settings": out.with_suffix(".toml").name, "why_not_attacked": why}
    return {one.name: strongest(result.rows, one.worst) | common for one in group}


def strongest(rows: Iterable[Mapping[str, Any]], defence: str) -> Figures:
    """Return the figures of the attacker, knowing or not, with the highest mean PSNR; None if nobody could attack."""
    mine = [r for r in rows if r["kind"] == "privacy" and r["defence"] == defence and r["psnr"] is not None]
    best: Figures = dict.fromkeys(("psnr", "blind_psnr", "identified", "attacked", "candidates", "knowing"))
    for knowing in (False, True):
        some = [row for row in mine if row["adaptive"] is knowing]
        psnr = _mean([row["psnr"] for row in some])
        if psnr is not None and (best["psnr"] is None or psnr > best["psnr"]):
            identified, blind = (_mean([row[key] for row in some]) for key in ("identified", "blind_psnr"))
            images = sum(int(row["images"] or 1) for row in some)
            best = {
                "psnr": psnr, "blind_psnr": blind, "identified": identified, "attacked": images,
                "candidates": some[0]["candidates"], "knowing": knowing,
            }  # fmt: skip
    return best


def breaks(figures: Figures, bound: float) -> bool:
    """Return whether more images were picked than chance explains if each is picked with at most ``bound``.

    Example:
        >>> breaks({"identified": 0.25, "attacked": 4}, 0.02), breaks({"identified": 0.5, "attacked": 4}, 0.02)
        (False, True)
    """
    if figures.get("identified") is None:
        return False
    picked = round(figures["identified"] * figures["attacked"])
    return picked > 0 and float(binom.sf(picked - 1, figures["attacked"], bound)) < UNLIKELY


def run_audit(
    settings: AuditSettings, out: Path, data_root: Path | None, progress: Callable[[float], None]
) -> AuditResult:
    """Run the audit, or go on with it; in this process, as its cells are few."""
    return audit(
        settings, out, resume=out.exists(), workers=0, data_root=data_root,
        progress=lambda done, total, doing: progress(done / max(total, 1)),
    )  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
