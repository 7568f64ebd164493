"""Say in words why an inversion of saved updates would fail, and what to change: ``gradveil diagnose``."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from gradveil.runs.diagnoses_of_inputs import normalisation
from gradveil.runs.diagnoses_of_training import (
    batch_norm,
    dropout,
    label_smoothing,
    scale,
    wrong_sign,
    wrong_weights,
)
from gradveil.runs.diagnoses_of_values import (
    adam,
    clipped,
    near_zero,
    noisy,
    not_finite,
    pruned,
    quantised,
    weight_decay,
    whole_weights,
)
from gradveil.runs.evidence import PROBES, Case, Diagnosis
from gradveil.runs.inputs import load_network, public_images, read_sent
from gradveil.runs.update_spec import UpdateSpec
from gradveil.types import Tensors

BEFORE = 3
"""The first diagnoses are tried for defended updates too; the next one is that of Adam."""
DIAGNOSES: tuple[tuple[Callable[[Case], Diagnosis | None], frozenset[str]], ...] = (
    (not_finite, frozenset()),
    (near_zero, frozenset({"not finite"})),
    (whole_weights, frozenset({"not finite", "near-zero gradient"})),
    (adam, frozenset({"not finite", "near-zero gradient", "whole weights"})),
    (quantised, frozenset({"not finite", "near-zero gradient", "whole weights", "Adam"})),
    (pruned, frozenset({"not finite", "near-zero gradient", "whole weights"})),
    (wrong_sign, frozenset({"not finite", "near-zero gradient", "whole weights"})),
    (weight_decay, frozenset({"not finite", "near-zero gradient", "whole weights", "Adam", "quantised", "pruned"})),
    (clipped, frozenset({"not finite", "near-zero gradient", "whole weights", "Adam", "quantised"})),
    (noisy, frozenset({"not finite", "near-zero gradient", "whole weights", "Adam", "quantised", "pruned",
                       "weight decay", "clipped"})),
    (batch_norm, frozenset({"not finite", "near-zero gradient", "whole weights", "Adam", "noisy", "pruned",
                            "weight decay"})),
    (dropout, frozenset({"not finite", "near-zero gradient", "whole weights", "noisy", "pruned", "weight decay"})),
    (wrong_weights, frozenset({"not finite", "near-zero gradient", "whole weights", "Adam", "noisy", "pruned",
                               "weight decay", "quantised", "clipped", "BatchNorm mode"})),
    (label_smoothing, frozenset({"not finite", "near-zero gradient", "whole weights", "Adam", "noisy", "pruned",
                                 "weight decay", "quantised", "wrong weights", "clipped", "sign"})),
    (scale, frozenset({"not finite", "near-zero gradient", "whole weights", "Adam", "noisy", "pruned", "clipped",
                       "wrong weights", "sign"})),
    (normalisation, frozenset({"not finite", "near-zero gradient", "whole weights", "Adam", "noisy", "pruned",
                               "wrong weights"})),
)  # fmt: skip
"""All diagnoses in the order in which they are tried; each is left out if one of the names beside it was found, because
that would upset its evidence."""


def parameters(network: nn.Module, sent: Tensors) -> Diagnosis | None:
    """Find tensors that are missing, unknown or of another shape."""
    wanted = {name: p for name, p in network.named_parameters() if p.requires_grad}
    known = {**dict(network.named_parameters(remove_duplicate=False)), **dict(network.named_buffers())}
    missing, extra = sorted(set(wanted) - set(sent)), sorted(set(sent) - set(known))
    shapes = [name for name in wanted if name in sent and sent[name].shape != wanted[name].shape]
    found = [f"{kind} {_some(names)}" for kind, names in
             (("missing", missing), ("unknown", extra), ("of another shape", shapes)) if names]  # fmt: skip
    if not found:
        return None
    return Diagnosis(
        "parameters", "; ".join(found), "Save all trained parameters by their names in the model, and no others."
    )


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def diagnose(network: nn.Module, sent: Tensors, spec: UpdateSpec, probes: Tensor | None = None) -> list[Diagnosis]:
    """Return what is wrong with one client's update, as far as it shows without the private images.

    Args:
        network: the model with the broadcast weights and the stated normalisation.
        sent: the client's tensors by name.
        spec: what is stated about them.
        probes: public images (N, C, H, W) in [0, 1]; by default smooth random ones.
    """
    names = parameters(network, sent)
    if names is not None:
        return [names]
    images = smooth(spec.shape) if probes is None else probes[:PROBES].float().cpu()
    case = Case(network.eval(), sent, spec, images)
    table = DIAGNOSES
    if spec.defence not in ("", "none"):  # the defence itself changes what the others look at
        table = DIAGNOSES[:BEFORE]
    elif case.how.is_adam:  # the gradient behind its steps is not known
        table = DIAGNOSES[: BEFORE + 1]
    found: dict[str, Diagnosis] = {}
    for function, unless in table:
        result = None if unless & set(found) else function(case)
        if result is not None:
            found[result.name] = result
        if "not whole weights" in found:  # no figure of such a change means anything
            break
    return list(found.values())


def smooth(shape: Sequence[int], count: int = PROBES) -> Tensor:
    """Return random images (N, C, H, W) in [0, 1] that vary smoothly, as pictures do; always the same ones."""
    channels, height, width = shape
    rng = torch.Generator().manual_seed(0)
    coarse = [torch.rand(count, channels, size, size, generator=rng) for size in (2, 4, 8)]
    grown = [nn.functional.interpolate(c, (height, width), mode="bilinear", align_corners=False) for c in coarse]
    images = sum(grown[1:], grown[0]) + 0.1 * torch.rand(count, channels, height, width, generator=rng)
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    bright = 0.5 + torch.rand(count, 1, 1, 1, generator=rng)
    return ((images - low) / (high - low)).pow(bright)


def diagnose_files(model_file: Path, updates: Sequence[Path], spec: UpdateSpec) -> list[list[Diagnosis]]:
    """Return the diagnoses of each update in files, as ``gradveil diagnose`` does.

    Raises:
        ConfigError: a file can't be read, or the model is not that of the specification.
    """
    spec = spec.resolved()
    network, _ = load_network(spec, model_file, torch.device("cpu"))
    channels, height, width = spec.shape
    public = (
        public_images(spec.public_data, (channels, height, width), torch.device("cpu")) if spec.public_data else None
    )
    probes = None if public is None else public.images
    return [diagnose(network, read_sent(path, network, spec), spec, probes) for path in updates]
