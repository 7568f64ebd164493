"""Diagnoses of an update's values: what was sent is no plain change of the weights by gradients of cross-entropy."""

import math

import torch

from gradveil.runs.evidence import (
    HOLDS,
    Case,
    Diagnosis,
    joined,
    relative_residual,
    scattered_zeros,
    softmax_residual,
)

TINY = 1e-4
"""A gradient below this share of a typical one is near zero."""


def not_finite(case: Case) -> Diagnosis | None:
    """Find NaN and infinity."""
    bad = [name for name, tensor in case.gradient.items() if not bool(tensor.isfinite().all())]
    if not bad:
        return None
    return Diagnosis("not finite", f"{bad[0]} holds NaN or infinity", "Check the training: there is nothing to match.")


def near_zero(case: Case) -> Diagnosis | None:
    """Find updates that are too small to hold anything but rounding."""
    size, usual = float(case.flat.norm()), float(joined(case.typical).norm())
    if size > TINY * usual:
        return None
    return Diagnosis(
        "near-zero gradient",
        f"its norm is {size:.3g}, that of an image that the model does not know {usual:.3g}",
        "The model has learned these images, or nothing was trained: take an update from an earlier round.",
    )


def whole_weights(case: Case) -> Diagnosis | None:
    """Find weights that were sent in place of their change, and changes that are taken for weights."""
    sent, weights = joined(case.change), joined(case.weights)
    alike = float(sent @ weights / (sent.norm() * weights.norm()).clamp_min(1e-30))
    if case.spec.kind == "weights" and alike < -0.9:
        return Diagnosis(
            "not whole weights",
            f"the weights would have shrunk to almost nothing (cosine {alike:.3f})",
            'State kind = "change" if the file holds weights after minus before, or give the weights after training.',
        )
    if case.spec.kind != "change" or alike < 0.9:
        return None
    return Diagnosis(
        "whole weights",
        f"the update has the direction of the model's weights (cosine {alike:.3f})",
        'State kind = "weights": the file then holds the weights after training.',
    )


def adam(case: Case) -> Diagnosis | None:
    """Find steps of equal length, which only Adam makes; and their absence where Adam is stated."""
    if case.spec.kind == "gradient":
        return None
    sizes = joined(case.change).abs()
    sizes = sizes[sizes > 0] / ((case.spec.lr or 1.0) * case.steps)
    if not len(sizes):
        return None
    middle, top = (float(sizes.kthvalue(max(1, int(share * len(sizes)))).values) for share in (0.5, 0.99))
    equal = 0.3 < top < 1.3 and (middle > 0.5 if case.steps == 1 else middle > 0.08)
    if equal and not case.how.is_adam:
        return Diagnosis(
            "Adam",
            f"half of all weights moved by at least {middle:.3g} and 99 % by at most {top:.3g} rates per step; "
            "gradients are never that even",
            'State optimiser = "adam" (or "adamw", with its weight_decay).',
        )
    if case.how.is_adam and not equal:
        return Diagnosis(
            "not Adam",
            f"half of all weights moved by at most {middle:.3g} rates per step, where Adam moves them by about 1",
            f'State the optimiser that was used: now it is "{case.how.optimiser}".',
        )
    return None


def weight_decay(case: Case) -> Diagnosis | None:
    """Find a part of the gradient that is a multiple of the weights, where softmax leaves nothing."""
    left, weights = softmax_residual(case, case.gradient), softmax_residual(case, case.weights)
    rest = relative_residual(case)
    if left is None or weights is None or rest is None or rest < HOLDS:
        return None
    rate = float(left @ weights / weights.square().sum().clamp_min(1e-30))
    if float((left - rate * weights).norm()) > 0.3 * float(left.norm()):
        return None
    found = rate + (0.0 if case.spec.kind == "gradient" else case.how.weight_decay)
    return Diagnosis(
        "weight decay",
        f"the last layer's gradient holds {rate:.3g} times its weights beyond what is stated",
        f"State weight_decay = {max(found, 0.0):.2g}.",
    )


