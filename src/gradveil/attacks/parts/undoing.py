r"""Undo what a known defence did to the gradient of one Linear layer, for attacks that read images off it.

An attacker who knows the defence knows that the layer's gradient, its bias as one more column, has at most as many
independent rows as there are images: :math:`[G\ g_b] = \sum_j \delta_j [x_j^T\ 1]`.

- Entries that the defence removed or replaced (prune, entangle) follow from the others (`completion`).
- Noise spreads over all directions, the images over few: the nearest matrix of that rank is the likeliest one.
- The part of a concealed sample (dcs2) is separated by linear algebra (`separation`).

What only scales the update (clip) cancels in a quotient of gradients. Other countermoves change how guesses are
compared in a search, of which an analytic attack makes none. The row then says so.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradveil.attacks.parts.analytic import Rows, rows_of
from gradveil.attacks.parts.countermoves import countermoves
from gradveil.attacks.parts.matrix_completion import completed
from gradveil.attacks.parts.separation import told_apart
from gradveil.defences.countermove import Countermove
from gradveil.threat import Observation, Reconstruction

COMPLETED, LOW_RANK, SEPARATED = "completed", "low rank", "separated"
NOTHING = "scales or weighs gradients for a search, and changes no quotient of them"
CUT_ANYWAY = "adds nothing: the number of images limits noise and rounding in any case, and a scale cancels"
FITS = 1e-3
"""A completed matrix counts if it misses the known entries by at most this share."""
MOST_IMAGES = 16
"""Largest number of images whose matrix is completed; more take minutes, and rarely enough entries are left."""


class Undone(NamedTuple):
    """Changes of a layer as the attacker takes them.

    Attributes:
        rows: the changes.
        answers: (T) what was done about the defence, or "".
        notes: (T) why nothing could be done, or "".
    """

    rows: Rows
    answers: tuple[str, ...]
    notes: tuple[str, ...]

    def told(self, found: Reconstruction) -> Reconstruction:
        """Return a result with what was done in ``answers``, and why nothing was in ``why``."""
        if not any(self.answers) and not any(self.notes):
            return found
        whys = zip(found.why or ("",) * len(self.notes), self.notes, strict=True)
        return replace(found, answers=self.answers, why=tuple("; ".join(filter(None, both)) for both in whys))


def undone_rows(seen: Observation, name: str, images: int | None = None, *, truncates: bool = False) -> Undone:
    """Return the changes of a layer with what the known defence did undone; as they are if it is not known.

    Args:
        seen: what the server saw.
        name: of the layer, a Linear with bias.
        images: the number of images behind an update, or None if it is not known.
        truncates: whether the attack itself takes the nearest matrix of that rank, and judges noise by the rest.
    """
    rows, nobody = rows_of(seen, name), ("",) * seen.num_targets
    moves = countermoves(seen)
    if not moves or any(each.decode for each in moves.values()):  # decoders follow, and tell their own part
        return Undone(rows, nobody, nobody)
    useful = [each for each in moves.values() if each.separate or each.zeroes or (each.noise and not truncates)]
    if not useful or images is None:
        why = (CUT_ANYWAY if truncates else NOTHING) if not useful else "helps only if the number of images is known"
        note = f"as the plain attack: knowing {seen.defence.name} {why}"
        return Undone(rows, nobody, (note,) * seen.num_targets)
    move = useful[0]
    if move.separate:
        return _separated(seen, name, rows, move)
    return _cleaned(seen, name, rows, move, images)


def completed_weight(seen: Observation, name: str, images: int | None) -> Tensor | None:
    """Return the change (T, m, D) of a weight, with entries completed that a known defence removed.

    Where that is not possible, it is as it was sent. None if the weight was not sent.
    """
    if name not in seen.updates:
        return None
    sent = seen.updates[name].double().cpu()
    move = next((each for each in countermoves(seen).values() if each.zeroes), None)
    if move is None or images is None:
        return sent
    known = (seen.updates if move.look is None else move.look(seen.mean_gradients))[name] != 0
    filled = [_filled(*pair, images)[0] for pair in zip(sent, known.cpu(), strict=True)]
    return torch.stack([one if whole is None else whole for one, whole in zip(sent, filled, strict=True)])


def concealed(seen: Observation) -> float:
    """Return the number of concealed samples per image that a known defence adds, or 0."""
    return max((move.decoys for move in countermoves(seen).values()), default=0.0)


def _separated(seen: Observation, name: str, rows: Rows, move: Countermove) -> Undone:
    """Replace the changes of each target by those of its private image alone, if they could be separated."""
    gradients = seen.mean_gradients if move.look is None else move.look(seen.mean_gradients)
    weights, biases, answers, notes = list(rows.weight), list(rows.bias), list[str](), list[str]()
    keys = (f"{name}.weight", f"{name}.bias")
    told = told_apart(seen, gradients, move.own_label, spares=move.decoys < 1, gaps=move.zeroes)
    for target, own in enumerate(told):
        there = own is not None and all(key in own.own and key not in own.project for key in keys)
        if own is not None and there:
            length = -sum(seen.step_lengths)
            weights[target], biases[target] = (length * own.own[key].double().cpu() for key in keys)
        answers.append(SEPARATED if there else "")
        notes.append("" if there else "as the plain attack: the concealed sample's part could not be separated here")
    return Undone(Rows(torch.stack(weights), torch.stack(biases)), tuple(answers), tuple(notes))


def _cleaned(seen: Observation, name: str, rows: Rows, move: Countermove, images: int) -> Undone:
    """Replace the changes of each target by the nearest ones that the given number of images can cause."""
    keys = (f"{name}.weight", f"{name}.bias")
    look = None if move.look is None else move.look(seen.mean_gradients)
    known = [seen.updates[key] != 0 if look is None else look[key] != 0 for key in keys]
    there = torch.cat([known[0], known[1][..., None]], 2).cpu()  # (T, rows, D + 1)
    both = torch.cat([rows.weight, rows.bias[..., None]], 2)
    noise = [move.noise.get(key, 0.0) for key in keys]
    found, answers, notes = [], list[str](), list[str]()
    for matrix, mask in zip(both, there, strict=True):
        if move.zeroes:
            clean, note = _filled(matrix, mask, images)
        else:
            clean, note = _nearest(matrix, noise, images)
        found.append(matrix if clean is None else clean)
        answers.append("" if clean is None else COMPLETED if move.zeroes else LOW_RANK)
        notes.append("" if clean is not None else f"as the plain attack: {note}")
    whole = torch.stack(found)
    return Undone(Rows(whole[..., :-1], whole[..., -1]), tuple(answers), tuple(notes))


def _filled(matrix: Tensor, known: Tensor, images: int) -> tuple[Tensor | None, str]:
    """Return a matrix with its unknown entries completed and zeros elsewhere, or why that is not possible.

    Known entries stay as they are, so that what the completion leaves of them shows their precision.
    """
    if images > MOST_IMAGES:
        return None, f"removed entries are completed for at most {MOST_IMAGES} images, got {images}"
    part = completed(matrix, known, images)
    if part is None or part.misfit > FITS:
        return None, "too few entries are left to complete the others"
    clean = torch.zeros_like(matrix)
    clean[part.rows[:, None], part.columns] = part.values
    clean = torch.where(known & (clean != 0), matrix, clean)
    return clean, ""


def _nearest(matrix: Tensor, noise: list[float], images: int) -> tuple[Tensor | None, str]:
    """Return the nearest matrix of the rank of ``images``, in units of the noise of weight and bias."""
    if not all(noise) or images >= min(matrix.shape):
        return None, "the layer has too few rows, for this number of images, to tell them from noise"
    scale = torch.ones(matrix.shape[1], dtype=matrix.dtype)
    scale[-1] = noise[0] / noise[1]
    left, sizes, right = torch.linalg.svd(matrix * scale, full_matrices=False)
    return (left[:, :images] * sizes[:images]) @ right[:images] / scale, ""


def undone_gradients(seen: Observation, last: str) -> tuple[dict[str, Tensor], str, str]:
    """Return the gradients of single images with what the known defence did undone, in double precision.

    Entries that stay unknown are NaN; those of the last layer are completed. The last layer's gradient also gives its
    input whatever the scale, and the input the true scale: that undoes clipping.

    Args:
        seen: what the server saw.
        last: name of the last layer, a Linear.

    Returns:
        The gradients (T, ...) by name; what was done, or ""; why nothing was done, or "".
    """
    plain = {name: tensor.double().cpu() for name, tensor in seen.gradients.items()}
    moves = countermoves(seen)
    if not moves:
        return plain, "", ""
    move = next((each for each in moves.values() if each.separate or each.zeroes), None)
    if move is not None and move.separate:
        return _own_gradients(seen, plain, move)
    if move is not None and move.zeroes:
        return _with_gaps(seen, plain, move, last)
    if not any(each.noise or each.unknowns or each.outputs or each.decode for each in moves.values()):
        scaled = _rescaled(seen, plain, last)
        if scaled is not None:
            return scaled, "scale undone", ""
    return plain, "", f"as the plain attack: knowing {seen.defence.name} changes no equation"


def _own_gradients(
    seen: Observation, plain: dict[str, Tensor], move: Countermove
) -> tuple[dict[str, Tensor], str, str]:
    """Return the private images' own gradients, NaN where they could not be separated."""
    gradients = seen.mean_gradients if move.look is None else move.look(seen.mean_gradients)
    told = told_apart(seen, gradients, move.own_label, spares=move.decoys < 1, gaps=move.zeroes)
    if any(own is None for own in told):
        return plain, "", "as the plain attack: the concealed sample's part could not be separated here"
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in plain.items()}
    for target, own in enumerate(told):
        for name, tensor in own.own.items() if own is not None else ():
            if own is not None and name not in own.project:
                found[name][target] = tensor
    return found, SEPARATED, ""


