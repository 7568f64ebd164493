"""A browser on this machine, and what it can do for a page: print it as a PDF file."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from gradveil.errors import RunFolderError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
"""Programs that understand the same options."""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-pdf-header-footer", "--run-all-compositor-stages-before-draw",
    "--virtual-time-budget=4000",
)  # fmt: skip
TIMEOUT_SECONDS = 120


def find_browser() -> str | None:
    """Return the path of a browser that can print pages, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def print_pdf(page: Path) -> Path:
    """Print a page as a PDF file beside it, and return the file.

    Raises:
        RunFolderError: there is no browser, or it wrote no file.
    """
    browser = find_browser()
    if browser is None:
        raise RunFolderError(
            f"A PDF needs Chromium or Chrome, and none of {', '.join(NAMES)} is on the PATH. "
            f"Install one, or open {page} in any browser and print it."
        )
    target = page.with_suffix(".pdf").resolve()
    target.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        asked = [browser, *FLAGS, f"--user-data-dir={profile}", f"--print-to-pdf={target}", page.resolve().as_uri()]
        try:
            done = subprocess.run(  # noqa: S603 - a browser from the PATH, and our own page
                asked, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
            said = done.stderr.strip().splitlines()[-1:]
        except subprocess.TimeoutExpired:
            said = [f"it took longer than {TIMEOUT_SECONDS} s"]
    if not target.is_file():
        raise RunFolderError(f"{browser} printed no PDF of {page}: {' '.join(said) or 'it said nothing'}.")
    return target
