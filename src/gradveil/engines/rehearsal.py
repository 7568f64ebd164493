"""Rehearsals: choose a defence's settings by training on public images, before a private image is touched."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.data.datasets import Split
from gradveil.data.federated import federate
from gradveil.data.pixels import to_batch
from gradveil.defences import Defence
from gradveil.engines.devices import make_network
from gradveil.errors import ConfigError, DivergedError
from gradveil.models.base import Normalisation, parse_normalisation
from gradveil.randomness import derive_seed

HELD_OUT = 5
"""One in this many public images is kept to score rehearsals."""
Play = Callable[[TrainSettings, Dataset, Defence, Callable[[], nn.Module], Path], dict[str, Any]]
"""Train on a data set with a defence and a network, in a folder; return the last row."""


def rehearsed(
    settings: TrainSettings, defence: Defence, dataset: Dataset, aux: Dataset | None, play: Play
) -> tuple[TrainSettings, Defence]:
    """Return the settings and the defence with what rehearsals on the public images chose.

    A rehearsal has the training's clients, network and rounds, but even parts of the public images. Of the private
    images it uses how many there are, which is public. Random numbers are others than the training's.
    """
    public = _public(settings, defence, aux)
    data = federate(dataset, settings.partition, settings.clients, "", settings.seed, aux, (), False)
    how = replace(
        defence.training(settings),
        partition="iid",
        aux="",
        sensitive="",
        save_rounds=(),
        eval_every=max(1, settings.rounds),
        canaries=0,
        tripwire="off",
        weights=settings.weights if public.num_classes == dataset.num_classes else "",
        seed=derive_seed(settings.seed, "rehearsal") >> 1,
    )
    chosen = (
        Normalisation(public.mean, public.std)
        if settings.normalise == "dataset"
        else parse_normalisation(settings.normalise, public.shape[0], also="dataset, ")
    )
    pictures = to_batch(aux.train.images, aux.train.labels) if aux is not None else None
    network = partial(make_network, how, public.shape, public.num_classes, chosen, pictures)
    with TemporaryDirectory(prefix="gradveil-rehearsal-") as folder:

        def rehearse(one: Defence) -> tuple[float, float]:
            try:
                row = play(how, public, one, network, Path(folder))
            except DivergedError:
                return 0.0, float("-inf")
            return row["accuracy"], -row["loss"]

        tuned = defence.tuned(rehearse, settings.rounds, sum(data.sizes) / len(public.train))
    return replace(settings, defence=tuned.spec), tuned


def _public(settings: TrainSettings, defence: Defence, aux: Dataset | None) -> Dataset:
    """Return the public images as a data set of their own. Raise `ConfigError` if nothing can be learned from them."""
    if aux is None:
        raise ConfigError(f"{defence.spec!r} chooses its settings on public images with labels, got none. Give --aux.")
    labels = aux.train.labels
    order = np.random.default_rng(derive_seed(settings.seed, "held out")).permutation(len(labels))
    kept, used = order[: len(labels) // HELD_OUT], order[len(labels) // HELD_OUT :]
    if len(np.unique(labels)) < 2 or len(kept) < 1 or len(used) < settings.clients:
        raise ConfigError(
            f"{defence.spec!r} needs public images of two classes or more, and {settings.clients} or more of them to "
            f"train on (four fifths), got {len(labels)} of {len(np.unique(labels))}. Choose another --aux."
        )
    train, test = (Split(aux.train.images[some], labels[some]) for some in (used, kept))
    return replace(aux, train=train, test=test)
