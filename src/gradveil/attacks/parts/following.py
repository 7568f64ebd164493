"""What follows the first Linear layer of a network: a ReLU, and the next Linear layer."""

import torch
from torch import Tensor, nn

from gradveil.networks.calls import calls_on_blank
from gradveil.networks.watch import LayerCall, inputs_of, watch


def relu_follows(network: nn.Module, shape: tuple[int, int, int], name: str) -> bool:
    """Return whether the output of the layer goes into a ReLU and nowhere else."""
    calls = calls_on_blank(network, shape)
    made = [call.made for call in calls.layers if call.name == name]
    if len(made) != 1 or made[0] is None:
        return False
    users = [step for step in calls.steps() if any(before is made[0] for before, _ in step.next_functions)]
    return bool(users) and all(step.name().startswith("ReluBackward") for step in users)


def next_linear(network: nn.Module, shape: tuple[int, int, int], name: str) -> str:
    """Return the name of the Linear layer whose input is the ReLU of the named layer's output, or "" if none is.

    The network runs on two random images, in evaluation mode.
    """
    probe = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)).to(next(network.parameters()))
    names = [one for one, layer in network.named_modules() if isinstance(layer, nn.Linear) and one != name]
    made: list[Tensor] = []

    def keep(call: LayerCall) -> None:
        made.append(call.output.detach().clone())

    training = network.training
    with torch.no_grad(), inputs_of(network, names) as reached, watch(network, [name], after=keep):
        network.eval()(probe)
        network.train(training)
    wanted = made[0].relu()
    equal = (one for one in names if one in reached and torch.equal(reached[one], wanted))
    return next(equal, "")
