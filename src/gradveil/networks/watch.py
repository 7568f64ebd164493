"""Which layers of a network run, with what inputs and outputs: the only place that registers forward hooks.

`watch` calls a function before or after each run of chosen layers, and can replace outputs. `record` keeps all calls,
and `inputs_of` the latest input of each layer. Hooks are always removed at the end of the ``with`` block.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, nn


class LayerCall(NamedTuple):
    """One call of a layer.

    Attributes:
        name: the layer's name in the network; "" is the network itself.
        number: 0 for the layer's first call within the ``with`` block, 1 for its second, and so on.
        layer: the layer itself.
        inputs: its positional arguments.
        output: its result, or None before it has run.
    """

    name: str
    number: int
    layer: nn.Module
    inputs: tuple[Any, ...]
    output: Any = None


@contextmanager
def watch(
    network: nn.Module,
    names: Iterable[str] | None = None,
    *,
    before: Callable[[LayerCall], None] | None = None,
    after: Callable[[LayerCall], Tensor | None] | None = None,
) -> Iterator[None]:
    """Call functions before and after each run of the named layers, within a ``with`` block.

    Args:
        network: the network to watch.
        names: the layers; None means all of them and the network itself.
        before: called with a layer's inputs, before the layer can change them in place.
        after: called with a layer's inputs and output; a tensor that it returns replaces the output.

    Example:
        >>> network, order = nn.Sequential(nn.Flatten(), nn.ReLU()), []
        >>> with watch(network, after=lambda call: order.append(call.name)):
        ...     output = network(Tensor([[1.0]]))
        >>> order
        ['0', '1', '']
    """
    wanted = [name for name, _ in network.named_modules()] if names is None else list(names)
    with ExitStack() as hooks:
        for name in wanted:
            layer = network.get_submodule(name)
            if before is not None:
                hooks.callback(layer.register_forward_pre_hook(_before(name, before)).remove)
            if after is not None:
                hooks.callback(layer.register_forward_hook(_after(name, after)).remove)
        yield


@contextmanager
def record(network: nn.Module, names: Iterable[str] | None = None) -> Iterator[list[LayerCall]]:
    """Yield a list that each call of the named layers is appended to, in the order in which the calls end.

    The tensors are those of the forward pass: a later layer may change them in place.

    Example:
        >>> relu = nn.ReLU()
        >>> with record(nn.Sequential(relu, nn.Flatten(), relu), ["0"]) as calls:
        ...     output = relu(relu(Tensor([-1.0])))
        >>> [(call.name, call.number, call.inputs[0].item()) for call in calls]
        [('0', 0, -1.0), ('0', 1, 0.0)]
    """
    calls: list[LayerCall] = []
    with watch(network, names, after=calls.append):
        yield calls


@contextmanager
def inputs_of(network: nn.Module, names: Iterable[str]) -> Iterator[Mapping[str, Tensor]]:
    """Yield a mapping that holds the latest input of each named layer after a forward pass."""
    latest: dict[str, Tensor] = {}

    def keep(call: LayerCall) -> None:
        latest[call.name] = call.inputs[0]

    with watch(network, names, before=keep):
        yield latest


def input_of(network: nn.Module, name: str, images: Tensor) -> Tensor:
    """Return what a named layer gets if the network sees these images in [0, 1], which it normalises itself."""
    with inputs_of(network, [name]) as latest:
        network(images)
    return latest[name]


def _before(name: str, function: Callable[[LayerCall], None]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    numbers = count()

    def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        function(LayerCall(name, next(numbers), layer, inputs))

    return hook


def _after(
    name: str, function: Callable[[LayerCall], Tensor | None]
) -> Callable[[nn.Module, tuple[Any, ...], object], Tensor | None]:
    numbers = count()

    def hook(layer: nn.Module, inputs: tuple[Any, ...], output: object) -> Tensor | None:
        return function(LayerCall(name, next(numbers), layer, inputs, output))

    return hook
