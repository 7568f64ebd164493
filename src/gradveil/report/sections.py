"""The sections of an audit's page below the result: pictures, plane, tables and method."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from gradveil.report.audit_folder import AuditFolder
from gradveil.report.blind import EXPLAINED, IDENTIFIED, NAME, blind_level, chance
from gradveil.report.glossary import glossary_list
from gradveil.report.headline import percent
from gradveil.report.markup import bullets, section, spec
from gradveil.report.plane import Point, leak_columns, plane_svg, points
from gradveil.report.sheets import Gallery
from gradveil.report.summary import price_unknown
from gradveil.report.tables import NOTHING, summary_table
from gradveil.report.words import METHOD, command_of, knowledge
from gradveil.rows import Column, Schema


def gallery_section(audit: AuditFolder, gallery: Gallery) -> str:
    """Return the truth beside what each attacker gets; the page's script cuts the pictures from their sheets."""
    names = [name for name in audit.defences if any(line.defence == name for line in gallery.lines)]
    if not names:
        return section("gallery", "Pictures", "<p>There are no pictures yet.</p>")
    seeds = sorted({line.seed for line in gallery.lines})
    options = "".join(f"<option>{seed}</option>" for seed in seeds)
    choose = f'<label>Seed <select id="seed">{options}</select></label>' if len(seeds) > 1 else ""
    frames = max(len(line.frames) for line in gallery.lines)
    shown = len({(column.round, column.target) for column in gallery.columns})
    few = f" The first {shown} of {gallery.num_targets} targets are shown." if shown < gallery.num_targets else ""
    slider = f"""<button type="button" id="play" aria-pressed="false">▶ Play</button>
<label class="slide"><span>Progress of the attacks</span>
<input id="step" type="range" min="0" max="{frames - 1}" value="{frames - 1}" step="1"></label>
<output id="where" for="step">end</output>"""
    still = "<span>No intermediate pictures were saved.</span>"
    blocks = "".join(
        f'<section class="block" data-defence="{escape(name)}" aria-label="{escape(name)}">'
        f"<h3>{spec(name)}{' (undefended)' * (name == 'none')}</h3>"
        '<div class="scroll" tabindex="0" role="group" aria-label="Pictures"><div class="strips"></div></div></section>'
        for name in names
    )
    return section(
        "gallery",
        "Pictures",
        f"""<p>The truth, and what each attacker gets, with its PSNR in dB below.{few} Open a picture to enlarge it;
the arrow keys move along a line.</p><noscript><p>The pictures need JavaScript.</p></noscript>
<div class="controls sticky">{slider if frames > 1 else still}{choose}</div>{blocks}""",
    )


def plane_section(summary: Sequence[Mapping[str, Any]], costs: Sequence[Mapping[str, Any]], schema: Schema) -> str:
    """Return the plane with each metric, and the same as tables."""
    lost = price_unknown(costs)
    reasons = [
        f"{cost['defence']}: {cost['why']}" for cost in costs if (lost or cost["accuracy"] is None) and cost["why"]
    ]
    measures = leak_columns(schema)
    drawn = {metric.key: points(summary, costs, metric) for metric in measures}
    if not any(drawn.values()):
        why = "no utility rows" if not costs else "no defences that have both an accuracy and a leak"
        why = "none: the undefended training did not learn" if lost else why
        text = f"<p>The plane needs the accuracy of a model trained with each defence, and there are {why}"
        return section("plane", "Privacy and accuracy", f"{text}{' yet' if not costs else ''}.</p>{bullets(reasons)}")
    metrics = [metric for metric in measures if drawn[metric.key]]
    first = metrics[0]
    levels = {metric.key: blind_level(summary, metric) for metric in metrics}
    choices = "".join(
        f'<label><input type="radio" name="metric" value="{escape(m.key)}"{" checked" * (m is first)}>'
        f"{escape(m.head)}</label>"
        if drawn[m.key]
        else f"<label><input type=radio disabled>{escape(m.head)} (not measured)</label>"
        for m in measures
    )
    figures = "".join(
        f'<div class="drawing" data-metric="{escape(m.key)}"{" hidden" * (m is not first)}>'
        f'<div class="wide">{plane_svg(drawn[m.key], m, blind=levels[m.key])}</div>'
        f'<div class="narrow">{plane_svg(drawn[m.key], m, 400, 420, levels[m.key])}</div>'
        f"{_points_table(drawn[m.key], m, levels[m.key])}</div>"
        for m in metrics
    )
    there = {point.defence for point in drawn[first.key]}
    whys = {line["defence"]: "no accuracy was measured" for line in summary}
    whys |= {cost["defence"]: cost["why"] or "no attack has a figure" for cost in costs}
    absent = [f"{name}: {why}" for name, why in whys.items() if name not in there]
    note = f"<p>Not in the plane:</p>{bullets(absent)}" if absent else ""
    return section(
        "plane",
        "Privacy and accuracy",
        f"""<p>Good defences lie at the bottom right: the model stays accurate and the strongest attack recovers little.
A hollow point is the leak to an attacker who does not know the defence, a filled one to an attacker who does. The
dashed line is the Pareto front under the strongest attack. The dotted line is a blind guess: below it, an attack
recovers, by this measure, nothing that was not known before.</p>
<fieldset class="controls"><legend>Leak measured by</legend>{choices}</fieldset>{figures}{note}""",
    )


