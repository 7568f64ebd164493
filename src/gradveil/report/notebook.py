"""Results as a notebook shows them: small pieces of HTML with a table, pictures and a link to the page."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gradveil.report.audit_folder import read_audit
from gradveil.report.blind import blind_lines
from gradveil.report.headline import headline
from gradveil.report.names import for_people, named, subject
from gradveil.report.sheets import png, read_gallery
from gradveil.report.summary import summarise, utility, with_costs

PICTURES = 8
"""Lines of pictures that a notebook shows at most."""
MOST_ROWS = 50
"""Rows that a notebook shows at most."""
ROW_COLUMNS = (
    "kind", "defence", "attack", "adaptive", "seed", "target", "round", "psnr", "blind_psnr", "ssim", "identified",
    "converged", "accuracy", "epsilon", "why",
)  # fmt: skip
PIXELS = 48
"""Height of a picture in a notebook."""


def table_html(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return a table with the columns that any row has a value for."""
    rows = list(rows)
    used = [name for name in columns if any(row.get(name) not in (None, "") for row in rows)]
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in used)
    body = "".join("<tr>" + "".join(f"<td>{cell(name, row.get(name))}</td>" for name in used) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cell(name: str, value: object) -> str:
    """Return a value as a table shows it: accuracies in per cent, other numbers with four digits.

    Example:
        >>> cell("accuracy", 0.5), cell("psnr", 12.3456), cell("why", "<none>"), cell("ssim", None)
        ('50.0%', '12.35', '&lt;none&gt;', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return escape("; ".join(map(str, value)))
    if isinstance(value, float):
        return f"{value:.1%}" if name.startswith("accuracy") else f"{value:.4g}"
    return escape(str(value))


def picture_html(data: str, alt: str, height: int = PIXELS) -> str:
    """Return an image element for a PNG in base64."""
    style = f"height:{height}px;image-rendering:pixelated;margin:1px 0"
    return f'<img alt="{escape(alt)}" style="{style}" src="data:image/png;base64,{data}">'


def file_html(path: Path, alt: str, height: int) -> str:
    """Return an image element for a PNG file, or "" if there is none."""
    return picture_html(base64.b64encode(path.read_bytes()).decode(), alt, height) if path.is_file() else ""


def link_html(path: Path) -> str:
    """Return a link to a file; a relative path stays relative, so that it works beside the notebook."""
    place = path.as_uri() if path.is_absolute() else path.as_posix()
    return f'<p><a href="{escape(place)}" target="_blank">{escape(str(path))}</a></p>'


class ShownRows(list[dict[str, Any]]):
    """Rows that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        more = f"<p>and {len(self) - MOST_ROWS} more rows</p>" if len(self) > MOST_ROWS else ""
        return for_people_html(self[:MOST_ROWS]) + more


def for_people_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a table of the columns that people ask for first."""
    return table_html(for_people(rows), ROW_COLUMNS)


def audit_html(folder: Path, page: Path) -> str:
    """Return an audit for a notebook: the headline, the summary, the pictures of the first lines, and a link."""
    audit = read_audit(folder)
    audit, gallery = named(audit, read_gallery(audit))
    costs = utility(audit.rows, audit.schema)
    summary = [*blind_lines(audit.rows, audit.schema), *summarise(audit.rows, audit.schema)]
    lines = with_costs(summary, costs, audit.schema)
    metrics = [column.key for column in audit.schema.metrics if column.key not in ("psnr", "mse")]
    figures = ("psnr", "psnr_worst", *metrics, "recognisable", "images", "identified", "flags", "accuracy")
    columns = ("defence", "attack", "adaptive", *figures)
    pictures = [("private images", png(gallery.truth))] if gallery.columns else []
    for line in gallery.lines[:PICTURES]:
        name = f"{line.defence}, {line.attack}{', adaptive' * line.adaptive}"
        pictures.append((name, png(line.frames[-1:], line.guessed)))
    shown = "".join(f"<tr><td>{escape(name)}</td><td>{picture_html(data, name)}</td></tr>" for name, data in pictures)
    table = table_html(lines or costs, columns)
    title = subject(audit.settings)
    said = escape(headline(audit.rows, images=audit.images, schema=audit.schema))
    top = f"<p><strong>gradveil audit: {escape(title)}</strong></p><p>{said}</p>"
    return f"{top}{table}<table><tbody>{shown}</tbody></table>{link_html(page)}"
