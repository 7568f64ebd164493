"""The gallery's pictures: one PNG sheet per line, with one column per picture and one row per iterate."""

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from gradveil.errors import DataError
from gradveil.metrics.psnr import CAP
from gradveil.report.audit_folder import AuditFolder, PlannedCell
from gradveil.storage import load_tensors

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

TARGETS = 16
"""A line shows at most this many targets, and at most twice as many pictures."""
FRAMES = 12
"""At most this many intermediate pictures."""
BUDGET = 16_000_000
"""Bytes of all pictures before compression, so that the page still opens at once."""


@dataclass(frozen=True)
class Picture:
    """One picture of the truth: its target, its number in the target's batch, and its label."""

    target: int
    image: int
    label: int


@dataclass(frozen=True)
class Line:
    """The guesses of one attack for the shown pictures, intermediate and final."""

    defence: str
    attack: str
    adaptive: bool
    seed: int
    frames: Pixels  # (K, P, C, H, W)
    there: tuple[bool, ...]  # (P,) whether the target was attacked
    guessed: tuple[bool, ...]  # (P,)
    psnr: list[list[float | None]]  # (K, P)
    steps: list[int]  # (K,), or empty if unknown


@dataclass(frozen=True)
class Gallery:
    """All pictures of the page."""

    columns: tuple[Picture, ...] = ()
    truth: Pixels = field(default_factory=lambda: np.zeros((1, 0, 1, 1, 1), np.uint8))  # (1, P, C, H, W)
    lines: tuple[Line, ...] = ()
    num_targets: int = 0
    notes: tuple[str, ...] = ()


def read_gallery(audit: AuditFolder) -> Gallery:
    """Load as many pictures as a page can hold; missing ones become notes."""
    try:
        truth = load_tensors(audit.path / "truth.safetensors")
        images, labels = truth["images"].numpy(), truth["labels"].reshape(truth["images"].shape[:2]).numpy()
        num_targets, num_images, *shape = images.shape
        if images.ndim != 5 or images.dtype != np.uint8 or not images.size:
            raise ValueError(images.shape)
    except (DataError, KeyError, RuntimeError, ValueError):
        return Gallery(notes=("truth.safetensors is missing or broken, so there are no pictures to show.",))
    cells = [cell for cell in audit.cells if cell.kind == "privacy"]
    groups = dict.fromkeys(cell.line for cell in cells)
    targets, frames = _fit(min(num_targets, TARGETS), num_images, int(np.prod(shape)), len(groups))
    shown = min(num_images, 2 * TARGETS)
    columns = tuple(Picture(t, i, int(labels[t, i])) for t in range(targets) for i in range(shown))
    kept = images[:targets, :shown].reshape(1, -1, *shape)
    notes: list[str] = []
    scores = _row_scores(audit) if num_images == 1 else {}
    lines = []
    for group in groups:
        pieces = [
            piece
            for cell in cells
            if cell.line == group and (piece := _load(audit, cell, images.shape[1:], frames, notes))
        ]
        if pieces:
            lines.append(_line(group, pieces, columns, kept, scores))
    return Gallery(columns, kept, tuple(lines), num_targets, tuple(notes))


def png(frames: Pixels, guessed: Sequence[bool] = ()) -> str:
    """Return a sheet (K, P, C, H, W) as a PNG in base64: K rows of P pictures; no guess is a chequered field."""
    pictures = visible(frames).copy()
    height, width, colours = pictures.shape[2:]
    squares = np.indices((height, width)) // max(1, round(height / 8))
    field_ = np.where(squares.sum(0) % 2, 153, 204).astype(np.uint8)
    for column, there in enumerate(guessed):
        if not there:
            pictures[:, column] = field_[..., None]
    sheet = pictures.transpose(0, 2, 1, 3, 4).reshape(len(pictures) * height, -1, colours)
    buffer = io.BytesIO()
    Image.fromarray(sheet[..., 0] if colours == 1 else sheet).save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode()


def visible(frames: Pixels) -> Pixels:
    """Return pictures (..., C, H, W) as (..., H, W, 1 or 3); other numbers of channels are stacked in grey."""
    if frames.shape[-3] not in (1, 3):
        frames = frames.reshape(*frames.shape[:-3], 1, -1, frames.shape[-1])
    return np.moveaxis(frames, -3, -1)


@dataclass(frozen=True)
class _Piece:
    """The pictures of one cell."""

    first: int
    frames: Pixels  # (K, n, B, C, H, W)
    guessed: np.ndarray[Any, np.dtype[np.bool_]]  # (n, B)
    steps: list[int]


