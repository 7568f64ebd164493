"""Diagnoses of local training: rate, steps, loss, modes of layers, and the weights that it began with."""

import torch
from torch import Tensor

from gradveil.federated.protocol import LocalSettings
from gradveil.runs.evidence import (
    HOLDS,
    Case,
    Diagnosis,
    balances,
    empty_columns,
    one_image,
    scale_blindness,
)


def wrong_sign(case: Case) -> Diagnosis | None:
    """Find gradients that were taken for changes, or differences the wrong way round."""
    bias = case.gradient.get(f"{case.head}.bias")
    known = case.spec.labels
    if bias is None or not bool(bias.any()):
        return None
    if known and isinstance(known[0], int):
        wanted = _prediction(case) - _shares(case, len(bias))
        flipped = float(bias @ wanted) < -0.5 * float(bias.norm() * wanted.norm())
    else:
        flipped = case.images == 1 and len(bias) > 3 and int((bias > 0).sum()) == 1
    if not flipped:
        return None
    return Diagnosis(
        "sign",
        "the last bias moved away from the labels, not towards them",
        'Give the change after minus before (kind = "change"), or the gradient itself (kind = "gradient").',
    )


def label_smoothing(case: Case) -> Diagnosis | None:
    """Find targets that are not one-hot, in the last layer of a single image or on a batch as a whole."""
    found = one_image(case)
    if found is None or found.smoothing is None or found.misfit > 0.05:
        return None
    beyond = found.smoothing - case.how.label_smoothing
    if abs(beyond) < 0.02:
        return None
    return Diagnosis(
        "label smoothing",
        f"the last layer's gradient fits targets that are smoothed by {found.smoothing:.2f}",
        f"State label_smoothing = {max(found.smoothing, 0.0):.2g}.",
    )


def scale(case: Case) -> Diagnosis | None:
    """Find updates that are larger or smaller than the stated rate, steps and loss give, and name the likely reason."""
    factor, exact = _scale(case)
    if factor is None or (0.9 < factor < 1.1 if exact else 0.62 < factor < 1.6) or case.how.clip_norm:
        return None
    name, advice = _reason(case, factor)
    how = "its last layer's own prediction" if exact else "the model's predictions on other images"
    return Diagnosis(name, f"the update is {factor:.3g} times as large as stated, by {how}", advice)


def batch_norm(case: Case) -> Diagnosis | None:
    """Find the mode of BatchNorm: in training mode, gradients before it do not point along the weights."""
    buffers = [name for name in case.sent if name.endswith("running_mean")]
    moved = any(bool(case.sent[name].any()) for name in buffers) and case.spec.kind == "change"
    frozen = case.how.batch_norm == "freeze"
    unstated = case.spec.batch_norm is None and case.spec.local_steps() is None
    if moved and frozen and not unstated:
        return Diagnosis(
            "BatchNorm mode",
            'its running statistics changed, but batch_norm = "freeze" is stated',
            'State batch_norm = "average".',
        )
    along, usual = scale_blindness(case, case.gradient), scale_blindness(case, case.typical)
    if along is None or usual is None or usual < 0.02:
        return None
    trained = along < 0.1 * usual
    if trained == (not frozen) or (frozen and unstated and moved):
        return None
    mode = ("training", "average") if trained else ("evaluation", "freeze")
    return Diagnosis(
        "BatchNorm mode",
        f"gradients before BatchNorm point along the weights by {along:.2g} (in evaluation mode about {usual:.2g}, in "
        f"training mode 0): it was in {mode[0]} mode",
        f'State batch_norm = "{mode[1]}".',
    )


