"""Train a generator on public images against a critic; an interrupted training can be resumed."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.config import names_options, setting, to_toml
from gradveil.data import Dataset, Split
from gradveil.data.auxiliary import image_keys
from gradveil.data.pixels import to_batch
from gradveil.errors import ConfigError, DivergedError, RunFolderError
from gradveil.generators.base import KEYS, Generator, Latent
from gradveil.generators.dcgan import levels
from gradveil.randomness import global_stream, stream
from gradveil.registry import build
from gradveil.storage import load_tensors, read_metadata, save_tensors, write_atomic
from gradveil.validate import in_range, one_of


@dataclass(frozen=True)
class GeneratorSettings:
    """All settings that determine the weights of a trained generator."""

    dataset: str = setting("", "Public images, required: a named set, a .npz file or a folder of pictures.")
    split: str = setting("test", "Split to train on: test, or train; gradveil audit attacks training images.")
    generator: str = setting("dcgan", "Generator to train (gradveil list generators).")
    steps: int = setting(8000, "Training steps of the generator and of its critic.")
    batch_size: int = setting(64, "Images per step.")
    lr: float = setting(1e-3, "Learning rate of Adam for both.")
    penalty: float = setting(1.0, "Weight of the penalty on the critic's squared gradient at real images.")
    seed: int = setting(0, "Every random draw comes from this seed.")

    @names_options
    def __post_init__(self) -> None:
        one_of("split", self.split, ["test", "train"])
        build(Generator, self.generator)
        in_range("steps", self.steps, 1)
        in_range("batch_size", self.batch_size, 2)
        in_range("lr", self.lr, 0, open_low=True)
        in_range("penalty", self.penalty, 0)
        in_range("seed", self.seed, 0, 2**63 - 1)


SAVE_EVERY = 500
"""Steps between two checkpoints."""
_SLOPE_EVERY = 8
"""The gradient penalty is computed every this many steps, and multiplied by this number."""
_AVERAGED = 0.998
"""Decay of the running mean of the weights, smaller at first; the mean is saved."""

Progress = Callable[[int, str], None]
"""Called with the number of finished steps and the current losses as text."""


def train_generator(
    settings: GeneratorSettings,
    dataset: Dataset,
    out: Path,
    *,
    resume: bool = False,
    progress: Progress = lambda done, figures: None,
) -> Latent:
    r"""Train a generator G, and save its weights to ``out`` and its settings beside it; a seed fixes every bit.

    The critic D is trained to distinguish real images x from generated ones, the generator to mislead it:

    .. math:: \min_D\; E[s(-D(x))] + E[s(D(G(z)))] + \tfrac{\gamma}{2} E\|\nabla D(x)\|^2, \qquad \min_G E[s(-D(G(z)))]

    with :math:`s(t) = \log(1 + e^t)`. D is conditioned on the class if G is, by a product of its features with one row
    per class. The file also holds keys of the training images, so that no audit attacks one of them.

    Reference: Goodfellow et al. 2014, https://arxiv.org/abs/1406.2661; the penalty of Mescheder et al. 2018,
    https://arxiv.org/abs/1801.04406, Eq. 9, every eighth step as in Karras et al. 2020; the class by projection of
    Miyato and Koyama 2018, https://arxiv.org/abs/1802.05637.
    """
    split: Split = getattr(dataset, settings.split)
    if len(split) < 2:
        raise ConfigError(f"A generator needs at least 2 images, got {len(split)} in the {settings.split} split.")
    _claim(out, resume=resume)
    facts = {
        "settings": hashlib.blake2b(to_toml(dataclasses.replace(settings, steps=1)), digest_size=16).hexdigest(),
        "images": hashlib.blake2b(image_keys(split.images).tobytes(), digest_size=16).hexdigest(),
    }
    duel = _Duel(settings, dataset)
    checkpoint = out.with_suffix(".checkpoint.safetensors")
    done = _load(duel, checkpoint, facts) if checkpoint.exists() else 0
    if done > settings.steps:
        raise ConfigError(
            f"steps must be at least the {done:,} steps already done, got {settings.steps:,}. Raise --steps."
        )
    for step in range(done, settings.steps):
        figures = duel.step(split, step)
        progress(step + 1, figures)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == settings.steps:
            save_tensors(checkpoint, duel.tensors(), facts | {"step": str(step + 1)})
    mean = duel.mean.eval()
    keys = torch.from_numpy(image_keys(split.images))
    metadata = {"generator": build(Generator, settings.generator).spec, "classes": str(dataset.num_classes)}
    save_tensors(out, {**mean.state_dict(), KEYS: keys}, metadata)
    write_atomic(out.with_suffix(".toml"), to_toml(settings))
    with contextlib.suppress(OSError):
        checkpoint.unlink()
    return mean


def _claim(out: Path, *, resume: bool) -> None:
    if out.suffix != ".safetensors":
        raise ConfigError(f"out must be a file that ends in .safetensors, got {str(out)!r}.")
    if out.exists():
        raise RunFolderError(f"{out} must not exist yet, got a finished generator. Choose another --out.")
    if out.with_suffix(".checkpoint.safetensors").exists() and not resume:
        raise RunFolderError(f"{out} must be new, got an unfinished training. Add --resume, or choose another --out.")


def _load(duel: "_Duel", checkpoint: Path, facts: Mapping[str, str]) -> int:
    saved = read_metadata(checkpoint)
    if {key: saved.get(key) for key in facts} != dict(facts):
        raise RunFolderError(
            f"{checkpoint} must come from the same settings and images, got others. Choose another --out."
        )
    duel.load(load_tensors(checkpoint))
    return int(saved["step"])


class _Duel:
    """A generator, its running mean and its critic, with both optimisers."""

    def __init__(self, settings: GeneratorSettings, dataset: Dataset) -> None:
        self._settings, self._classes = settings, dataset.num_classes
        made = build(Generator, settings.generator)
        with global_stream(settings.seed, "generator"):
            self.generator = made.build(dataset.shape, dataset.num_classes)
            self._critic = _Critic(dataset.shape, dataset.num_classes if self.generator.conditional else 0)
        with global_stream(settings.seed, "generator"):
            self.mean = made.build(dataset.shape, dataset.num_classes)
        nets = (self.generator, self._critic)
        self._adams = [torch.optim.Adam(net.parameters(), lr=settings.lr, betas=(0.0, 0.99)) for net in nets]

    def step(self, split: Split, number: int) -> str:
        """Train generator and critic by one step each; return their losses as text."""
        rng, size = stream(self._settings.seed, "generator", number), self._settings.batch_size
        chosen = torch.randint(len(split), (size,), generator=rng).numpy()
        batch = to_batch(split.images[chosen], split.labels[chosen])
        real, labels = batch.images, batch.labels
        made = self.generator(torch.randn(size, self.generator.latent, generator=rng), labels)
        sloped = self._settings.penalty > 0 and number % _SLOPE_EVERY == 0
        judged = self._critic(real.requires_grad_(sloped), labels)
        loss = F.softplus(-judged).mean() + F.softplus(self._critic(made.detach(), labels)).mean()
        slope = torch.zeros(())
        if sloped:
            (towards,) = torch.autograd.grad(judged.sum(), real, create_graph=True)
            slope = towards.square().flatten(1).sum(1).mean()
        self._descend(1, loss + self._settings.penalty / 2 * _SLOPE_EVERY * slope)
        misled = F.softplus(-self._critic(made, labels)).mean()
        self._descend(0, misled)
        self._average(min(_AVERAGED, (number + 1) / (number + 10)))
        if not bool(torch.isfinite(loss.detach() + misled.detach())):
            raise DivergedError(f"The generator's training gave NaN or infinity in step {number + 1}. Lower --lr.")
        return f"critic {loss.item():.3f} generator {misled.item():.3f}"

    def _descend(self, which: int, loss: Tensor) -> None:
        adam = self._adams[which]
        adam.zero_grad(set_to_none=True)
        own = [parameter for group in adam.param_groups for parameter in group["params"]]
        for parameter, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
            parameter.grad = gradient
        adam.step()

    @torch.no_grad()
    def _average(self, kept: float) -> None:
        current = self.generator.state_dict()
        for name, tensor in self.mean.state_dict().items():
            if tensor.is_floating_point():
                tensor.lerp_(current[name], 1 - kept)
            else:
                tensor.copy_(current[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the state by name."""
        return dict(self._named())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `tensors` returned."""
        for adam in self._adams:  # creates the state that is filled below
            for parameter in adam.param_groups[0]["params"]:
                parameter.grad = torch.zeros_like(parameter)
            adam.step()
        with torch.no_grad():
            for name, tensor in self._named():
                tensor.copy_(tensors[name])

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for part, net in (("generator", self.generator), ("mean", self.mean), ("critic", self._critic)):
            for name, tensor in net.state_dict().items():
                yield f"{part}.{name}", tensor
        for which, adam in enumerate(self._adams):
            for place, parameter in enumerate(adam.param_groups[0]["params"]):
                for key, value in adam.state[parameter].items():
                    yield f"adam{which}.{place}.{key}", value


class _Critic(nn.Module):
    """Convolutions with stride 2, then a linear layer; if conditional, also one row of weights per class."""

    def __init__(self, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels, height, width = shape
        for level in range(levels(shape)):
            layers += [nn.Conv2d(channels, 32 * 2**level, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
            channels, height, width = 32 * 2**level, height // 2, width // 2
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.last = nn.Linear(channels * height * width, 1)
        self.rows = nn.Embedding(num_classes, channels * height * width) if num_classes else None
        if self.rows is not None:
            nn.init.zeros_(self.rows.weight)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.features(images * 2 - 1)
        verdict: Tensor = self.last(features).squeeze(1)
        if self.rows is not None:
            verdict = verdict + (self.rows(labels) * features).sum(1)
        return verdict
