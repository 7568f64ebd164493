"""A check of one's own model on one's own data: a short audit under one defence, and a verdict."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.audits.run import AuditResult
from gradveil.audits.run import audit as run_audit
from gradveil.audits.settings import make_audit_settings
from gradveil.data import Dataset, Split
from gradveil.data.own import every_fifth
from gradveil.data.pixels import to_unit
from gradveil.defences import Defence
from gradveil.errors import ConfigError, DataError
from gradveil.federated.protocol import Protocol
from gradveil.models.base import parse_normalisation
from gradveil.report.card import NAME, verdict_word, write_card
from gradveil.report.criteria import Verdict, fields_of, judged, parse_criteria
from gradveil.report.notebook import audit_html
from gradveil.runs.given import as_texts, fresh_folder, usable_workers

LEAKS = "identified>0.01"
"""The criterion of a check, unless another is given: more than one image in a hundred is picked out of a thousand."""
QUICK: Mapping[str, Any] = {"rounds": 20, "clients": 8, "targets": 8, "tap": (1, 20), "attacks": ("gs:iterations=500",)}
"""The settings of a check that differ from those of an audit."""
NOT_CHECKED = ("optimiser", "accumulate", "clip_norm", "label_smoothing", "reduction", "dropout", "nesterov")
"""Settings of local training that a simulated training does not have."""


@dataclass(frozen=True)
class CheckResult:
    """The result of a check; a notebook shows the page's headline, tables and pictures.

    Attributes:
        verdict: passes, fails, or not measured.
        verdicts: one for each criterion, with its reason.
        audit: the audit behind it.
    """

    verdict: str
    verdicts: tuple[Verdict, ...]
    audit: AuditResult

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per attacked update, and one per training."""
        return self.audit.rows

    @property
    def page(self) -> Path:
        """The page to look at."""
        return self.audit.report

    @property
    def card(self) -> Path:
        """The privacy card, as Markdown; the same as JSON stands beside it."""
        return self.audit.out / f"{NAME}.md"

    def __repr__(self) -> str:
        reasons = " ".join(verdict.sentence for verdict in self.verdicts)
        return f"CheckResult({self.verdict}: {reasons} page={str(self.page)!r})"

    def _repr_html_(self) -> str:
        return f"<p><strong>gradveil check: {self.verdict}</strong></p>" + audit_html(self.audit.out, self.page)


def check(  # noqa: PLR0913 - its arguments are the options of the command
    model: str | nn.Module | Callable[..., nn.Module],
    loader: str | Path | Dataset | Iterable[Any],
    *,
    protocol: str | Protocol = "lab",
    defence: str | Defence = "none",
    fail_on: str | Sequence[str] = LEAKS,
    normalise: str = "none",
    out: str | Path | None = None,
    workers: int | None = None,
    data_root: Path | None = None,
    progress: Callable[[float, int, str], None] = lambda done, total, doing: None,
    **options: Any,  # noqa: ANN401 - fields of AuditSettings
) -> CheckResult:
    """Train a model federatedly under a defence, attack what its clients send, and say whether too much leaks.

    Example::

        result = gradveil.check(model, loader, defence="dp-sgd:noise=4")
        result.verdict   # passes, fails or not measured
        result.page      # what the attacks recovered

    With a defence, attackers who know it are tried too.

    Args:
        model: a ``torch.nn.Module``, a function or class that returns one, or a text as on the command line.
        loader: the data: a DataLoader or another iterable of batches (images, labels), a pair of arrays, a
            `gradveil.Dataset`, or a name or path. Every fifth image of a class becomes a test image.
        protocol: lab, fedavg, or a `gradveil.Protocol` of one of these forms.
        defence: a defence with its settings, as text or object.
        fail_on: criteria that the run must not meet, such as ``psnr>blind+1``.
        normalise: what the loader does to images in [0, 1], as mean/std; it is undone here and done by the model.
        out: folder for the results; by default a new one below ``runs``.
        workers: worker processes.
        data_root: folder of the data sets.
        progress: called with the cells done, their number, and what is being done.
        options: any option of ``gradveil audit``, with underscores.

    Raises:
        ConfigError: an argument is wrong; nothing was started.
    """
    data = loader if isinstance(loader, (str, Path, Dataset)) else dataset_of(loader, normalise)
    if isinstance(data, Dataset) and isinstance(model, nn.Module):
        data = replace(data, num_classes=max(data.num_classes, _outputs(model, data)))
    defended = defence not in ("none", "")
    given: dict[str, Any] = {**QUICK, **_protocol(protocol), "adaptive": defended, "normalise": normalise, **options}
    if "rounds" in options and "tap" not in options:
        given["tap"] = tuple(sorted({1, max(1, int(options["rounds"]))}))
    texts = as_texts({**given, "model": model, "dataset": data, "defences": [defence]})
    settings = make_audit_settings(texts)
    criteria = parse_criteria(fail_on, fields_of(settings.schema))
    folder = Path(out).expanduser() if out is not None else fresh_folder("check")
    result = run_audit(
        settings,
        folder,
        workers=usable_workers({name: getattr(settings, name) for name in ("model", "dataset", "defences")}, workers),
        data_root=data_root,
        progress=progress,
    )
    verdicts = verdicts_of(result, [criterion.text for criterion in criteria])
    return CheckResult(verdict_word(verdicts), tuple(verdicts), result)


