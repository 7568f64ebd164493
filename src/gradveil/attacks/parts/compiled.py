"""Compile the step of a search: trace it once with all its derivatives, then compile it by TorchInductor."""

import warnings
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, fx

Function = Callable[..., tuple[Tensor, ...]]

_KEPT = 16
_known: OrderedDict[tuple[object, ...], Function] = OrderedDict()
"""Compiled graphs by their text and inputs. Weights are inputs too, so networks of one architecture share a graph."""


def compiled(function: Function, examples: tuple[Tensor, ...]) -> Function:
    """Return the function compiled for inputs of these shapes; takes about 20 s, or 2 s if the graph is known.

    Needs a C++ compiler. The function may differentiate inside: the graph of all operations that it runs is compiled.
    Any failure (no compiler, an operation without a rule) is raised unchanged.
    """
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor import compile as inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the compiler warns about its own dependencies
        with torch.enable_grad():
            traced = make_fx(function)(*examples)
        graph = fx_graph_cse(traced.graph)  # compute once what two derivatives share
        constants = _as_inputs(graph, traced)
        inputs = [*examples, *constants]
        shapes = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in inputs)
        key = (graph.python_code("self").src, shapes, torch.get_num_threads())
        if key not in _known:
            _known[key] = inductor(fx.GraphModule(torch.nn.Module(), graph), list(inputs))
        _known.move_to_end(key)
        while len(_known) > _KEPT:
            _known.popitem(last=False)
    fast = _known[key]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(fast(*given, *constants))

    return run


def _as_inputs(graph: fx.Graph, traced: fx.GraphModule) -> list[Tensor]:
    """Turn the constants of the trace into additional inputs, and return them."""
    constants = []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        constants.append(getattr(traced, node.target).detach())
        with graph.inserting_after(last):
            last = graph.placeholder(f"constant_{len(constants)}")
        last.meta = node.meta
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    return constants
