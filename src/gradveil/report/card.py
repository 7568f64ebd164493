"""The privacy card of an audit: what was tried against whom, what came of it, and what was not tried."""

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gradveil.catalogue import catalogue
from gradveil.registry import parse_spec
from gradveil.report.audit_folder import AuditFolder, read_audit
from gradveil.report.criteria import Verdict
from gradveil.report.names import failures, subject
from gradveil.report.result import protocol_words
from gradveil.report.summary import membership, summarise, utility
from gradveil.storage import write_atomic
from gradveil.threat import Knowledge

NAME = "privacy_card"
PROTOCOL = (
    "protocol", "clients", "sampled", "rounds", "tap", "images", "epochs", "batch_size", "lr", "momentum",
    "weight_decay", "batch_norm", "aggregation", "partition", "targets", "seeds", "seed",
)  # fmt: skip
"""The settings of an audit that say how its clients train."""
FIGURES = ("recognisable", "images", "psnr", "blind_psnr", "identified", "blind_identified", "not_converged", "n")
"""What the card says of each attack."""


def write_card(folder: Path, verdicts: Sequence[Verdict] = ()) -> dict[str, Any]:
    """Write ``privacy_card.json`` and ``privacy_card.md`` beside an audit's page; return the card."""
    card = card_of(read_audit(folder), verdicts)
    write_atomic(folder / f"{NAME}.json", json.dumps(card, indent=1, allow_nan=False).encode())
    write_atomic(folder / f"{NAME}.md", to_markdown(card).encode())
    return card


def card_of(audit: AuditFolder, verdicts: Sequence[Verdict] = ()) -> dict[str, Any]:
    """Return the card of an audit as JSON values."""
    settings, schema = audit.settings, audit.schema
    attacks = [str(spec) for spec in settings.get("attacks", ())]
    tried = [spec for spec in attacks if spec not in audit.left_out]
    alters = any(Knowledge.ALTERS_MODEL.value in (row.get("knows") or ()) for row in audit.rows)
    others = sorted(set(catalogue("attacks").entries) - {parse_spec(spec)[0] for spec in attacks})
    summary, costs = summarise(audit.rows, schema), utility(audit.rows, schema)
    return {
        "subject": {"model": settings.get("model"), "dataset": settings.get("dataset")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"gradveil": version("gradveil"), "torch": version("torch"), "python": platform.python_version()},
        "threat_model": {
            "server": "malicious (alters the model)" if alters else "honest but curious",
            "sees": "the mean of a round's updates" if settings.get("aggregation") == "secure" else "single updates",
            "knows": sorted(settings.get("knows", ())),
            "adaptive": bool(settings.get("adaptive")),
        },
        "protocol": {key: settings[key] for key in PROTOCOL if key in settings},
        "protocol_in_words": protocol_words(settings),
        "defences": list(settings.get("defences", ())),
        "attacks_run": tried,
        "attacks_not_run": dict(audit.left_out) | dict.fromkeys(others, "not chosen"),
        "failed": failures(audit.rows),
        "epsilon": {line["defence"]: {"epsilon": line["epsilon"], "delta": line["delta"]} for line in costs},
        "accuracy": {line["defence"]: line["accuracy"] for line in costs},
        "results": [{key: line.get(key) for key in ("defence", "attack", "adaptive", *FIGURES)} for line in summary],
        "membership": [
            {key: line[key] for key in ("defence", "attack", "auc", "tpr_at_1_fpr")}
            for line in membership(audit.rows, schema)
        ],
        "verdicts": [{"criterion": v.criterion, "met": v.met, "reason": v.reason} for v in verdicts],
        "verdict": verdict_word(verdicts),
        "command": settings.get("command", ""),
    }


def verdict_word(verdicts: Sequence[Verdict]) -> str:
    """Return fails, passes, not measured, or no criterion, for all criteria together.

    Example:
        >>> verdict_word([Verdict("identified>0.01", False, "0"), Verdict("psnr>blind+1", True, "20")])
        'fails'
    """
    if not verdicts:
        return "no criterion"
    if any(verdict.met for verdict in verdicts):
        return "fails"
    return "not measured" if any(verdict.met is None for verdict in verdicts) else "passes"


def to_markdown(card: Mapping[str, Any]) -> str:
    """Return the card as Markdown."""
    threat = card["threat_model"]
    lines = [
        f"# Privacy card: {subject(card['subject'])}",
        "",
        f"Verdict: **{card['verdict']}**. Written {card['date']} by gradveil {card['versions']['gradveil']} "
        f"(torch {card['versions']['torch']}, Python {card['versions']['python']}).",
        "",
        *(f"- {v['criterion']}: {_word(v['met'])}; {v['reason']}" for v in card["verdicts"]),
        *[""] * bool(card["verdicts"]),
        "## Threat model",
        "",
        f"The server is {threat['server']}, sees {threat['sees']}, and knows {', '.join(threat['knows']) or 'nothing'} "
        f"beside the model. Attackers who know the defence were {'' if threat['adaptive'] else 'not '}tried.",
        "",
        "## Protocol",
        "",
        *(f"- {key.replace('_', ' ')}: {_text(value)}" for key, value in card["protocol"].items()),
        "",
        "## Results",
        "",
        "| defence | attack | attacker | recognisable | PSNR, dB | blind PSNR, dB | identified | did not converge |",
        "|---|---|---|---|---|---|---|---|",
        *map(_line, card["results"]),
        *(f"- Membership under {m['defence']}, {m['attack']}: AUC {_text(m['auc'])}" for m in card["membership"]),
        "",
        "## Privacy budget and accuracy",
        "",
        *(
            f"- {name}: ε {_text(budget['epsilon'])}, δ {_text(budget['delta'])}, "
            f"accuracy {_text(card['accuracy'].get(name))}"
            for name, budget in card["epsilon"].items()
        ),
        "",
        "## Attacks",
        "",
        f"Run: {', '.join(card['attacks_run']) or 'none'}.",
        "",
        *(f"- Not run: {name}: {why}" for name, why in card["attacks_not_run"].items()),
        *(f"- Failed: {reason}" for reason in card["failed"]),
        "",
        "An attack that did not converge, or was not run, shows nothing about what others would recover.",
        "",
    ]
    return "\n".join(lines)


def _line(line: Mapping[str, Any]) -> str:
    recognisable = "–" if line["recognisable"] is None else f"{line['recognisable']} of {line['images']}"
    cells = [line["defence"], line["attack"], "adaptive" if line["adaptive"] else "plain", recognisable]
    cells += [_text(line[key]) for key in ("psnr", "blind_psnr", "identified")]
    stuck = f"{line['not_converged']} of {line['n']}"
    return f"| {' | '.join([*map(str, cells), stuck])} |"


def _word(met: bool | None) -> str:
    return {True: "met (leaks)", False: "not met", None: "not measured"}[met]


def _text(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "/".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
