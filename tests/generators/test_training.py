"""Training on public images: it learns, resumes to the same bits, and its file records the training images."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gradveil.data import Dataset, Split
from gradveil.data.auxiliary import image_keys
from gradveil.errors import ConfigError, DivergedError, RunFolderError, UnknownNameError
from gradveil.generators import load_generator, training
from gradveil.generators.training import GeneratorSettings, train_generator

QUICK = GeneratorSettings(generator="dcgan:latent=4,width=4", steps=4, batch_size=16)


@pytest.fixture(scope="module")
def bars():
    """Return two classes of 8x8 images: a bright upper half, or a bright left half."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 40, (60, 1, 8, 8), dtype=np.uint8)
    labels = np.arange(60) % 2
    images[labels == 0, :, :4] += 200
    images[labels == 1, :, :, :4] += 200
    half = (0.5,)
    return Dataset("bars", Split(images[:20], labels[:20]), Split(images[20:], labels[20:]), 2, half, half)


def test_it_learns_what_the_classes_look_like(bars, tmp_path):
    settings = dataclasses.replace(QUICK, steps=150, lr=5e-3)
    train_generator(settings, bars, tmp_path / "g.safetensors")
    network = load_generator(str(tmp_path / "g.safetensors"), (1, 8, 8), 2)
    latents = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    for label in (0, 1):
        made = network(latents, torch.full((20,), label))[:, 0]
        upper, left = made[:, :4, 4:].mean(), made[:, 4:, :4].mean()
        bright, dark = (upper, left) if label == 0 else (left, upper)
        assert bright > dark + 0.3


def test_an_interrupted_training_resumes_to_the_same_bits(bars, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SAVE_EVERY", 2)
    train_generator(QUICK, bars, tmp_path / "whole.safetensors")

    class KilledError(Exception):
        pass

    def kill(done, figures):
        if done == 3:
            raise KilledError

    with pytest.raises(KilledError):
        train_generator(QUICK, bars, tmp_path / "cut.safetensors", progress=kill)
    with pytest.raises(RunFolderError, match="--resume"):
        train_generator(QUICK, bars, tmp_path / "cut.safetensors")
    with pytest.raises(RunFolderError, match="from the same settings"):
        train_generator(dataclasses.replace(QUICK, lr=0.1), bars, tmp_path / "cut.safetensors", resume=True)
    steps = []
    train_generator(
        QUICK, bars, tmp_path / "cut.safetensors", resume=True, progress=lambda done, figures: steps.append(done)
    )
    assert steps == [3, 4]
    whole, cut = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cut.safetensors", "cut.toml", "whole.safetensors", "whole.toml",
    ]  # fmt: skip


def test_the_file_records_exactly_its_training_images(bars, tmp_path):
    train_generator(dataclasses.replace(QUICK, steps=1), bars, tmp_path / "g.safetensors")
    keys = load_generator(str(tmp_path / "g.safetensors"), (1, 8, 8), 2).keys
    assert keys == set(image_keys(bars.test.images).tolist())
    assert not keys & set(image_keys(bars.train.images).tolist())
    as_floats = bars.test.images.astype(np.float32) / 255
    assert keys == set(image_keys(as_floats).tolist())


def test_a_finished_file_is_never_overwritten(bars, tmp_path):
    path = tmp_path / "g.safetensors"
    train_generator(dataclasses.replace(QUICK, steps=1), bars, path)
    before = path.read_bytes()
    for resume in (False, True):
        with pytest.raises(RunFolderError, match="must not exist yet"):
            train_generator(QUICK, bars, path, resume=resume)
    assert path.read_bytes() == before


def test_global_randomness_is_left_alone(bars, tmp_path):
    before = torch.get_rng_state()
    train_generator(dataclasses.replace(QUICK, steps=1), bars, tmp_path / "g.safetensors")
    assert torch.equal(before, torch.get_rng_state())


def test_divergence_is_an_error_and_leaves_no_weights(bars, tmp_path):
    with pytest.raises(DivergedError, match="Lower --lr"):
        train_generator(dataclasses.replace(QUICK, lr=1e30, steps=9), bars, tmp_path / "g.safetensors")
    assert not (tmp_path / "g.safetensors").exists()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"split": "all"}, "Unknown split 'all'"),
        ({"generator": "dcgam"}, "Did you mean 'dcgan'"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"batch_size": 1}, "batch_size must be at least 2"),
        ({"lr": 0.0}, "lr must be more than 0"),
        ({"penalty": -1.0}, "penalty must be at least 0"),
    ],
)
def test_bad_settings(bad, message):
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        GeneratorSettings(**bad)


def test_another_file_suffix_is_refused(bars, tmp_path):
    with pytest.raises(ConfigError, match=r"ends in \.safetensors, got '.*g\.pt'"):
        train_generator(QUICK, bars, tmp_path / "g.pt")
