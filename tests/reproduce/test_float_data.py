"""A data set of floats in [0, 1] gives every experiment the same images as its twin of bytes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gradveil.data import Split, load_dataset
from gradveil.reproduce import ats, dcs2_attacks, dcs2_training, entangle, entangle_attacks, fedkl_attacks, loda_images
from gradveil.reproduce.base import Lab


@pytest.fixture(scope="module")
def twins():
    data = load_dataset("mnist-5k")
    return data, replace(data, train=as_floats(data.train), test=as_floats(data.test))


def as_floats(split):
    return Split(split.images.astype(np.float32) / 255, split.labels)


def loda(data, lab):
    scene = loda_images.make_scene(lab, data)
    return torch.cat([scene.private.images, scene.learn.images, scene.test.images, scene.public.images])


def entangle_case(data, lab):
    case = entangle_attacks.make_case(data, "logistic", 2, 0)
    return torch.cat([case.private.images, case.guard.images])


def dcs2_case(data, lab):
    images = dcs2_training.Images(data, data, data)
    case = dcs2_attacks.make_case(images, "logistic", "iid:images=4", 2, 0)
    return torch.cat([case.truth[:, 0], case.public.images[:5], case.aux.images[:5]])


def fedkl(data, lab):
    lab = replace(lab, out=lab.out / str(data.train.images.dtype))
    found = fedkl_attacks.attacked(lab, data, "none", "idlg:iterations=1", [], targets=2, tell=lambda share: None)
    return torch.cat([found.truth, fedkl_attacks._public(data).images])


@pytest.mark.parametrize(
    "images_of",
    [
        loda,
        entangle_case,
        dcs2_case,
        fedkl,
        lambda data, lab: entangle._digits(data, 3)[0],
        lambda data, lab: ats._images(data.train, np.arange(3)).images,
    ],
    ids=["loda", "entangle-attacks", "dcs2", "fedkl", "entangle", "ats"],
)
def test_floats_are_not_divided_again(twins, tmp_path, images_of):
    ours, theirs = (images_of(data, Lab(tmp_path, "smoke")) for data in twins)
    assert torch.equal(ours, theirs)
    assert ours.max() > 0.9


def test_resized_floats_stay_floats(twins):
    ours, theirs = (dcs2_training.resized(data, 14).test.images[:5] for data in twins)
    assert theirs.dtype == np.float32
    assert np.abs(ours / np.float32(255) - theirs).max() <= 0.5 / 255 + 1e-6