def dropout(case: Case) -> Diagnosis | None:
    """Find inputs of a layer behind Dropout that no image used."""
    on = case.how.dropout == "on" and case.spec.local_steps() is not None
    for name, share, after in case.dropouts:
        key = f"{after}.weight"
        lost = share**case.images
        usual = empty_columns(case.probe_gradient(case.probes[: case.images])[key])
        expected = usual + lost * (1 - usual)
        if case.steps > 1 or expected - usual < 0.05 or (expected - usual) * case.weights[key].shape[1] < 4:
            continue
        found = empty_columns(case.gradient[key], case.rounding(key))
        was_on = found > (usual + expected) / 2
        if was_on != on:
            return Diagnosis(
                "dropout",
                f"{found:.0%} of the inputs of {after} have no gradient, where {usual:.0%} are usual without Dropout "
                f"and {expected:.0%} with {name}: it was {'on' if was_on else 'off'}",
                f'State dropout = "{"on" if was_on else "off"}".',
            )
    return None


def wrong_weights(case: Case) -> Diagnosis | None:
    """Find gradients that do not belong to the weights of the model file."""
    if case.steps != 1:
        return None
    typical = dict(balances(case, case.typical))
    broken = [
        (pair, off) for pair, off in balances(case, case.gradient) if off > 0.02 and typical.get(pair, 1.0) < HOLDS
    ]
    found = one_image(case)
    if broken:
        evidence = f"weights and gradients of {broken[0][0]} must balance, but differ by {broken[0][1]:.0%}"
    elif found is not None and found.misfit > 0.1:
        evidence = f"the last layer's gradient does not fit its own prediction ({found.misfit:.0%} is left)"
    else:
        return None
    return Diagnosis("wrong weights", evidence, "Give the weights that the client received, of the same round.")


@torch.no_grad()
def _scale(case: Case) -> tuple[float | None, bool]:
    """Return how many times larger the update is than stated, and whether that is exact; None if it does not show."""
    found = one_image(case)
    if found is not None:
        return (found.scale if found.misfit < 0.1 else None), True
    bias, known = case.gradient.get(f"{case.head}.bias"), case.spec.labels
    if bias is None:
        return None, False
    if not known or not isinstance(known[0], int):
        excess = float(bias.abs().sum()) / 2
        return (excess if excess > 1.05 else None), False
    wanted = _prediction(case) - _shares(case, len(bias))
    alike = float(bias @ wanted / (bias.norm() * wanted.norm()).clamp_min(1e-30))
    return (float(bias.norm() / wanted.norm()) if alike > 0.8 else None), False


def _reason(case: Case, factor: float) -> tuple[str, str]:
    """Return the likely reason for an update that is ``factor`` times as large as stated, and what to change."""
    per_step = max(case.how.images_per_step(case.images))
    if per_step > 1 and case.how.reduction == "mean" and 0.75 < factor / per_step < 1.33:
        return "loss reduction", f'State reduction = "sum": each step had {per_step} images.'
    if case.steps > 1 and not case.how.momentum and factor > 1:
        plain = sum(case.how.step_weights(case.images))
        for momentum in (0.9, 0.5, 0.8, 0.95, 0.99):
            how = LocalSettings(epochs=case.steps, batch_size=0, momentum=momentum)
            if 0.8 < factor / (sum(how.step_weights(1)) / plain) < 1.25:
                return "momentum", f"State momentum = {momentum:g}, if that was the optimiser's."
    if case.steps > 1 and factor < 1:
        share = round(1 / factor)
        if share > 1 and case.steps % share == 0 and 0.75 < factor * share < 1.33:
            return "accumulation", f"State accumulate = {share}, or fewer epochs: there were fewer steps than stated."
    lr = (case.spec.lr or 1.0) * factor
    return "learning rate", f"State lr = {lr:.2g}, or check the scale of the loss, the steps and the momentum."


def _shares(case: Case, classes: int) -> Tensor:
    """Return the shares of the classes among the stated labels."""
    labels = torch.tensor(case.spec.labels)
    return torch.bincount(labels, minlength=classes).double() / len(labels)


@torch.no_grad()
def _prediction(case: Case) -> Tensor:
    """Return the model's mean prediction on the probe images."""
    found: Tensor = case.network(case.probes).softmax(1).mean(0).double()
    return found
