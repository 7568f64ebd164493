import pytest
import torch

from gradveil.attacks.dlg import Dlg
from gradveil.errors import ConfigError
from tests.attacks.scene import psnr, run, scene


def test_dlg_finds_pictures_and_labels_together():
    truth, labels, seen = scene(targets=1, grants=("num-examples",))
    result = run(Dlg(iterations=60, restarts=4), seen)
    assert torch.equal(result.labels, labels)
    assert psnr(truth.flatten(0, 1), result.images.flatten(0, 1)).min() > 30


@pytest.mark.parametrize("bad", [{"iterations": 0}, {"lr": 0.0}, {"restarts": 0}, {"chunk": 0}, {"keep": -1}])
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Dlg(**bad)