def pruned(case: Case) -> Diagnosis | None:
    """Find zeros that are scattered, not in whole rows or columns as those of dead units are.

    Several images leave scattered zeros too, where no image has both the row and the column on (ReLU, dark pixels); not
    in the last layer, all of whose rows every image has on.
    """
    large = [name for name, t in case.gradient.items() if t.dim() > 1 and t.numel() >= 64]
    tables = [name for name in large if case.gradient[name].dim() == 2] or large  # dark images leave convolutions zeros
    if case.spec.num_examples != 1 or case.steps > 1:
        tables = [name for name in tables if name == f"{case.head}.weight"]
    whole = sum(case.gradient[name].numel() for name in tables)
    share = sum(scattered_zeros(t) * t.numel() for t in map(case.gradient.__getitem__, tables)) / max(whole, 1)
    if share < 0.05:
        return None
    zeros = sum(float((case.gradient[name] == 0).sum()) for name in tables) / whole
    usual = sum(float((case.typical[name] == 0).sum()) for name in tables) / whole
    return Diagnosis(
        "pruned",
        f"{zeros:.0%} of the entries are exactly zero (usual are {usual:.0%}), scattered over rows and columns that "
        "are not",
        f'State the defence: defence = "prune:fraction={zeros:.2g}".',
    )


def quantised(case: Case) -> Diagnosis | None:
    """Find tensors that have few different values, or that fit into half precision."""
    large = [t for t in case.sent.values() if t.is_floating_point() and t.numel() >= 256 and bool(t.any())]
    if not large or case.how.is_adam:  # the weights' own precision leaves few different steps of one length
        return None
    counts = [len(torch.unique(t)) for t in large]
    few = [count for t, count in zip(large, counts, strict=True) if count <= min(1025, t.numel() // 2)]
    if len(few) == len(large):
        bits = math.log2(max(few))
        return Diagnosis(
            "quantised",
            f"tensors have at most {max(few)} different values (about {bits:.1f} bits)",
            f'State the defence: defence = "quantise:bits={max(1, round(bits))}", or send unrounded updates.',
        )
    for kind in (torch.float16, torch.bfloat16):
        if all(t.dtype == kind or bool((t.to(kind).to(t.dtype) == t).all()) for t in large):
            name = str(kind).removeprefix("torch.")
            return Diagnosis(
                "quantised", f"all entries are numbers of {name}", "Send updates in single precision, if you can."
            )
    return None


def clipped(case: Case) -> Diagnosis | None:
    """Find a norm that is a round number, or many entries at one largest value."""
    flat = case.flat.abs()
    top = float(flat.max())
    same = int((flat > top * (1 - 1e-6)).sum())
    if same > max(10, 0.002 * len(flat)):
        return Diagnosis(
            "clipped",
            f"{same} entries have the largest size, {top:.3g}",
            "Clipping by value can't be replayed: clip by norm, or record without.",
        )
    norm = float(case.flat.norm()) * (sum(case.how.step_scales(case.images)) if case.steps == 1 else math.nan)
    step = 10.0 ** math.floor(math.log10(norm)) / 2 if norm > 0 and math.isfinite(norm) else math.nan
    near = round(norm / step) * step if math.isfinite(step) else math.nan
    if not abs(norm / near - 1) < 1e-4 or abs(case.how.clip_norm / near - 1) < 1e-3:
        return None
    return Diagnosis(
        "clipped",
        f"the norm of the gradient is {norm:.6g}, a round number",
        f'State clip_norm = {near:g} (kind = "change"), or that the scale of the gradient is not known.',
    )


def noisy(case: Case) -> Diagnosis | None:
    """Measure noise where softmax leaves nothing."""
    left, rest = softmax_residual(case, case.gradient), relative_residual(case)
    if left is None or rest is None or rest < HOLDS:
        return None
    std = float(left.square().mean().sqrt()) / math.sqrt(case.spec.num_classes)
    whole = float(case.flat.square().mean().sqrt())
    signal = math.sqrt(max(whole**2 - std**2, 0.0)) / std
    return Diagnosis(
        "noisy",
        f"the rows of the last layer's gradient do not cancel: noise of standard deviation {std:.3g} per entry of the "
        f"gradient, signal to noise {signal:.2g}",
        f'State the defence, for example defence = "gaussian:std={std:.2g}", and expect less detail.',
    )
