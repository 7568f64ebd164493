"""The network and the training script of `nvflare_simulator.py`: one step of SGD on eight digits per site."""

from collections import OrderedDict

import nvflare.client as flare
import torch
from torch import nn

from gradveil.data import load_dataset
from gradveil.models import create_model

IMAGES, LR = 8, 0.1


class Net(nn.Sequential):
    """The zoo's lenet-dlg as a class that NVFlare can build again, with the same names of parameters."""

    def __init__(self) -> None:
        super().__init__(OrderedDict(create_model("lenet-dlg", (1, 28, 28), 10, seed=0).named_children()))


def main() -> None:
    """Train one site: a step per round."""
    torch.set_num_threads(1)
    digits, model = load_dataset("mnist-5k").train, Net()
    flare.init()
    first = IMAGES * (int(flare.get_site_name().rpartition("-")[2]) - 1)
    images = torch.from_numpy(digits.images[first : first + IMAGES]).float().div(255).reshape(-1, 1, 28, 28)
    labels = torch.from_numpy(digits.labels[first : first + IMAGES]).long()
    while flare.is_running():
        model.load_state_dict(flare.receive().params)
        optimiser = torch.optim.SGD(model.parameters(), lr=LR)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimiser.step()
        flare.send(flare.FLModel(params=model.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": 1}))


if __name__ == "__main__":
    main()
