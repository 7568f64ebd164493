"""The report of an audit: reads the folder that ``gradveil audit`` wrote, and never reruns anything."""

from pathlib import Path

from gradveil.report.audit_folder import read_audit
from gradveil.report.figures import draw_figures
from gradveil.report.files import save_figure, to_csv
from gradveil.report.headline import headline
from gradveil.report.membership import MEMBERSHIP, membership_figure, membership_lines
from gradveil.report.page import audit_page
from gradveil.report.sheets import read_gallery
from gradveil.report.summary import membership, summarise, utility
from gradveil.report.tables import with_costs
from gradveil.report.words import command_of
from gradveil.storage import write_atomic

__all__ = ["command_of", "headline", "membership", "summarise", "utility", "write_report"]


SUMMARY = (
    "defence", "attack", "adaptive", "n", "seeds", "failed", "mse", "psnr", "psnr_low", "psnr_high", "psnr_worst",
    "ssim", "lpips", "recognisable", "guessed", "label_accuracy", "not_converged", "epsilon", "delta", "certificate",
    "knows", "seconds", "epsilon_training", "delta_training", "accuracy", "accuracy_sensitive", "round_seconds",
    "overhead",
)  # fmt: skip
"""The columns of summary.csv."""


def write_report(folder: Path) -> Path:
    """Write ``report.html``, ``summary.csv`` and ``figures/`` into an audit's folder; returns the page's path.

    Where an attack on membership was run, ``membership.csv`` has its lines. The run may be unfinished, and files may be
    broken: the page says so. Private pictures that are in the folder are in the page too.

    Raises:
        RunFolderError: the folder is not an audit's, or can't be written.
    """
    folder = Path(folder)
    audit = read_audit(folder)
    gallery = read_gallery(audit)
    summary, costs = summarise(audit.rows), utility(audit.rows)
    write_atomic(folder / "summary.csv", to_csv(with_costs(summary, costs), SUMMARY))
    if lines := membership_lines(audit.rows):
        write_atomic(folder / "membership.csv", to_csv(lines, MEMBERSHIP))
        for kind in ("png", "svg"):
            save_figure(membership_figure(audit.rows), folder / "figures" / f"membership.{kind}")
    draw_figures(gallery, summary, costs, folder / "figures")
    page = folder / "report.html"
    write_atomic(page, audit_page(audit, gallery).encode("utf-8", "replace"))
    return page