def _points_table(some: Sequence[Point], metric: Column, blind: float | None) -> str:
    def shown(value: float | None) -> str:
        return metric.text({metric.key: value}) or NOTHING

    guess = f'<tr><th scope="row">{NAME}</th><td>{NOTHING}</td><td>{shown(blind)}</td><td></td><td></td></tr>'
    body = guess * (blind is not None) + "".join(
        f'<tr><th scope="row">{escape(p.defence)}</th><td>{percent(p.accuracy)}</td><td>{shown(p.plain)}</td>'
        f'<td>{shown(p.adaptive)}</td><td class="text">{escape(p.attack)}</td></tr>'
        for p in some
    )
    name = escape(metric.head)
    heads = ("Defence", "Accuracy", f"{name}, plain", f"{name}, adaptive", "Strongest attack")
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    return (
        '<details><summary>The same as a table</summary><div class="scroll"><table class="small">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def summary_section(audit: AuditFolder, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the summary with its filters."""
    whys = dict.fromkeys(why for row in audit.rows if not row["failed"] for why in row["unmeasured"] or [])
    notes = f"<p>Figures that are missing ({NOTHING}) were not measured:</p>{bullets(list(whys))}" if whys else ""
    return section(
        "table",
        "Summary",
        f"""<p>One line per defence, attack and kind of attacker. Figures are means over targets and seeds; intervals
are 95 % t intervals over seeds; the worst case stands beside the mean. An attack that did not converge might do better
with other settings: it does not show that the defence holds.</p>{_explained(lines)}
{_filters("summary", lines)}<div class="scroll" tabindex="0" role="group" aria-label="Summary table">
{summary_table(lines, audit.schema)}</div>{notes}""",
    )


def _explained(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return what the blind guess, identification and the flags are, as far as the table has them."""
    known = next((line for line in lines if line.get("candidates")), None)
    if known is None:
        return ""
    named = IDENTIFIED.format(others=round(known["candidates"]) - 1, chance=chance(known))
    flags = "<b>Flags</b> mark lines whose comparison needs care, because an attack was weaker than it could be."
    return f"<p>{EXPLAINED} {named} {flags * any(line['flags'] for line in lines)}</p>"


def _filters(of: str, lines: Iterable[Mapping[str, Any]]) -> str:
    lines, label = list(lines), {"summary": "Filter the summary", "all": "Filter all rows"}[of]

    def select(name: str, values: Iterable[str]) -> str:
        options = "".join(f"<option>{escape(value)}</option>" for value in dict.fromkeys(values))
        return (
            f'<label>{name} <select data-facet="{name.lower()}"><option value="">all</option>{options}</select></label>'
        )

    return f"""<div class="controls filters" data-for="{of}" role="search" aria-label="{label}">
<label>Filter <input type="search" placeholder="any text" autocomplete="off"></label>
{select("Defence", (line["defence"] for line in lines))}{select("Attack", (x["attack"] for x in lines if x["attack"]))}
<label>Attacker <select data-facet="adaptive"><option value="">all</option><option>plain</option>
<option>adaptive</option></select></label>
<label><input type="checkbox" class="every-column">All columns</label>
<span class="status" role="status"></span></div>"""


def rows_section(audit: AuditFolder) -> str:
    """Return the table in which the script draws all rows, page by page."""
    return section(
        "rows",
        "All rows",
        f"""{_filters("all", audit.rows)}
<noscript><p>This table needs JavaScript; rows.csv has the same rows.</p></noscript>
<div class="scroll" tabindex="0" role="group" aria-label="Table of all rows">
<table id="all"><thead></thead><tbody></tbody></table></div>
<div class="controls pager" hidden><button type="button" data-move="-1">← Before</button>
<span></span><button type="button" data-move="1">Next →</button></div>""",
    )


def about_section(audit: AuditFolder, summary: Sequence[Mapping[str, Any]]) -> str:
    """Return what the attacker knew, the command, the method and the settings."""
    values = "".join(
        f"<dt>{escape(key)}</dt>"
        f"<dd>{escape(', '.join(map(str, value)) if isinstance(value, list) else str(value))}</dd>"
        for key, value in audit.settings.items()
        if key != "kind"
    )
    return section(
        "about",
        "About",
        f"""<h3>What the attacker knew</h3>{knowledge(summary)}
{glossary_list()}<h3>Repeat it</h3><pre><code>{_command(audit.settings)}</code></pre>{METHOD}
<details><summary>All settings</summary><dl>{values}</dl></details>""",
    )


def _command(settings: Mapping[str, Any]) -> str:
    """Return the command as one line that breaks between options only."""
    command = settings.get("command")
    first, *options = (command if isinstance(command, str) else command_of(settings)).split(" --")
    return " ".join([escape(first), *(f"<span>--{escape(option)}</span>" for option in options)])
