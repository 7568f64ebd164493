r"""Labels from the gradient of the last layer.

For cross-entropy the gradient by output c of an example is :math:`p_c - [c = y]`, negative only at the label; with
non-negative features its sign reaches the last weights. All functions take a mean gradient over a batch, for many
targets at once: ``weight`` (T, classes, features), and ``bias`` (T, classes) or None.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.errors import ConfigError
from gradveil.networks.watch import watch
from gradveil.threat import Knowledge, Observation


def last_layer(seen: Observation, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return weight (T, num_classes, features) and bias of the last called linear layer with one output per class."""
    called: list[str] = []
    with watch(seen.network, after=lambda call: called.append(call.name)), torch.no_grad():
        seen.network(torch.zeros(1, *seen.shape).to(next(iter(tensors.values()))))
    fitting = [name for name in called if f"{name}.weight" in tensors and _is_head(seen, tensors[f"{name}.weight"])]
    names = fitting or [name.removesuffix(".weight") for name, t in tensors.items() if _is_head(seen, t)]
    if not names:
        raise ConfigError(
            "Label recovery needs a linear layer with one output per class in the update, got none. "
            "Add labels to --knows, or use --attacks dlg, which searches them."
        )
    own = f"{names[-1]}.weight" if f"{names[-1]}.weight" in tensors else names[-1]
    return tensors[own], tensors.get(f"{names[-1]}.bias")


def _is_head(seen: Observation, tensor: Tensor) -> bool:
    return tensor.dim() == 3 and tensor.shape[1] == seen.num_classes


def idlg(weight: Tensor) -> Tensor:
    """Return the label (T,) of a single example: the class whose row has the least sum.

    Reference: Zhao et al. 2020 (iDLG), https://arxiv.org/abs/2001.02610, Eq. 4.
    Fails: for more than one example, and if features can be negative (tanh, no activation), as the sign is lost.
    """
    return weight.sum(2).argmin(1)


def distinct(weight: Tensor, count: int) -> Tensor:
    """Return different labels (T, count), sorted: the classes with the least minimum over features.

    Reference: Yin et al. 2021 (GradInversion), https://arxiv.org/abs/2104.07586, Eq. 6.
    Fails: if a label repeats in a batch, and for negative features; weak on trained networks (p near one-hot).
    """
    classes = weight.shape[1]
    if count > classes:
        raise ConfigError(
            f"Distinct labels must be at most as many as the {classes} classes, got {count}. Use labels=counted."
        )
    return weight.amin(2).topk(count, dim=1, largest=False).indices.sort(1).values


def counted(weight: Tensor, bias: Tensor | None, count: int, prediction: Tensor) -> Tensor:
    r"""Return labels with repetitions, (T, count), sorted: those that best explain the last layer's gradient.

    The bias gradient is :math:`b_c = \bar p_c - n_c / B` with the batch's mean prediction :math:`\bar p`. As
    predictions are not negative, :math:`n_c \ge -B b_c` is certain. For the rest, the attacker uses its own estimate
    ``prediction`` (T, classes) or (classes,), for example the network's mean output on noise, and rounds
    :math:`n_c = B (\bar p_c - b_c)` to integers that sum to B, largest remainders first. Without a bias, row sums
    replace it, scaled so that the negative ones sum to minus the probability mass that they must remove.

    Reference: after Wainakh et al. 2022 (LLG), https://arxiv.org/abs/2105.09369, and Geng et al. 2021.
    Fails: if the prediction on private images differs much from the estimate: on trained networks only the certain
    part is correct, which has each class that occurs at least once.
    """
    evidence = bias if bias is not None else _scaled_rows(weight, prediction)
    evidence = evidence.nan_to_num().clamp(-1, 1)  # cross-entropy gives no larger values
    certain = (-count * evidence - _ROUNDING).ceil().clamp_min(0)
    total = certain.sum(1, keepdim=True)
    certain = torch.where(total > count, (certain * count / total.clamp_min(1)).floor(), certain)
    expected = (count * (prediction - evidence) - certain).clamp_min(0)
    expected = torch.where(expected.sum(1, keepdim=True) > 0, expected, torch.ones_like(expected))
    rest = count - certain.sum(1, keepdim=True)
    shares = expected / expected.sum(1, keepdim=True).clamp_min(1e-12) * rest
    whole = shares.floor()
    missing = (rest - whole.sum(1, keepdim=True)).long()
    order = (shares - whole).argsort(1, descending=True)
    places = torch.arange(order.shape[1], device=order.device)
    rank = torch.empty_like(order).scatter_(1, order, places.expand_as(order))
    whole = certain + whole + (rank < missing)
    return torch.stack([places.repeat_interleave(row.long()) for row in whole])


