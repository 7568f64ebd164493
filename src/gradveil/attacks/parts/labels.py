r"""Labels from the gradient of the last layer.

For cross-entropy the gradient by output c of an example is :math:`p_c - [c = y]`, negative only at the label; with
non-negative features its sign reaches the last weights. All functions take a mean gradient over a batch, for many
targets at once: ``weight`` (T, classes, features), and ``bias`` (T, classes) where the layer has one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.errors import ConfigError
from gradveil.networks.watch import watch
from gradveil.threat import Knowledge, Observation


def last_layer(seen: Observation, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Weight (T, num_classes, features) and bias of the linear layer with one output a class that is called last."""
    called: list[str] = []
    with watch(seen.network, after=lambda call: called.append(call.name)), torch.no_grad():
        seen.network(torch.zeros(1, *seen.shape).to(next(iter(tensors.values()))))
    fitting = [name for name in called if f"{name}.weight" in tensors and _is_head(seen, tensors[f"{name}.weight"])]
    names = fitting or [name.removesuffix(".weight") for name, t in tensors.items() if _is_head(seen, t)]
    if not names:
        raise ConfigError(
            "Label recovery needs a linear layer with one output a class in the update, got none. "
            "Give the labels, or use dlg, which searches them."
        )
    own = f"{names[-1]}.weight" if f"{names[-1]}.weight" in tensors else names[-1]
    return tensors[own], tensors.get(f"{names[-1]}.bias")


def _is_head(seen: Observation, tensor: Tensor) -> bool:
    return tensor.dim() == 3 and tensor.shape[1] == seen.num_classes


def idlg(weight: Tensor) -> Tensor:
    """The label of a single example: the class whose row sum is least (T,).

    Reference: Zhao et al. 2020 (iDLG), https://arxiv.org/abs/2001.02610, Eq. 4.
    Fails: for more than one example, and where features can be negative (tanh, no activation), as the sign is lost.
    """
    return weight.sum(2).argmin(1)


def distinct(weight: Tensor, count: int) -> Tensor:
    """``count`` labels, all different: the classes with the least minimum over features, (T, count), sorted.

    Reference: Yin et al. 2021 (GradInversion), https://arxiv.org/abs/2104.07586, Eq. 6.
    Fails: where a label repeats in a batch, and for negative features; weak on trained networks (p near one-hot).
    """
    classes = weight.shape[1]
    if count > classes:
        raise ConfigError(
            f"distinct labels can't be more than the {classes} classes, got {count} examples. Use counts."
        )
    return weight.amin(2).topk(count, dim=1, largest=False).indices.sort(1).values


def counted(weight: Tensor, bias: Tensor | None, count: int, prediction: Tensor) -> Tensor:
    r"""``count`` labels with repetitions, (T, count), sorted: the counts that explain the last layer's gradient best.

    The bias gradient is :math:`b_c = \bar p_c - n_c / B` with the batch's mean prediction. As none is negative,
    :math:`n_c \ge -B b_c` for certain. For the rest the attacker puts its own estimate ``prediction`` (T, classes) or
    (classes,), e.g. the network's mean output on noise, and rounds :math:`n_c = B (\bar p_c - b_c)` to integers that
    add up to B, largest remainders first. Without a bias, row sums serve in its place, scaled so that the negative ones
    add up to minus the probability mass they must remove.

    Reference: after Wainakh et al. 2022 (LLG), https://arxiv.org/abs/2105.09369, and Geng et al. 2021.
    Fails: where the prediction on private images differs much from the estimate: on trained networks only the certain
    part is left, each class that is there at least once.
    """
    evidence = bias if bias is not None else _scaled_rows(weight, prediction)
    evidence = evidence.nan_to_num().clamp(-1, 1)  # more is not of cross-entropy
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
    r"""How much larger each target's last bias gradient is than cross-entropy can make it; up to 1 all is well.

    Of a mean loss it is :math:`\bar p - n / B`, two distributions apart, so its absolute values add up to at most 2.
    """
    try:
        weight, bias = last_layer(seen, gradients)
    except ConfigError:
        weight, bias = next(iter(gradients.values())), None
    found: list[float] = [0.0] * len(weight) if bias is None else (bias.abs().sum(1) / 2).tolist()
    return found


def known_or_recovered(seen: Observation) -> Tensor:
    """The labels (T, B) that an attacker goes by: those granted, else iDLG's for one example, else counted ones.

    Of several local steps the mean gradient is taken; its counts are those of all steps together.
    """
    if seen.knows(Knowledge.LABELS):
        return seen.labels
    weight, bias = last_layer(seen, seen.mean_gradients)
    if seen.num_examples == 1:  # the bias gradient is p - [y], negative at the label alone whatever the features are
        return (idlg(weight) if bias is None else bias.argmin(1))[:, None]
    return counted(weight, bias, seen.num_examples, likely_prediction(seen))


def likely_prediction(seen: Observation) -> Tensor:
    """An attacker's estimate (T, classes) of the network's mean output on the private images during local training.

    On public images where they are granted, else on noise; the mean of the output before the first step and before the
    last, whose weights lie about where the last but one came back.
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
    last = [
        output({name: weight + (steps - 1) / steps * seen.updates[name][target] for name, weight in start.items()})
        for target in range(seen.num_targets)
    ]
    return (first + torch.stack(last)) / 2
