"""A search's step, traced once with all its derivatives and compiled to machine code by TorchInductor."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]


def compiled(function: Function, examples: tuple[Tensor, ...]) -> Function:
    """The same function for inputs of these shapes, compiled; takes some 20 s and a C++ compiler.

    The function may differentiate inside: what is compiled is the graph of all operations that it runs. Any failure
    (no compiler, an operation without a rule) is raised as it comes.
    """
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor import compile as inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's, of its own dependencies
        traced = make_fx(function)(*examples)
        shared = fx_graph_cse(traced.graph)  # what two derivatives both need is computed once
        with torch.no_grad():
            fast = inductor(torch.fx.GraphModule(traced, shared), list(examples))

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(fast(*inputs))

    return run
