"""The top of an audit's page: the result in words, what is missing, and one bar per defence."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from gradveil.federated.protocol import default_taps
from gradveil.metrics.recognition import MORE_PSNR, MORE_SSIM, RECOGNISABLE
from gradveil.report.audit_folder import AuditFolder
from gradveil.report.blind import EXPLAINED, NAME, blind_lines
from gradveil.report.glossary import glossed
from gradveil.report.headline import percent, sentences
from gradveil.report.markup import bullets, solid, spec
from gradveil.report.names import failures, short_dataset, subject
from gradveil.report.recovered import recovered
from gradveil.report.sheets import Gallery
from gradveil.report.summary import membership, seeks_pictures, strongest
from gradveil.report.tables import NOTHING, adaptive
from gradveil.report.verdict import DefenceVerdict, badge, judge, meaning, patients_section

FEW_CLASSES = 5
"""Classes that the first sentence names at most."""


def hero(audit: AuditFolder, gallery: Gallery, summary: Sequence[Mapping[str, Any]], costs: Sequence[Any]) -> str:
    """Return the section that a reader sees first."""
    blind = blind_lines(audit.rows, audit.schema)
    first, *more = sentences(audit.rows, images=audit.images, schema=audit.schema)
    apart = recovered(audit.rows, audit.schema, audit.left_out)
    more = [sentence for sentence in more if sentence not in apart.values()]
    settings = audit.settings
    facts = [subject(settings)]
    attacks_updates = bool(summary) or not membership(audit.rows, audit.schema)
    rebuilds = attacks_updates and (not summary or any(map(seeks_pictures, summary)))
    if attacks_updates:
        facts += [f"{count} targets" for count in [settings.get("targets") or gallery.num_targets] if count]
        facts += [f"{audit.images} images each"] if audit.images > 1 else []
        facts += protocol_words(settings)
    seeds = len({row["seed"] for row in audit.rows} | {cell.seed for cell in audit.cells})
    facts += [f"{seeds} seed{'s' if seeds != 1 else ''}"] if seeds else []
    judged = judge(summary, costs)
    undefended = [each for each in judged if each.defence == "none"]
    if any(each.level == "leaks" and not each.recognisable[0] for each in undefended):
        first, more = f"Undefended, {meaning(undefended[0])}", [first, *more]
    lead = f'<p class="lead">{solid(" ".join(more))}</p>' if more else ""
    definition = f"""<p class="definition"><b>Recognisable</b>: {_definition(audit, blind)}
Each defence is judged by the attack that recovers most.</p>
"""
    verdict = "".join(f'<p class="verdict">{badge(each.level)} without protection</p>' for each in undefended)
    told = glossed(f"{lead}{_apart(apart) * bool(audit.rows)}{definition * rebuilds}")
    return f"""<section class="hero" aria-labelledby="result"><p class="attacked">{escape(attacked(audit))}</p>
