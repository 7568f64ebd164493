"""Results of an attack on files and of a score, as Python and notebooks show them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.report.notebook import file_html, link_html, table_html

SHOWN = 8
"""Targets that a notebook shows at most."""


@dataclass(frozen=True)
class AttackResult:
    """Result of an attack on saved updates; a notebook shows the pictures.

    Attributes:
        out: the folder with settings, rows, pictures and ``reconstruction.safetensors``.
        rows: one row per update.
    """

    out: Path
    rows: Sequence[Mapping[str, Any]]

    @property
    def pictures(self) -> list[Path]:
        """A PNG per update, with the guessed images side by side."""
        return [self.out / "images" / f"target-{row['target']}.png" for row in self.rows]

    def __repr__(self) -> str:
        converged = sum(bool(row["converged"]) for row in self.rows)
        return f"AttackResult(updates={len(self.rows)}, converged={converged}, out={str(self.out)!r})"

    def _repr_html_(self) -> str:
        columns = ("target", "labels", "attacker_loss", "converged", "psnr", "ssim", "why")
        shown = "".join(file_html(path, path.stem, 96) for path in self.pictures[:SHOWN])
        head = f"<p><strong>gradveil attack</strong>: {self.rows[0]['attack'] if self.rows else ''}</p>"
        return head + shown + table_html(self.rows, columns) + link_html(self.out)


@dataclass(frozen=True)
class ScoreResult:
    """Leak scores of defences, without any attack; a notebook shows the summary.

    Attributes:
        rows: one row per defence and target.
        summary: means per defence.
    """

    rows: Sequence[Mapping[str, Any]]
    summary: Sequence[Mapping[str, Any]]

    def __repr__(self) -> str:
        caps = {line["defence"]: line["psnr_cap"] for line in self.summary}
        return f"ScoreResult(psnr_cap={caps})"

    def _repr_html_(self) -> str:
        columns = ("defence", "psnr_cap", "psnr_unseen", "seen", "directions", "bits", "why")
        return "<p><strong>gradveil score</strong></p>" + table_html(self.summary, columns)