_ROUNDING = 1e-5


def _scaled_rows(weight: Tensor, prediction: Tensor) -> Tensor:
    rows = weight.sum(2)  # (T, classes): sum over features of f * (p - [y])
    total = rows.clamp_max(0).sum(1, keepdim=True).abs().clamp_min(1e-12)
    return rows / total * (1 - prediction.amax(-1, keepdim=True))


def bias_excess(seen: Observation, gradients: Mapping[str, Tensor]) -> list[float]:
    r"""Return how many times larger each target's last bias gradient is than cross-entropy allows; at most 1 is normal.

    For a mean loss it is :math:`\bar p - n / B`, the difference of two distributions, whose absolute values sum to at
    most 2.
    """
    try:
        weight, bias = last_layer(seen, gradients)
    except ConfigError:
        weight, bias = next(iter(gradients.values())), None
    found: list[float] = [0.0] * len(weight) if bias is None else (bias.abs().sum(1) / 2).tolist()
    return found


def known_or_recovered(seen: Observation) -> Tensor:
    """Return the labels (T, B) to assume: the granted ones, else iDLG's for one example, else counted ones.

    For several local steps the mean gradient is used; its counts are those of all steps together.
    """
    if seen.knows(Knowledge.LABELS):
        return seen.labels
    weight, bias = last_layer(seen, seen.mean_gradients)
    if seen.knows(Knowledge.LOCAL_STEPS) and seen.local_steps.label_smoothing:
        bias = None if bias is None else unsmoothed(bias, likely_prediction(seen), seen.local_steps.label_smoothing)
    if seen.num_examples == 1:  # the bias gradient p - [y] is negative only at the label, for any features
        return (idlg(weight) if bias is None else bias.argmin(1))[:, None]
    return counted(weight, bias, seen.num_examples, likely_prediction(seen))


def unsmoothed(bias: Tensor, prediction: Tensor, share: float) -> Tensor:
    r"""Return the last bias gradient (T, classes) that unsmoothed labels would have given.

    With a share s of each label spread over C classes it is :math:`\bar p - (1 - s) n / B - s / C`.

    Args:
        bias: the gradient seen.
        prediction: the mean prediction, (T, classes) or (classes,).
        share: s.
    """
    return (bias + share / bias.shape[1] - share * prediction) / (1 - share)


def likely_prediction(seen: Observation, points: int = 2) -> Tensor:
    """Return an estimate (T, classes) of the network's mean output on the private images during local training.

    Uses public images if they are granted, else noise. For several local steps it is the mean of the outputs before
    ``points`` of them, from the first to the last, whose weights are interpolated.
    """
    if seen.knows(Knowledge.PUBLIC_DATA):
        images = seen.public_data.images[:256]
    else:
        images = torch.rand(64, *seen.shape, generator=torch.Generator().manual_seed(0))
    images = images.to(next(iter(seen.updates.values())))

    @torch.no_grad()
    def output(weights: dict[str, Tensor]) -> Tensor:
        logits: Tensor = torch.func.functional_call(seen.network, weights, (images,))
        return logits.softmax(1).mean(0)

    first = output({}).expand(seen.num_targets, -1)
    if seen.single_step:
        return first
    steps = seen.local_steps.num_steps(seen.num_examples)
    start = {name: p.detach() for name, p in seen.network.named_parameters() if name in seen.updates}
    shares = [(steps - 1) / steps * point / (points - 1) for point in range(1, points)]
    later = [
        [
            output({name: weight + share * seen.updates[name][target] for name, weight in start.items()})
            for target in range(seen.num_targets)
        ]
        for share in shares
    ]
    return (first + sum(torch.stack(each) for each in later)) / points