def _with_gaps(
    seen: Observation, plain: dict[str, Tensor], move: Countermove, last: str
) -> tuple[dict[str, Tensor], str, str]:
    """Return the gradients with NaN at removed entries, except for the last layer's, which are completed."""
    look = seen.mean_gradients if move.look is None else move.look(seen.mean_gradients)
    found = {name: torch.where((look[name] != 0).cpu(), tensor, torch.nan) for name, tensor in plain.items()}
    keys = f"{last}.weight", f"{last}.bias"
    if not set(keys) <= plain.keys():
        return plain, "", "as the plain attack: without a bias the last layer can't be completed"
    both = torch.cat([plain[keys[0]], plain[keys[1]][..., None]], 2)
    known = torch.cat([found[keys[0]], found[keys[1]][..., None]], 2).isfinite()
    parts = [_filled(*pair, 1)[0] for pair in zip(both, known, strict=True)]
    if any(part is None for part in parts):
        return plain, "", "as the plain attack: too few entries of the last layer are left to complete the others"
    whole = torch.stack([part for part in parts if part is not None])
    return {**found, keys[0]: whole[..., :-1], keys[1]: whole[..., -1]}, COMPLETED, ""


def _rescaled(seen: Observation, plain: dict[str, Tensor], last: str) -> dict[str, Tensor] | None:
    """Return the gradients times the factor that makes the last layer's agree with softmax, or None without a bias."""
    keys = f"{last}.weight", f"{last}.bias"
    if not set(keys) <= plain.keys():
        return None
    layer = seen.network.get_submodule(last)
    weight, bias = (layer.get_parameter(key).detach().double().cpu() for key in ("weight", "bias"))
    error = plain[keys[1]]  # (T, classes)
    inputs = torch.einsum("tcf,tc->tf", plain[keys[0]], error) / error.square().sum(1, keepdim=True)
    label = torch.nn.functional.one_hot(error.argmin(1), error.shape[1])
    true = (inputs @ weight.T + bias).softmax(1) - label
    factors = true.norm(dim=1) / error.norm(dim=1)
    return {name: tensor * factors.view(-1, *[1] * (tensor.dim() - 1)) for name, tensor in plain.items()}
