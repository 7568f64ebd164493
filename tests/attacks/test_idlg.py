import torch

from gradveil.attacks.idlg import Idlg
from tests.attacks.scene import psnr, run, scene


def test_idlg_finds_pictures_and_labels():
    truth, labels, seen = scene(grants=("num-examples",))
    result = run(Idlg(iterations=40, restarts=2), seen)
    assert torch.equal(result.labels, labels)
    assert psnr(truth.flatten(0, 1), result.images.flatten(0, 1)).min() > 30
    assert result.converged.all()
