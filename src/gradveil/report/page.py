"""The page of an audit: one self-contained HTML file that opens from disk and needs no network."""

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from gradveil.report.audit_folder import AuditFolder
from gradveil.report.blind import blind_lines
from gradveil.report.markup import as_json
from gradveil.report.membership import membership_section
from gradveil.report.names import subject
from gradveil.report.result import hero
from gradveil.report.sections import about_section, gallery_section, plane_section, rows_section, summary_section
from gradveil.report.sheets import Gallery, png
from gradveil.report.summary import membership, seeks_pictures, summarise, utility, with_costs
from gradveil.report.tables import rows_columns

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'"


def audit_page(audit: AuditFolder, gallery: Gallery) -> str:
    """Return the whole page."""
    summary, costs = summarise(audit.rows, audit.schema), utility(audit.rows, audit.schema)
    style, script = ((files("gradveil.report") / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    page_title = f"gradveil audit: {subject(audit.settings)}"
    shown = _sections(audit, gallery)
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in shown)
    content = "\n".join(html for _, _, html in shown)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,"><title>{escape(page_title)}</title><style>{style}</style></head><body>
<a class="skip" href="#main">Skip to the result</a>
<header><p class="brand">gradveil <span>audit</span></p><nav aria-label="Sections">{links}</nav></header>
<main id="main">
{hero(audit, gallery, summary, costs)}
{content}
</main>
<footer><p>Written by gradveil from rows.jsonl and the saved pictures; nothing was run again. If the audit's data are
private, this page holds private pictures: share it only with people who may see them.</p></footer>
<dialog id="large" aria-labelledby="large-title"><form method="dialog">
<h2 id="large-title"></h2><button class="close" aria-label="Close">×</button></form>
<div class="pair"><figure><canvas></canvas><figcaption>truth</figcaption></figure>
<figure><canvas></canvas><figcaption>the attacker's picture</figcaption></figure></div>
<p class="figures"></p><p class="hint">← and → show the next pictures, Esc closes.</p></dialog>
{_data(audit, gallery)}
<script>{script}</script></body></html>
"""


def _sections(audit: AuditFolder, gallery: Gallery) -> list[tuple[str, str, str]]:
    """Return the name, title and content of each section; an audit of membership alone has no pictures."""
    schema = audit.schema
    summary, costs = summarise(audit.rows, schema), utility(audit.rows, schema)
    about_members = membership_section(audit.rows, schema, adaptive=bool(audit.settings.get("adaptive")))
    blind = blind_lines(audit.rows, schema)
    members = [("membership", "Membership", about_members)] * bool(about_members)
    everything = [
        ("rows", "All rows", rows_section(audit)),
        ("about", "About", about_section(audit, [*summary, *membership(audit.rows, schema)])),
    ]
    if members and not summary:
        return members + everything
    table = ("table", "Summary", summary_section(audit, with_costs([*blind, *summary], costs, schema)))
    if summary and not any(map(seeks_pictures, summary)):
        return [*members, table, *everything]
    return [
        ("gallery", "Pictures", gallery_section(audit, gallery)),
        ("plane", "Privacy and accuracy", plane_section(summary, costs, schema)),
        *members,
        table,
        *everything,
    ]


def _data(audit: AuditFolder, gallery: Gallery) -> str:
    """Return the figures and the pictures as script elements, which the page's script reads when it needs them."""
    own = {(line.defence, line.seed): line.truth for line in gallery.lines if line.truth is not None}
    ssims = {(*_key(row), row["round"], row["target"]): row["ssim"] for row in audit.rows if row["ssim"] is not None}
    drawn = [
        {
            "defence": line.defence,
            "attack": line.attack,
            "adaptive": line.adaptive,
            "seed": line.seed,
            "there": [int(there) for there in line.there],
            "guessed": [int(guessed) for guessed in line.guessed],
            "psnr": line.psnr,
            "ssim": [ssims.get((*_key(vars(line)), column.round, column.target)) for column in gallery.columns],
            "steps": line.steps,
            "truth_sheet": 0
            if line.truth is None
            else 1 + len(gallery.lines) + [*own].index((line.defence, line.seed)),
            "labels": line.labels,
        }
        for line in gallery.lines
    ]
    content = {
        "columns": [vars(column) for column in gallery.columns],
        "images": audit.images,
        "classes": audit.class_names,
        "lines": drawn,
        "rows": rows_columns(audit.rows, audit.schema),
    }
    sheets = [png(gallery.truth)] if gallery.columns else []
    sheets += [png(line.frames, line.guessed) for line in gallery.lines]
    sheets += [png(truth) for truth in own.values()]
    parts = "".join(f'<script type="text/plain" id="sheet-{n}">{sheet}</script>\n' for n, sheet in enumerate(sheets))
    return f'<script type="application/json" id="data">{as_json(content)}</script>\n{parts}'


def _key(line: Mapping[str, Any]) -> tuple[object, ...]:
    return line["defence"], line["attack"], line["adaptive"], line["seed"]