<p class="facts">{escape(" · ".join(map(str, facts)))}</p>
{verdict}<h1 id="result">{solid(first)}</h1>
{told}{_banner(audit, gallery)}{_ledger(audit.defences, summary, costs, blind, judged)}</section>
{patients_section(judged)}"""


def attacked(audit: AuditFolder) -> str:
    """Return in one sentence what was attacked, for people outside the field."""
    settings, classes = audit.settings, audit.class_names
    sent = "the sum of what clients send" if settings.get("aggregation") == "secure" else "what single clients send"
    kinds = f" ({', '.join(classes)})" if 0 < len(classes) <= FEW_CLASSES else ""
    data = short_dataset(str(settings.get("dataset") or "?"))
    return f"A server tried to compute private images of {data}{kinds} back from {sent} in a common training."


def _apart(told: Mapping[str, str]) -> str:
    """Return what was recovered of labels, membership and pictures, one line each."""
    lines = "".join(f"<div><dt>{escape(name)}</dt><dd>{solid(text)}</dd></div>" for name, text in told.items())
    return f'<dl class="recovered">{lines}</dl>'


def _definition(audit: AuditFolder, blind: Sequence[Mapping[str, Any]]) -> str:
    """Return which pictures count as recognisable, in words."""
    if not blind:
        what = "picture" if audit.images == 1 else "batch (by its mean)"
        return f"a {what} whose SSIM to the truth is at least {RECOGNISABLE}. Every target counts once per seed."
    above = f"{MORE_SSIM} of SSIM and {MORE_PSNR:g} dB"
    return (
        f"a picture whose SSIM to the truth is at least {RECOGNISABLE} and that is closer to the truth than its blind "
        f"guess, by at least {above}. Every picture counts once per seed. {EXPLAINED}"
    )


def protocol_words(settings: Mapping[str, Any]) -> list[str]:
    """Return in words how the attacked updates were made; [] for an audit from before ``--protocol``.

    Example:
        >>> protocol_words({"protocol": "lab", "images": 1, "rounds": 500, "tap": [1, 500]})
        ['lab protocol: in each of 500 rounds, every client sends the gradient of 1 image; rounds 1, 500 were attacked']
        >>> protocol_words({"protocol": "lab", "images": 2, "rounds": 1})
        ['lab protocol: in the only round, every client sends the gradient of 2 images; round 1 was attacked']
    """
    name, rounds, images = settings.get("protocol"), settings.get("rounds") or 0, settings.get("images") or 1
    if name not in ("lab", "fedavg"):
        return []
    what = f"the gradient of {images} image{'s' if images != 1 else ''}"
    if name == "fedavg":
        epochs = settings.get("epochs") or 1
        what = f"its model's change after {epochs} epoch{'s' if epochs != 1 else ''} over all its images"
    if not rounds:
        return [f"{name} protocol without training: every client sends {what}, once"]
    taps = ", ".join(map(str, settings.get("tap") or default_taps(rounds)))
    when = f"rounds {taps} were" if "," in taps else f"round {taps} was"
    often = f"in each of {rounds:,} rounds" if rounds > 1 else "in the only round"
    return [f"{name} protocol: {often}, every client sends {what}{_seen(settings)}; {when} attacked"]


def _seen(settings: Mapping[str, Any]) -> str:
    """Return what the server sees of the updates, if it does not see each of them, or ""."""
    secure = settings.get("aggregation") == "secure"
    return ", and the server sees only their mean (secure aggregation)" if secure else ""


def _banner(audit: AuditFolder, gallery: Gallery) -> str:
    """Return the box that says what is missing from the page, and why; "" if nothing is."""
    missing = len(audit.cells) - len(audit.done)
    unfinished = f"{len(audit.done)} of {len(audit.cells)} cells are done" if missing else ""
    failed = sum(bool(row["failed"]) for row in audit.rows)
    parts = [f"<p><b>The run is unfinished</b>: {unfinished}. The figures below are of the finished cells.</p>"] * bool(
        missing
    )
    if failed:
        parts.append(f"<p><b>{failed} rows are of cells that failed</b>, and count nowhere:</p>")
        parts.append(bullets(failures(audit.rows)))
    if audit.left_out:
        reasons = [f"{name}: {why}" for name, why in audit.left_out.items()]
        parts.append(f"<p><b>Not run</b>:</p>{bullets(reasons)}")
    notes = [*audit.notes, *gallery.notes]
    if notes:
        parts.append(f"<p><b>Parts of the folder could not be used</b>:</p>{bullets(notes)}")
    return f'<aside class="banner" aria-label="What is missing">{"".join(parts)}</aside>' if parts else ""


def _ledger(
    names: Iterable[str],
    summary: Sequence[Mapping[str, Any]],
    costs: Sequence[Mapping[str, Any]],
    blind: Sequence[Mapping[str, Any]],
    judged: Sequence[DefenceVerdict],
) -> str:
    """Return bars: what the strongest attack makes recognisable under each defence, beside verdict and accuracy."""
    levels = {each.defence: each.level for each in judged}
    accuracy = {cost["defence"]: cost["accuracy"] for cost in costs}
    lines = ""
    for name in names:
        own = [line for line in summary if line["defence"] == name]
        best = [strongest(line for line in own if line["adaptive"] is knows) for knows in (False, True)]
        if any(best):
            bars = "".join(_bar(line) for line in best if line)
            worth = accuracy.get(name)
            lines += (
                f'<tr><th scope="row">{spec(name)}</th><td class="bars">{bars}</td>'
                f'<td class="text">{badge(levels[name]) if name in levels else NOTHING}</td>'
                f"<td>{NOTHING if worth is None else percent(worth)}</td></tr>"
            )
    if not lines:
        return ""
    lines = "".join(map(_blind, blind)) + lines
    return f"""<div class="scroll"><table class="ledger"><thead><tr><th scope="col">Defence</th>
<th scope="col">Recognisable to the strongest attack
<span class="key"><i class="swatch"></i>plain <i class="swatch filled"></i>knows the defence</span></th>
<th scope="col">Verdict</th><th scope="col">Accuracy</th></tr></thead><tbody>{lines}</tbody></table></div>"""


def _blind(line: Mapping[str, Any]) -> str:
    """Return the ledger's line of a blind guess, which the pictures of the others must beat."""
    figures = [
        text.format(round(line[key], 2) + 0.0)  # no minus before a zero
        for key, text in (("psnr", "{:.1f} dB"), ("ssim", "SSIM {:.2f}"))
        if line.get(key) is not None
    ]
    words = escape(f"{line['attack']}: {', '.join(figures)}" if figures else line["attack"])
    return f'<tr><th scope="row">{NAME}</th><td class="bars">{words}</td><td class="text"></td><td>{NOTHING}</td></tr>'


def _bar(line: Mapping[str, Any]) -> str:
    count = line["recognisable"]
    share = 0.0 if count is None else 100 * count / line["images"]
    text = NOTHING if count is None else f"{count} of {line['images']}"
    filled = " filled" if line["adaptive"] else ""
    words = f"{adaptive(line['adaptive'])}, strongest attack: {line['attack']}"
    return (
        f'<div class="bar{filled}" title="{escape(words)}"><span class="track"><span style="width:{share:.2f}%"></span>'
        f'</span><span class="count"><span class="hidden">{adaptive(line["adaptive"])}: </span>{text}</span></div>'
    )
