"""What `gradveil.runs.recorder.Recorder` watches a training loop with: losses, gradients, the model's own file."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradveil.runs.given import as_texts


def reference_of(factory: Callable[..., nn.Module]) -> str:
    """Return ``file.py:name`` of a factory, also of one in the script that runs if loading it runs no training."""
    path, name = inspect.getsourcefile(factory) if _has_source(factory) else None, factory.__qualname__
    if factory.__module__ == "__main__" and path and name.isidentifier() and "__name__" in Path(path).read_text():
        return f"{Path(path).resolve()}:{name}"
    found: str = as_texts({"model": factory})["model"]
    return found


def _has_source(factory: object) -> bool:
    try:
        return bool(inspect.getsourcefile(factory))  # type: ignore[arg-type]
    except (TypeError, OSError):
        return False


@dataclass(frozen=True)
class Loss:
    """A call of cross_entropy or nll_loss.

    Attributes:
        function: the one that was called.
        outputs: of the model, (N, classes).
        labels: (N,) whole numbers.
        smoothing: label smoothing.
    """

    function: Callable[..., Tensor]
    outputs: Tensor
    labels: Tensor
    smoothing: float

    def scale(self, gradient: Tensor) -> float:
        """Return the factor by which a gradient of the outputs is that of the mean loss."""
        options = {"label_smoothing": self.smoothing} if self.smoothing else {}
        with torch.enable_grad():
            leaf = self.outputs.detach().clone().requires_grad_()
            mean = self.function(leaf, self.labels, **options)
        (wanted,) = torch.autograd.grad(mean, leaf)
        return float((gradient * wanted).sum() / wanted.square().sum().clamp_min(1e-30))


class Losses(TorchFunctionMode):
    """Call functions with what is computed in the ``with`` block.

    Args:
        found: called with each cross-entropy of whole-number labels.
        unscaled: called with the gradients that torch.amp.GradScaler has just multiplied by a factor, and the factor.
    """

    def __init__(self, found: Callable[[Loss], None], unscaled: Callable[[Sequence[Tensor], float], None]) -> None:
        super().__init__()
        self._found, self._unscaled, self._inside = found, unscaled, False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever torch's function returns
        """Look at a call of torch before it runs."""
        given = dict(kwargs or {})
        if func in (F.cross_entropy, F.nll_loss) and not self._inside:
            bound = inspect.signature(func).bind(*args, **given).arguments
            labels, plain = bound["target"], bound.get("weight") is None
            if plain and isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point():
                self._inside = True
                try:
                    smoothing = float(bound.get("label_smoothing", 0.0))
                    self._found(Loss(func, bound["input"], labels.detach(), smoothing))
                finally:
                    self._inside = False
        result = func(*args, **given)
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            self._unscaled(args[0], float(args[2]))
        return result


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return tensors as one vector, in the order of their names, on the CPU."""
    return (
        torch.cat([tensors[name].detach().flatten().cpu() for name in sorted(tensors)]) if tensors else torch.empty(0)
    )


def key_of(image: Tensor) -> bytes:
    """Return a short digest of an image."""
    return hashlib.blake2b(image.detach().cpu().contiguous().numpy().tobytes(), digest_size=8).digest()
