from dataclasses import replace

import torch

from gradveil.attacks.idlg import Idlg
from tests.attacks.scene import psnr, run, scene


def test_an_update_that_says_nothing_is_named_and_the_others_go_on():
    truth, _, seen = scene(targets=3)
    spoiled = {name: tensor.clone() for name, tensor in seen.updates.items()}
    for tensor in spoiled.values():
        tensor[0] = 0
        tensor[1] = torch.nan
    result = run(Idlg(iterations=40), replace(seen, updates=spoiled))
    assert [reason.split(":")[0] for reason in result.why[:2]] == ["gradient is zero", "update holds NaN or infinity"]
    assert result.images[:2].isnan().all()
    assert not result.converged[:2].any()
    assert (result.labels[:2] == -1).all()
    assert psnr(truth[2], result.images[2]).min() > 30
