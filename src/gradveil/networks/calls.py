"""Which layers a network calls, and in what order: by tracing its code, or by a look at one blank image's way."""

import copy
from typing import NamedTuple

import torch
import torch.fx
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradveil.networks.watch import LayerCall, watch


class _Tracer(torch.fx.Tracer):
    """Leaves layers of the user's own whole too, e.g. subclasses of nn.Conv2d."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or not any(m.children())


def traced_calls(network: nn.Module) -> list[torch.fx.Node]:
    """All calls of layers in the order of execution, without an image; none where the network can't be traced."""
    try:
        nodes = _Tracer().trace(network).nodes
    except Exception:
        return []
    return [node for node in nodes if node.op == "call_module"]


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        name: of the layer.
        layer: itself, in a copy of the network.
        given: the step of the computation that the layer was given the result of, as autograd knows it.
        made: the step that made the layer's own result.
    """

    name: str
    layer: nn.Module
    given: Node | None
    made: Node | None

    def feeds(self, other: "Call") -> bool:
        """Whether the other one is given this one's result itself, with nothing done in between."""
        return self.made is not None and self.made is other.given


class Calls(NamedTuple):
    """What a network does with an image: its calls of layers, in order, and the last step of the computation."""

    layers: list[Call]
    last: Node | None

    def steps(self, stop: Node | None = None) -> set[Node]:
        """All steps that the network's result comes from; those before ``stop`` only if they reach it around that."""
        found, left = set[Node](), [self.last]
        while left:
            step = left.pop()
            if step is not None and step not in found:
                found.add(step)
                left += [before for before, _ in step.next_functions] if step is not stop else []
        return found

    def uses(self, step: Node | None) -> int:
        """How often a step's result is used on the way to the network's."""
        return sum(before is step for user in self.steps() for before, _ in user.next_functions)


def calls_on_blank(network: nn.Module, shape: tuple[int, int, int]) -> Calls:
    """What a copy of the network, in evaluation, does with one blank image of shape (C, H, W)."""
    network = copy.deepcopy(network).eval()
    found, given = list[Call](), list[Node | None]()

    def begin(call: LayerCall) -> None:
        given.append(_step(call.inputs[0] if call.inputs else None))

    def end(call: LayerCall) -> None:
        found.append(Call(call.name, call.layer, given.pop(), _step(call.output)))

    like = next(network.parameters())
    with watch(network, before=begin, after=end), torch.enable_grad():
        blank = torch.zeros(1, *shape, device=like.device, requires_grad=True).clone()  # which may be changed in place
        return Calls(found, _step(network(blank)))


def _step(value: object) -> Node | None:
    return value.grad_fn if isinstance(value, Tensor) else None
