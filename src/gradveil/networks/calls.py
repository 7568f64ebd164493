"""Which layers a network calls, and in what order: found by tracing its code, or by running one blank image."""

import copy
from typing import NamedTuple

import torch
import torch.fx
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradveil.networks.watch import LayerCall, watch


class _Tracer(torch.fx.Tracer):
    """Tracer that treats the user's own layers as leaves too, e.g. subclasses of nn.Conv2d."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or not any(m.children())


def traced_calls(network: nn.Module) -> list[torch.fx.Node]:
    """Return all calls of layers in the order of execution, without an image; empty if the network can't be traced."""
    try:
        nodes = _Tracer().trace(network).nodes
    except Exception:
        return []
    return [node for node in nodes if node.op == "call_module"]


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        name: the layer's name in the network.
        layer: the layer itself, in a copy of the network.
        given: the autograd node that computed the layer's input, or None.
        made: the autograd node that computed the layer's output, or None.
    """

    name: str
    layer: nn.Module
    given: Node | None
    made: Node | None

    def feeds(self, other: "Call") -> bool:
        """Return whether the other call takes this call's output directly, with no operation in between."""
        return self.made is not None and self.made is other.given


class Calls(NamedTuple):
    """The calls of layers in one forward pass, in order, and the last autograd node."""

    layers: list[Call]
    last: Node | None

    def steps(self, stop: Node | None = None) -> set[Node]:
        """Return all autograd nodes that lead to the network's output; paths through ``stop`` end there."""
        found, left = set[Node](), [self.last]
        while left:
            step = left.pop()
            if step is not None and step not in found:
                found.add(step)
                left += [before for before, _ in step.next_functions] if step is not stop else []
        return found

    def uses(self, step: Node | None) -> int:
        """Return how many nodes on the way to the output use this node's result."""
        return sum(before is step for user in self.steps() for before, _ in user.next_functions)


def calls_on_blank(network: nn.Module, shape: tuple[int, int, int]) -> Calls:
    """Run a copy of the network, in evaluation mode, on one blank image of shape (C, H, W), and return its calls."""
    network = copy.deepcopy(network).eval()
    found, given = list[Call](), list[Node | None]()

    def begin(call: LayerCall) -> None:
        given.append(_step(call.inputs[0] if call.inputs else None))

    def end(call: LayerCall) -> None:
        found.append(Call(call.name, call.layer, given.pop(), _step(call.output)))

    like = next(network.parameters())
    with watch(network, before=begin, after=end), torch.enable_grad():
        blank = torch.zeros(
            1, *shape, device=like.device, requires_grad=True
        ).clone()  # a copy, for a layer may work in place
        return Calls(found, _step(network(blank)))


def _step(value: object) -> Node | None:
    return value.grad_fn if isinstance(value, Tensor) else None
