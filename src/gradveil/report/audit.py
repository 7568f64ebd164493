"""The report of an audit, made from the folder that ``gradveil audit`` wrote; nothing is run again."""

from pathlib import Path

from gradveil.report.audit_folder import read_audit
from gradveil.report.blind import blind_lines
from gradveil.report.figures import draw_figures
from gradveil.report.files import save_figure, table_csv, to_csv
from gradveil.report.headline import headline
from gradveil.report.latex import to_latex
from gradveil.report.membership import membership_figure
from gradveil.report.names import for_people, named, subject
from gradveil.report.page import audit_page
from gradveil.report.sheets import read_gallery
from gradveil.report.summary import membership, summarise, utility, with_costs
from gradveil.report.words import command_of
from gradveil.storage import write_atomic

__all__ = ["command_of", "headline", "membership", "summarise", "utility", "write_report"]


def write_report(folder: Path) -> Path:
    """Write ``report.html``, ``summary.csv``, ``summary.tex`` and ``figures/``; return the page's path.

    If membership was attacked, ``membership.csv`` has its lines. The run may be unfinished and files may be broken: the
    page says so. The page holds the private pictures of the folder.

    Raises:
        RunFolderError: the folder is no audit's, or can't be written.
    """
    folder = Path(folder)
    audit = read_audit(folder)
    gallery = read_gallery(audit)
    schema = audit.schema
    summary, costs = summarise(audit.rows, schema), utility(audit.rows, schema)
    lines = with_costs([*blind_lines(audit.rows, schema), *summary], costs, schema)
    write_atomic(folder / "summary.csv", table_csv(lines, schema, "summary", "price"))
    paper = to_latex(for_people(lines), schema, f"What attacks recover of {subject(audit.settings)}.")
    write_atomic(folder / "summary.tex", paper.encode("utf-8", "replace"))
    members = membership(audit.rows, schema)
    audit, gallery = named(audit, gallery)
    summary, costs = summarise(audit.rows, schema), utility(audit.rows, schema)
    if members:
        write_atomic(folder / "membership.csv", to_csv(members, schema.keys("members")))
        for kind in ("png", "svg"):
            save_figure(membership_figure(audit.rows), folder / "figures" / f"membership.{kind}")
    draw_figures(gallery, summary, costs, folder / "figures")
    page = folder / "report.html"
    write_atomic(page, audit_page(audit, gallery).encode("utf-8", "replace"))
    return page