def _fit(targets: int, images: int, size: int, lines: int) -> tuple[int, int]:
    """Return how many targets and frames a line may have so that all lines fit the budget."""
    pictures = min(images, 2 * TARGETS)
    targets = max(1, min(targets, 2 * TARGETS // pictures))
    frames = FRAMES
    while (targets > 1 or frames > 1) and (lines * frames + 1) * targets * pictures * size > BUDGET:
        if frames > 4 or targets == 1:
            frames -= 1
        elif targets > 4 or frames == 1:
            targets -= 1
        else:
            frames -= 1
    return targets, frames


def _load(audit: AuditFolder, cell: PlannedCell, shape: tuple[int, ...], most: int, notes: list[str]) -> _Piece | None:
    """Return the pictures of a finished cell, or None and a note if they are missing. A failed cell has none."""
    path = audit.path / "cells" / f"{cell.name}.safetensors"
    if not path.exists() and (cell.name not in audit.done or _failed(audit, cell)):
        return None
    try:
        tensors = load_tensors(path)
        result, ways = tensors["images"].numpy()[None], tensors["iterates"].numpy()
        frames = ways if len(ways) else result
        chosen = np.unique(np.linspace(0, len(frames) - 1, min(most, len(frames))).round().astype(int))
        frames = np.concatenate([frames[chosen[:-1]], result])
        guessed = tensors["guessed"].numpy().astype(bool)
        if frames.dtype != np.uint8 or frames.shape[2:] != shape or guessed.shape != frames.shape[1:3]:
            raise ValueError(frames.shape)
        numbers = tensors["steps"].tolist() if "steps" in tensors else []
        known = [numbers[index] for index in chosen] if len(numbers) == len(ways) > 0 else []
        return _Piece(cell.first, frames, guessed, known)
    except (DataError, KeyError, ValueError, RuntimeError):
        notes.append(f"cells/{cell.name}.safetensors is missing or broken; its pictures are not shown.")
        return None


def _failed(audit: AuditFolder, cell: PlannedCell) -> bool:
    rows = [row for row in audit.rows if row["cell"] == cell.name]
    return bool(rows) and all(row["failed"] for row in rows)


def _line(
    group: tuple[str, str, bool, int],
    pieces: Sequence[_Piece],
    columns: Sequence[Picture],
    truth: Pixels,
    scores: Mapping[tuple[object, ...], float | None],
) -> Line:
    """Put the cells' pictures into columns, and score each frame against the truth."""
    count = Counter(len(piece.frames) for piece in pieces).most_common(1)[0][0]
    frames = np.zeros((count, *truth.shape[1:]), np.uint8)
    there, guessed = [False] * len(columns), [False] * len(columns)
    for position, column in enumerate(columns):
        for piece in pieces:
            row = column.target - piece.first
            if 0 <= row < piece.frames.shape[1]:
                chosen = np.linspace(0, len(piece.frames) - 1, count).round().astype(int)
                frames[:, position] = piece.frames[chosen, row, column.image]
                there[position], guessed[position] = True, bool(piece.guessed[row, column.image])
    psnr = _psnr(frames, truth, guessed)
    for position, column in enumerate(columns):
        measured = scores.get((*group, column.target))
        if measured is not None and guessed[position]:
            psnr[-1][position] = round(measured, 2)
    steps = next((piece.steps for piece in pieces if len(piece.steps) == count), [])
    return Line(*group, frames, tuple(there), tuple(guessed), psnr, steps)


def _psnr(frames: Pixels, truth: Pixels, guessed: Sequence[bool]) -> list[list[float | None]]:
    """Return the PSNR of each picture as it is drawn, (K, P), or None if it is no guess."""
    mse = np.square((frames.astype(np.float32) - truth) / 255).mean((2, 3, 4), dtype=np.float64)
    values = np.minimum(CAP, -10 * np.log10(np.maximum(mse, 1e-30)))
    return [[round(float(v), 2) if there else None for v, there in zip(row, guessed, strict=True)] for row in values]


def _row_scores(audit: AuditFolder) -> dict[tuple[object, ...], float | None]:
    """Return the PSNR of the rows, which were computed before images were rounded to bytes."""
    return {
        (row["defence"], row["attack"], row["adaptive"], row["seed"], row["target"]): row["psnr"]
        for row in audit.rows
        if row["kind"] == "privacy"
    }
