"""The gallery's pictures: one PNG sheet per line, with one column per picture and one row per iterate."""

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image

from gradveil.errors import DataError
from gradveil.metrics.psnr import CAP
from gradveil.report.audit_folder import AuditFolder, PlannedCell
from gradveil.report.summary import seeks_pictures
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
    """One picture of the truth: its target, its number in the target's batch, its label, and the round (0: unknown)."""

    target: int
    image: int
    label: int
    round: int = 0


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
    truth: Pixels | None = None  # (1, P, C, H, W), or None if it is the gallery's
    labels: tuple[int, ...] | None = None  # (P,) of ``truth``


@dataclass(frozen=True)
class Gallery:
    """All pictures of the page."""

    columns: tuple[Picture, ...] = ()
    truth: Pixels = field(default_factory=lambda: np.zeros((1, 0, 1, 1, 1), np.uint8))  # (1, P, C, H, W)
    lines: tuple[Line, ...] = ()
    num_targets: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Truth:
    """The images behind the attacked updates of one seed, or of all seeds if they are the same."""

    images: Pixels  # (U, B, C, H, W)
    labels: np.ndarray[Any, Any]  # (U, B)
    places: list[tuple[int, int]]  # (U,) round and target
    seed: int | None  # None: of all seeds


def _truth(audit: AuditFolder) -> _Truth:
    """Load the truth. Raise one of several errors if it is missing or broken."""
    saved = load_tensors(audit.path / "truth.safetensors")
    images, labels = saved["images"].numpy(), saved["labels"].reshape(saved["images"].shape[:2]).numpy()
    if images.ndim != 5 or images.dtype != np.uint8 or not images.size:
        raise ValueError(images.shape)
    if "seed" not in saved:  # before --protocol
        return _Truth(images, labels, [(0, target) for target in range(len(images))], None)
    seeds, numbers, targets = (saved[name].tolist() for name in ("seed", "round", "target"))
    first = [place for place, seed in enumerate(seeds) if seed == seeds[0]]
    alike = all(np.array_equal(images[first], images[np.array(seeds) == seed]) for seed in set(seeds))
    places = [(numbers[place], targets[place]) for place in first]
    return _Truth(images[first], labels[first], places, None if alike else seeds[0])


def read_gallery(audit: AuditFolder) -> Gallery:
    """Load as many pictures as a page can hold; missing ones become notes. If seeds differ, the first is shown."""
    blank = {row["cell"] for row in audit.rows if not seeks_pictures(row)}
    if audit.cells and all(cell.kind != "privacy" or cell.name in blank for cell in audit.cells):
        return Gallery()
    try:
        truth = _truth(audit)
    except (DataError, KeyError, RuntimeError, ValueError):
        return Gallery(notes=("truth.safetensors is missing or broken, so there are no pictures to show.",))
    num_targets, num_images, *shape = truth.images.shape
    drawn = [cell for cell in audit.cells if cell.kind == "privacy" and cell.name not in blank]
    cells = [cell for cell in drawn if truth.seed in (None, cell.seed)]
    groups = dict.fromkeys(cell.line for cell in cells)
    targets, frames = _fit(min(num_targets, TARGETS), num_images, int(np.prod(shape)), len(groups))
    shown = min(num_images, 2 * TARGETS)
    chosen = sorted(range(num_targets), key=lambda place: truth.places[place][::-1])[:targets]  # all rounds of a target
    chosen.sort(key=lambda place: truth.places[place])
    columns = tuple(
        Picture(truth.places[place][1], i, int(truth.labels[place, i]), truth.places[place][0])
        for place in chosen
        for i in range(shown)
    )
    kept = truth.images[chosen][:, :shown].reshape(1, -1, *shape)
    notes: list[str] = []
    scores = _row_scores(audit) if num_images == 1 else {}
    lines = []
    for group in groups:
        pieces = [piece for cell in cells if cell.line == group and (piece := _load(audit, cell, truth, frames, notes))]
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
    round: int
    frames: Pixels  # (K, n, B, C, H, W)
    guessed: np.ndarray[Any, np.dtype[np.bool_]]  # (n, B)
    steps: list[int]
    drawn: tuple[Pixels, np.ndarray[Any, Any]] | None  # own images (n, B, C, H, W) and labels (n, B), if others


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


