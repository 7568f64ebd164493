"""A setting that leaks: small smooth images, a network, and what a server sees of them."""

import torch

from gradveil.attacks.parts.adaptive import turned
from gradveil.attacks.parts.countermoves import countermove
from gradveil.models import create_model
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch


def scene(
    targets=2,
    size=1,
    grants=("num-examples", "labels"),
    normalisation=None,
    side=8,
    marked=False,
    model="lenet-dlg",
    **how,
):
    """Return small smooth images, and what a server sees of them through a network that leaks."""
    rng = torch.Generator().manual_seed(1)
    coarse = torch.rand(targets * size, 1, 3, 3, generator=rng)
    truth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear").view(
        targets, size, 1, side, side
    )
    labels = torch.randint(0, 4, (targets, size), generator=rng)
    network = create_model(model, (1, side, side), 4, 0, normalisation).eval()
    private = [Batch(truth[t], labels[t], torch.full((size,), marked)) for t in range(targets)]
    return truth, labels, observe(network, private, threat=ThreatModel.of(*grants), num_classes=4, **how)


def psnr(truth, guess):
    mse = (truth - guess).square().flatten(1).mean(1)
    return -10 * mse.log10()


def adapted(search, seen, choice=""):
    """Return the search of an attacker who plays a countermove."""
    return turned(search, seen, countermove(seen, choice))


def run(attack, seen, seed=0):
    return attack(seen, torch.Generator().manual_seed(seed))
