"""A data set of small smooth images, and settings that audit them in seconds."""

import numpy as np
import pytest
import torch

from gradveil.audits import make_audit_settings

QUICK = "gs:iterations=60,sign=none,schedule=cosine,tv=1e-4"


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Return the path of an .npz file with 60 training and 20 test images of 3 classes."""
    rng = torch.Generator().manual_seed(0)
    coarse = torch.rand(80, 1, 3, 3, generator=rng)
    images = torch.nn.functional.interpolate(coarse, size=(8, 8), mode="bilinear").mul(255).byte().numpy()
    labels = np.arange(80) % 3
    path = tmp_path_factory.mktemp("data") / "pictures.npz"
    np.savez(path, x_train=images[:60], y_train=labels[:60], x_test=images[60:], y_test=labels[60:])
    return path


@pytest.fixture
def small(pictures):
    """Return the settings of a small audit, with changes."""

    def make(**changes):
        few = {"dataset": str(pictures), "clients": 3, "rounds": 2, "batch_size": 8, "targets": 2, "attacks": QUICK}
        return make_audit_settings(few | changes)

    return make