def _load(audit: AuditFolder, cell: PlannedCell, truth: _Truth, most: int, notes: list[str]) -> _Piece | None:
    """Return the pictures of a finished cell, or None and a note if they are missing. A failed cell has none."""
    number = cell.round if any(number for number, _ in truth.places) else 0
    path = audit.path / "cells" / f"{cell.name}.safetensors"
    if not path.exists() and (cell.name not in audit.done or _failed(audit, cell)):
        return None
    try:
        tensors = load_tensors(path)
        own = tensors["truth"].numpy() if "truth" in tensors else None
        other = own is not None and not _same_truth(own, truth, number, cell.first)
        drawn = (own, tensors["truth_labels"].numpy()) if own is not None and other else None
        result, ways = tensors["images"].numpy()[None], tensors["iterates"].numpy()
        frames = ways if len(ways) else result
        chosen = np.unique(np.linspace(0, len(frames) - 1, min(most, len(frames))).round().astype(int))
        frames = np.concatenate([frames[chosen[:-1]], result])
        guessed = tensors["guessed"].numpy().astype(bool)
        if frames.dtype != np.uint8 or frames.shape[3:] != truth.images.shape[2:] or guessed.shape != frames.shape[1:3]:
            raise ValueError(frames.shape)
        numbers = tensors["steps"].tolist() if "steps" in tensors else []
        known = [numbers[index] for index in chosen] if len(numbers) == len(ways) > 0 else []
        return _Piece(cell.first, number, frames, guessed, known, drawn)
    except (DataError, KeyError, ValueError, RuntimeError):
        notes.append(f"cells/{cell.name}.safetensors is missing or broken; its pictures are not shown.")
        return None


def _same_truth(own: Pixels, truth: _Truth, number: int, first: int) -> bool:
    """Return whether a cell's images are those of the truth; both may end in padding."""
    wide = min(own.shape[1], truth.images.shape[1])
    places = [truth.places.index((number, first + row)) for row in range(len(own))]
    return bool(np.array_equal(own[:, :wide], truth.images[places][:, :wide]))


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
    frames, own = np.zeros((count, *truth.shape[1:]), np.uint8), truth.copy()
    there, guessed = [False] * len(columns), [False] * len(columns)
    labels = [column.label for column in columns]
    for position, column in enumerate(columns):
        for piece in pieces:
            row = column.target - piece.first
            fits = 0 <= row < piece.frames.shape[1] and column.image < piece.frames.shape[2]
            if fits and column.round == piece.round:
                chosen = np.linspace(0, len(piece.frames) - 1, count).round().astype(int)
                frames[:, position] = piece.frames[chosen, row, column.image]
                there[position], guessed[position] = True, bool(piece.guessed[row, column.image])
                if piece.drawn is not None:
                    own[0, position] = piece.drawn[0][row, column.image]
                    labels[position] = int(piece.drawn[1][row, column.image])
                    there[position] = labels[position] >= 0  # the client may have drawn no image
    psnr = _psnr(frames, own, guessed)
    for position, column in enumerate(columns):
        measured = scores.get((*group, column.round, column.target))
        if measured is not None and guessed[position]:
            psnr[-1][position] = round(measured, 2)
    steps = next((piece.steps for piece in pieces if len(piece.steps) == count), [])
    drew = any(piece.drawn is not None for piece in pieces)
    line = Line(*group, frames, tuple(there), tuple(guessed), psnr, steps)
    return replace(line, truth=own, labels=tuple(labels)) if drew else line


def _psnr(frames: Pixels, truth: Pixels, guessed: Sequence[bool]) -> list[list[float | None]]:
    """Return the PSNR of each picture as it is drawn, (K, P), or None if it is no guess."""
    mse = np.square((frames.astype(np.float32) - truth) / 255).mean((2, 3, 4), dtype=np.float64)
    values = np.minimum(CAP, -10 * np.log10(np.maximum(mse, 1e-30)))
    return [[round(float(v), 2) if there else None for v, there in zip(row, guessed, strict=True)] for row in values]


def _row_scores(audit: AuditFolder) -> dict[tuple[object, ...], float | None]:
    """Return the PSNR of rows of one image, which were computed before images were rounded to bytes."""
    return {
        (*(row[key] for key in ("defence", "attack", "adaptive", "seed", "round", "target")),): row["psnr"]
        for row in audit.rows
        if row["kind"] == "privacy" and row["images"] in (None, 1)
    }
