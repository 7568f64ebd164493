"""Record any torch training loop as files that ``gradveil attack`` takes: model before, update, specification."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tomli_w
import torch
from torch import Tensor, nn

from gradveil.errors import ConfigError, UnexplainedError
from gradveil.federated.protocol import LocalSettings
from gradveil.federated.steps import Stepper
from gradveil.networks.watch import LayerCall, watch
from gradveil.runs.explained import CLOSE, RecordedBatch, RecordedStep, optimiser_keys
from gradveil.runs.given import fresh_folder
from gradveil.runs.loop_hooks import Loss, Losses, flat, key_of
from gradveil.runs.recorded import Recording, check_gradient
from gradveil.runs.update_spec import make_spec
from gradveil.storage import save_tensors, write_atomic


class Recorder:
    """Watch a training loop, and write what a curious server would get of it.

    Example::

        with gradveil.Recorder(model, optimizer, "runs/mine") as recorder:
            for images, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
        gradveil.attack(**recorder.files, attack="gs")

    The loop may use SGD with momentum, Adam or AdamW, weight decay, gradient accumulation, clipping by norm, label
    smoothing, losses that are summed or scaled, BatchNorm and Dropout in either mode, and several epochs. The first
    step is computed again to make sure that the specification explains it. The block must hold the whole round of one
    client, with a fresh optimiser.

    Args:
        model: the model that is trained; it maps images (N, C, H, W) to one output per class.
        optimizer: torch.optim.SGD, Adam or AdamW, with all parameters of the model in one group.
        out: folder for the files, new or empty; by default a new one below ``runs``.
        factory: how to build the model again: a function, a class, a model of the zoo by name, or ``file.py:name``; by
            default the model's class, called without arguments.
        normalise: what was done to images in [0, 1] before the model saw them: ``none``, ``imagenet`` or mean/std as
            ``0.5/0.5``; by default inferred from the darkest and the brightest input.
        labels: whether the specification tells the labels to the attacker.
        images: whether to keep the private images too, as ``truth.npz``, for scores.

    Raises:
        UnexplainedError: the loop did something that a specification can't say; raised at once before the first step,
            and later at the end of the block, when model and update are saved.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        out: str | Path | None = None,
        *,
        factory: Callable[..., nn.Module] | str | None = None,
        normalise: str = "",
        labels: bool = True,
        images: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"Recorder takes a torch.nn.Module and its optimiser, got {type(model).__name__} and "
                f"{type(optimizer).__name__}."
            )
        self.model, self.optimizer = model, optimizer
        self.out = Path(out).expanduser() if out is not None else fresh_folder("record")
        self.note = ""
        self._factory, self._normalise = factory or type(model), normalise
        self._tell_labels, self._keep_images = labels, images
        self._forget()

    def _forget(self) -> None:
        """Start without any step, also in a second block after one that an error ended."""
        self._steps: list[RecordedStep] = []
        self._waiting: list[RecordedBatch] = []
        self._input: tuple[Tensor, dict[str, bool], Tensor] | None = None
        self._left: dict[str, Tensor] = {}
        self._depth = 0
        self._rounded = False
        self._problem: UnexplainedError | None = None
        self._spec: dict[str, Any] = {}
        self._hooks = ExitStack()

    @property
    def model_file(self) -> Path:
        """The model as it was before the first step."""
        return self.out / "model.safetensors"

    @property
    def update(self) -> Path:
        """The change of the parameters, and of BatchNorm's running statistics."""
        return self.out / "update.safetensors"

    @property
    def spec(self) -> Path:
        """What is known of the update, as a TOML file."""
        return self.out / "spec.toml"

    @property
    def files(self) -> dict[str, Any]:
        """The arguments of ``gradveil.attack`` for what was recorded."""
        truth = {"truth": self.out / "truth.npz"} if self._keep_images else {}
        return {"model_file": self.model_file, "update": self.update, "spec": dict(self._spec), **truth}

    def __enter__(self) -> Self:
        self._check()
        self._forget()
        self._before = copy.deepcopy(self.model)
        self._there = self._trained()
        self._hooks.enter_context(watch(self.model, [""], before=self._saw))
        self._hooks.callback(self.optimizer.register_step_pre_hook(self._steps_now).remove)
        self._hooks.callback(self.optimizer.register_step_post_hook(self._stepped).remove)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                keep = parameter.register_post_accumulate_grad_hook(self._keeping(name))  # type: ignore[no-untyped-call]
                self._hooks.callback(keep.remove)
        self._hooks.enter_context(Losses(self._lost, self._unscaled))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._hooks.close()
        if kind is None:
            self._write()

    def _check(self) -> None:
        """Raise before the training if its steps could not be explained, or its files not be written."""
        if len(self.optimizer.param_groups) != 1:
            raise UnexplainedError(
                f"The optimiser must have one group of parameters, got {len(self.optimizer.param_groups)}: attacks "
                "replay one learning rate and one weight decay. Give it model.parameters()."
            )
        (group,) = self.optimizer.param_groups
        optimiser_keys(type(self.optimizer).__name__, group)
        trained = {id(parameter) for parameter in self.model.parameters() if parameter.requires_grad}
        if trained != {id(parameter) for parameter in group["params"]}:
            raise UnexplainedError(
                "The optimiser must hold all parameters of the model that require a gradient and no others, got other "
                "ones. Give it those, and set requires_grad_(False) on those that are not trained."
            )
        if any(self.optimizer.state.values()) and (group.get("momentum") or "betas" in group):
            raise UnexplainedError(
                "The optimiser must be fresh: attacks replay its state from zero, got one that has stepped before. "
                "Make a new one for the recorded round."
            )
        if self.out.exists() and any(self.out.iterdir()):
            raise ConfigError(f"{self.out} must be new or empty, got a folder with files. Choose another `out`.")

    def _saw(self, call: LayerCall) -> None:
        """Note what the model is given, in which mode, and with which random numbers."""
        images = call.inputs[0] if len(call.inputs) == 1 else None
        if isinstance(images, Tensor) and images.dim() == 4:
            modes = {name: layer.training for name, layer in call.layer.named_modules()}
            self._input = images.detach(), modes, torch.get_rng_state()
            self._rounded = self._rounded or torch.is_autocast_enabled(images.device.type)
        else:
            self._input = None

    def _lost(self, loss: Loss) -> None:
        """Wait for the gradient of a loss's outputs: it shows how the loss was scaled, and that it was used."""
        seen = self._input
        if seen is None or not loss.outputs.requires_grad or len(loss.outputs) != len(seen[0]):
            return
        self._input = None  # one loss per forward pass; those that check it count no more
        images, modes, random = seen
        random_state = None if self._steps else random

        def arrived(gradient: Tensor) -> None:
            self._begins()
            keys = tuple(map(key_of, images))
            classes, scale = loss.outputs.shape[1], loss.scale(gradient)
            batch = RecordedBatch(images, loss.labels, classes, loss.smoothing, scale, modes, random_state, keys)
            self._waiting.append(batch)

        loss.outputs.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _begins(self) -> None:
        """Forget batches whose gradients were zeroed without a step; find gradients that no one zeroed after a step."""
        zero = not any(p.grad is not None and bool(p.grad.any()) for p in self.model.parameters())
        if zero and self._left:
            self._waiting, self._left = [], {}
        elif not zero and not self._waiting:
            self._refuse(
                UnexplainedError(
                    "Gradients must begin at zero in each step, got those of earlier batches. Call "
                    "optimizer.zero_grad() before the block and after each step."
                )
            )

    def _unscaled(self, gradients: Sequence[Tensor], factor: float) -> None:
        """Take gradients that torch.amp.GradScaler divided by its scale as those that backward left."""
        there = {tensor.data_ptr() for tensor in gradients}
        found = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        found = {name: gradient for name, gradient in found.items() if gradient.data_ptr() in there}
        if found and next(iter(self._left), None) in found:  # once, also if they are divided in several groups
            self._waiting = [replace(batch, scale=batch.scale * factor) for batch in self._waiting]
        self._left |= {name: gradient.detach().clone() for name, gradient in found.items()}

    def _refuse(self, error: UnexplainedError) -> None:
        """Raise an error before the first step; later let the loop train on, and raise it after saving the files."""
        if not self._steps:
            raise error
        self._problem = self._problem or error

    def _keeping(self, name: str) -> Callable[[Tensor], None]:
        def keep(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._left[name] = parameter.grad.detach().clone()

        return keep

    def _steps_now(self, _: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the gradient with which the optimiser is about to step; a step may call that of its base class."""
        self._depth += 1
        if self._depth > 1 or self._problem:
            return
        try:
            self._note_step(closure=any(callable(given) for given in (*args[1:], *kwargs.values())))
        except UnexplainedError as error:
            self._refuse(error)

    def _note_step(self, *, closure: bool) -> None:
        if closure:
            raise UnexplainedError(
                "Gradients must be there before the step, got a closure, which computes them within. Call "
                "backward and then optimizer.step() without arguments."
            )
        if not self._waiting:
            raise UnexplainedError(
                "Each step must follow torch's cross_entropy (or nll_loss) without class weights, of model(images) for "
                "images (N, C, H, W), with whole-number labels, got a step without. Other losses can't be replayed."
            )
        self._check_untouched()
        now = flat({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})
        left = flat(self._left)
        if now.shape != left.shape:
            raise UnexplainedError("Every step must have a gradient of all parameters, got some without.")
        size, before = float(now.norm()), float(left.norm())
        if float((now * left).sum()) < (1 - CLOSE) * size * before:
            raise UnexplainedError(
                "Gradients must reach the optimiser as backward left them, or clipped by norm, got others. "
                "Remove what changes them (noise, clipping by value, masks), or use gradveil's own defence."
            )
        (group,) = self.optimizer.param_groups
        facts = {key: value for key, value in group.items() if key != "params"}
        if not self._steps:
            check_gradient(self._before, self._waiting, left, rounded=self._rounded)
            self._first = self._trained(), now
        self._steps.append(RecordedStep(self._waiting, facts, size, size / max(before, 1e-30)))
        self._waiting = []

    def _check_untouched(self) -> None:
        """Raise UnexplainedError if the weights are not those that the last step left."""
        if not torch.allclose(self._trained(), self._there, rtol=0.0, atol=0.0, equal_nan=True):
            raise UnexplainedError(
                "Only the optimiser's steps must change the weights, got other changes between or after them (a "
                "moving average, a projection, loaded weights). Take them out of the block."
            )

    def _stepped(self, *_: object) -> None:
        """Check that the first step is the one that the optimiser's settings give."""
        self._depth -= 1
        if self._depth:
            return
        self._there = self._trained()
        if self._problem or len(self._steps) > 1:
            return
        weights, gradient = self._first
        keys = optimiser_keys(type(self.optimizer).__name__, self._steps[0].group)
        lr = keys.pop("lr")
        expected = weights.clone()
        Stepper(LocalSettings(**keys | ({"betas": tuple(keys["betas"])} if "betas" in keys else {})), lr).step(
            expected, gradient
        )
        if float((self._there - expected).norm()) > 10 * CLOSE * float((self._there - weights).norm()) + 1e-12:
            self._problem = UnexplainedError(
                f"The step of {type(self.optimizer).__name__} must be that of torch.optim, got another one. Use "
                "torch's own optimiser, and let nothing else change the weights."
            )

    def _trained(self) -> Tensor:
        return flat({name: p for name, p in self.model.named_parameters() if p.requires_grad})

    def _write(self) -> None:
        """Save model and update, then the specification that explains them."""
        if not self._steps:
            raise UnexplainedError(
                "The optimiser must step at least once in the block, got no step: there is no update. Put the training "
                "loop inside `with Recorder(...)`, and call optimizer.step()."
            )
        before, after = self._before.state_dict(), self.model.state_dict()
        save_tensors(self.model_file, before)
        change = {name: after[name] - old for name, old in before.items() if old.is_floating_point()}
        save_tensors(self.update, change, mode=0o600)
        try:
            if self._problem:
                raise self._problem
            self._check_untouched()
            kept = Recording(self._before, self._steps, type(self.optimizer).__name__, self._factory, self._normalise)
            keys, self.note = kept.keys(tell_labels=self._tell_labels)
            self._spec = {key: value for key, value in keys.items() if value not in (None, "")}
            make_spec(self._spec, "the recorded specification")
        except (UnexplainedError, ConfigError) as error:
            raise UnexplainedError(
                f"{error} Model and update are saved in {self.out}; to attack them, write a specification yourself."
            ) from error
        head = "".join(f"# {line}\n" for line in ("Recorded by gradveil.Recorder.", self.note) if line)
        write_atomic(self.spec, (head + tomli_w.dumps(self._spec)).encode(), mode=0o600)
        if self._keep_images:
            kept.write_truth(self.out / "truth.npz", str(self._spec["normalise"]))
