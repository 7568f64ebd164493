"""The command that trains a generator for attacks with a generative prior."""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from gradveil.cli.display import bar, print_json, say
from gradveil.config import absolute_dataset, read_settings
from gradveil.errors import ConfigError
from gradveil.registry import convert

SHOWN = 8
"""Images per class on the sheet."""


def train_generator_command(
    out: Path,
    config: Path | None = None,
    resume: bool = False,
    data_root: Path | None = None,
    as_json: bool = False,
    **options: Any,  # noqa: ANN401 - one for each field of GeneratorSettings
) -> None:
    """Train a generator on public images, for attack ggl; writes weights to OUT, settings (.toml) and samples (.png).

    By default it trains on the test images of a data set, because `gradveil audit` attacks training images and refuses
    to attack an image that the generator was trained on.
    """
    import torch

    from gradveil.data import load_dataset
    from gradveil.generators.training import GeneratorSettings, train_generator
    from gradveil.report.pictures import lines_png
    from gradveil.storage import write_atomic

    given = {**(read_settings(config) if config else {}), **{k: v for k, v in options.items() if v is not None}}
    if "dataset" not in given:
        raise ConfigError("A generator needs public images, got none. Add --dataset (see `gradveil list datasets`).")
    given["dataset"] = absolute_dataset(str(given["dataset"]))
    settings = GeneratorSettings(**convert(GeneratorSettings, given, owner="a generator's training"))
    dataset, started = load_dataset(settings.dataset, data_root), time.perf_counter()
    with bar("steps") as move, contextlib.redirect_stdout(sys.stderr):
        network = train_generator(
            settings,
            dataset,
            out,
            resume=resume,
            progress=lambda done, figures: move(done, settings.steps, "training", figures),
        )
    classes = range(min(dataset.num_classes, 10))
    rng = torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():
        latents = torch.randn(SHOWN, network.latent, generator=rng)
        lines = [network(latents, torch.full((SHOWN,), label)) for label in classes]
    write_atomic(out.with_suffix(".png"), lines_png(lines if network.conditional else lines[:1], 56))
    seconds = round(time.perf_counter() - started, 1)
    summary = {"out": str(out), "pictures": str(out.with_suffix(".png")), "steps": settings.steps, "seconds": seconds}
    if as_json:
        print_json(summary)
    else:
        say(f"{out}: {settings.steps:,} steps in {seconds:,} s. Look at it: {out.with_suffix('.png').resolve()}")
        say(f"Attack with it: gradveil audit --attacks ggl:generator={out} --knows num-examples,public-data ...")
