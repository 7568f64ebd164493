"""The diagnosis of normalisation: what the first layer's gradient says of the range of its input."""

import math

import torch
from torch import Tensor, nn

from gradveil.models import create_model
from gradveil.models.base import parse_normalisation
from gradveil.runs.evidence import Case, Diagnosis


def normalisation(case: Case) -> Diagnosis | None:
    """Find inputs that can't be images with the stated normalisation, by the gradient of the first layer."""
    first = case.weighted[0] if case.weighted else None
    if first is None or case.images != 1 or case.steps != 1 or f"{first.name}.bias" not in case.gradient:
        return None
    if isinstance(first.layer, nn.Linear):
        return _linear_input(case, first.name)
    return _convolved_input(case, first.name) if isinstance(first.layer, nn.Conv2d) else None


def _linear_input(case: Case, name: str) -> Diagnosis | None:
    """Compare the input that the first layer's gradient gives with the range of normalised images."""
    weight, bias = case.gradient[f"{name}.weight"], case.gradient[f"{name}.bias"]
    inputs = (bias @ weight / bias.square().sum().clamp_min(1e-300)).view(case.spec.shape)
    stated, pixels = parse_normalisation(case.spec.normalise, case.spec.shape[0]), inputs
    if stated is not None:
        pixels = inputs * torch.tensor(stated.std).view(-1, 1, 1) + torch.tensor(stated.mean).view(-1, 1, 1)
    outside = float(((pixels < -0.01) | (pixels > 1.01)).double().mean())
    black = float((inputs.abs() < 1e-6).double().mean())  # exactly 0, which normalisation moves elsewhere
    if outside < 0.02 and (stated is None or black < 0.05):
        return None
    if outside < 0.02:
        return _normalise(f"{black:.0%} of the inputs are exactly 0, as black pixels are before normalisation")
    return _normalise(f"the input has values from {float(pixels.min()):.2g} to {float(pixels.max()):.2g} once undone")


def _convolved_input(case: Case, name: str) -> Diagnosis | None:
    """Compare the first layer's gradient with those of probe images under the stated and under other normalisations."""
    seen = _first_layer(case.gradient, name)
    stated = _distance(seen, _first_layers(case, case.network, name))
    others = {}
    channels, height, width = case.spec.shape
    mean, std = case.probes.mean((0, 2, 3)).tolist(), case.probes.std((0, 2, 3)).clamp_min(0.05).tolist()
    texts = {"none", "0.5/0.5", "/".join(",".join(f"{x:.2g}" for x in xs) for xs in (mean, std))}
    texts |= {"imagenet"} if channels == 3 else set()
    for text in sorted(texts - {case.spec.normalise}):
        stated_as = parse_normalisation(text, channels)
        network = create_model(case.spec.model, (channels, height, width), case.spec.num_classes, 0, stated_as)
        network.load_state_dict(case.network.state_dict())
        others[text] = _distance(seen, _first_layers(case, network.eval(), name))
    best = min(others, key=lambda text: others[text])
    if stated < 3.5 or others[best] > 0.5 * stated:
        return None
    return _normalise(
        f"the first layer's gradient is {stated:.1f} standard deviations from what images give as stated, and "
        f'{others[best]:.1f} with normalise = "{best}"'
    )


def _normalise(evidence: str) -> Diagnosis:
    advice = 'State normalise = "mean/std" as the clients\' data loader has it ("none" if it has none).'
    return Diagnosis("normalisation", evidence, advice)


def _first_layers(case: Case, network: nn.Module, name: str) -> Tensor:
    """Return `_first_layer` for each probe image, (images, figures)."""
    other = Case(network, case.sent, case.spec, case.probes)
    return torch.stack([_first_layer(other.probe_gradient(image[None]), name) for image in case.probes])


def _first_layer(gradient: dict[str, Tensor], name: str) -> Tensor:
    """Return figures of the first layer's gradient that depend on the range of its input."""
    weight, bias = gradient[f"{name}.weight"].flatten(1), gradient[f"{name}.bias"]
    mean = float((weight.mean(1) * bias).sum() / bias.square().sum().clamp_min(1e-30))
    size = weight.norm() / math.sqrt(weight.shape[1]) / bias.norm().clamp_min(1e-30)
    rest = math.sqrt(sum(float(t.square().sum()) for key, t in gradient.items() if not key.startswith(f"{name}.")))
    share = float(weight.norm()) / max(rest, 1e-30)
    return torch.tensor([math.asinh(mean), math.log(max(float(size), 1e-30)), math.log(max(share, 1e-30))])


def _distance(figures: Tensor, others: Tensor) -> float:
    """Return the largest distance of a figure from those of the probes, in standard deviations."""
    return float(((figures - others.mean(0)).abs() / others.std(0).clamp_min(0.1)).max())