def verdicts_of(result: AuditResult, fail_on: str | Sequence[str] = ()) -> list[Verdict]:
    """Return the verdicts of criteria on an audit, and write its privacy card again with them."""
    lines = {"summary": result.summary, "costs": result.utility, "members": result.membership}
    criteria = parse_criteria(fail_on, fields_of(result.schema)) if fail_on else ()
    verdicts = judged(criteria, lines, result.schema)
    if verdicts:
        write_card(result.out, verdicts)
    return verdicts


def _protocol(given: str | Protocol) -> dict[str, Any]:
    """Return the settings of an audit that a protocol stands for."""
    if isinstance(given, str):
        return {"protocol": given}
    local, usual = given.local, Protocol().local
    odd = [name for name in NOT_CHECKED if getattr(local, name) != getattr(usual, name)]
    if odd:
        raise ConfigError(
            f"A check trains by plain SGD, got a protocol with {odd[0]} = {getattr(local, odd[0])!r}. Record your own "
            "loop with gradveil.Recorder, and attack that."
        )
    same = {"lr": given.lr, "weight_decay": local.weight_decay, "batch_norm": local.batch_norm}
    same |= {"aggregation": given.aggregation} | ({"tap": given.taps} if given.taps else {})
    same |= {"rounds": given.rounds} if given.rounds > 1 else {}
    if local.algorithm == "fedsgd":
        return {"protocol": "lab", "images": given.images or local.batch_size or 1, **same}
    fedavg = {"epochs": local.epochs, "batch_size": local.batch_size, "momentum": local.momentum}
    return {"protocol": "fedavg", **fedavg, **same}


def dataset_of(loader: Iterable[Any], normalise: str = "none", name: str = "loader") -> Dataset:
    """Return the images of an iterable of batches, or of a pair (images, labels), as a data set in [0, 1]."""
    pairs: list[Any] = [loader] if _is_pair(loader) else list(loader)
    if not pairs or not all(_is_pair(pair) for pair in pairs):
        raise DataError("The loader must give batches (images, labels), got none or others. Pass a DataLoader.")
    images = torch.cat([torch.as_tensor(batch[0]) for batch in pairs])
    labels = torch.cat([torch.as_tensor(batch[1]).flatten() for batch in pairs]).long().cpu()
    if images.dim() != 4:
        raise DataError(f"The loader must give images (N, C, H, W), got {tuple(images.shape)}.")
    stored = images.cpu() if images.dtype == torch.uint8 else _unit(images.float().cpu(), normalise)
    test = every_fifth(labels.numpy())
    if not test.any():
        raise DataError(f"The loader must give at least 5 images of a class, got {len(labels)} in all.")
    parts = [Split(np.ascontiguousarray(stored.numpy()[part]), labels.numpy()[part]) for part in (~test, test)]
    channels = stored.shape[1]
    return Dataset(name, parts[0], parts[1], int(labels.max()) + 1, (0.5,) * channels, (0.5,) * channels)


def _unit(images: Tensor, normalise: str) -> Tensor:
    """Return normalised images in [0, 1]."""
    found = parse_normalisation(normalise, images.shape[1])
    if found is not None:
        mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (found.mean, found.std))
        images = images * std + mean
    low, high = float(images.min()), float(images.max())
    if low < -1e-3 or high > 1 + 1e-3:
        raise DataError(
            f"Images must be in [0, 1] before normalisation, got {low:.3g} to {high:.3g}. Say what the loader does to "
            'them: normalise="0.5/0.5", its mean and standard deviation.'
        )
    return images.clamp(0, 1)


@torch.no_grad()
def _outputs(model: nn.Module, data: Dataset) -> int:
    """Return the number of a model's outputs: classes may be missing among the images."""
    like = next(model.parameters())
    outputs = copy.deepcopy(model).eval()(to_unit(data.train.images[:2]).to(like))
    return int(outputs.shape[-1])


def _is_pair(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(hasattr(part, "shape") for part in value)
