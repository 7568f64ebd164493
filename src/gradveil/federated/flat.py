r"""A network whose tensors live in one vector, so that receiving, stepping and sending are single operations.

The vector is laid out as::

    [ private parameters | shared parameters | shared buffers | private buffers ]
      \_________ trained __________/
                           \___________ shared ___________/

Both the trained and the shared part are contiguous. Integer buffers (BatchNorm's ``num_batches_tracked``) stay outside:
they are never sent, and every client's round begins with their initial value. So do all tensors of a frozen trunk
(`gradveil.models.trunk`), which never change. Other parameters that do not require a gradient count as buffers: they
are broadcast but not trained.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.errors import ConfigError
from gradveil.models.trunk import frozen_names
from gradveil.types import Tensors, Update


@dataclass(frozen=True)
class Place:
    """The place of a tensor in the vector. Convolution kernels are stored channels last, which is faster on a CPU."""

    name: str
    shape: torch.Size
    start: int
    stop: int

    def of(self, vector: Tensor, offset: int = 0) -> Tensor:
        """Return the view of this tensor in a vector that starts ``offset`` entries later."""
        piece = vector[self.start - offset : self.stop - offset]
        if len(self.shape) != 4:
            return piece.view(self.shape)
        channels_out, channels_in, height, width = self.shape
        return piece.view(channels_out, height, width, channels_in).permute(0, 3, 1, 2)

    def flatten(self, tensor: Tensor) -> Tensor:
        """Return the tensor's entries in the vector's order: the inverse of ``of``."""
        return (tensor.permute(0, 2, 3, 1) if len(self.shape) == 4 else tensor).reshape(-1)


class FlatModel:
    """A network whose floating-point tensors are views of one vector.

    Attributes:
        module: the network; its parameters and buffers are views of ``values``.
        values: all floating-point tensors, one after the other.
        gradients: the gradient of the trained part, filled by ``backward``.
        trained: the slice of ``values`` that training changes directly.
        shared: the slice of ``values`` that is broadcast and sent.
    """

    def __init__(self, module: nn.Module, private: Callable[[str], bool] = lambda _: False) -> None:
        groups: list[dict[str, Tensor]] = [{}, {}, {}, {}]
        frozen = frozen_names(module)
        for name, parameter in module.named_parameters():
            if name in frozen:
                continue
            hidden = private(name)
            groups[(0 if hidden else 1) if parameter.requires_grad else (3 if hidden else 2)][name] = parameter
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and name not in frozen:
                groups[3 if private(name) else 2][name] = buffer
        kinds = {(tensor.dtype, tensor.device) for group in groups for tensor in group.values()}
        if len(kinds) != 1:
            raise ConfigError(
                "All floating-point tensors of a model must have one dtype and one device, "
                f"got {', '.join(sorted(map(str, kinds))) or 'a model without any'}."
            )
        self.module = module
        self._integers = {buffer: buffer.clone() for buffer in module.buffers() if not buffer.is_floating_point()}
        places = [self._places(groups, index) for index in range(4)]
        sizes = [sum(tensor.numel() for tensor in group.values()) for group in groups]
        (dtype, device) = kinds.pop()
        self.values = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.trained = slice(0, sizes[0] + sizes[1])
        self.shared = slice(sizes[0], sizes[0] + sizes[1] + sizes[2])
        self.gradients = torch.zeros(self.trained.stop, dtype=dtype, device=device)
        self._trained = places[0] + places[1]
        self._shared_parameters, self._shared_buffers = places[1], places[2]
        self._private = places[0] + places[3]
        tensors = {name: tensor for group in groups for name, tensor in group.items()}
        with torch.no_grad():
            for place in (place for group in places for place in group):
                view = place.of(self.values)
                view.copy_(tensors[place.name])
                tensors[place.name].data = view
            for place in self._trained:
                tensors[place.name].grad = place.of(self.gradients)

    @staticmethod
    def _places(groups: list[dict[str, Tensor]], index: int) -> list[Place]:
        position = sum(tensor.numel() for group in groups[:index] for tensor in group.values())
        places = []
        for name, tensor in groups[index].items():
            places.append(Place(name, tensor.shape, position, position + tensor.numel()))
            position += tensor.numel()
        return places

    @property
    def shared_names(self) -> list[str]:
        """Return the names of all tensors that are broadcast and sent."""
        return [place.name for place in self._shared_parameters + self._shared_buffers]

    @property
    def has_private(self) -> bool:
        """Return whether any tensor stays on the device."""
        return bool(self._private)

    def receive(self, shared: Tensor) -> None:
        """Overwrite the shared part with the server's vector, and reset integer buffers to their initial values."""
        with torch.no_grad():
            self.values[self.shared].copy_(shared)
            for buffer, start in self._integers.items():
                buffer.copy_(start)

    def shared_tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """Return a vector of the shared part's size as tensors by name (views)."""
        places = self._shared_parameters + self._shared_buffers
        return {place.name: place.of(vector, self.shared.start) for place in places}

    def shared_vector(self, tensors: Tensors) -> Tensor:
        """Return the shared part's vector from tensors by name: the inverse of `shared_tensors`."""
        places = self._shared_parameters + self._shared_buffers
        _check_fit(places, tensors, "A received model")
        return torch.cat([place.flatten(tensors[place.name]) for place in places]).to(self.values)

    def gradient(self) -> dict[str, Tensor]:
        """Return the gradient by parameter name (views of ``gradients``)."""
        return {place.name: place.of(self.gradients) for place in self._trained}

    def set_gradient(self, gradient: Tensors) -> None:
        """Copy a gradient by name into ``gradients``."""
        for place in self._trained:
            place.of(self.gradients).copy_(gradient[place.name])

    def to_update(self, change: Tensor, num_examples: int) -> Update:
        """Return a vector of the shared part's size as an `Update` (views)."""
        offset = self.shared.start
        return Update(
            {place.name: place.of(change, offset) for place in self._shared_parameters},
            num_examples,
            {place.name: place.of(change, offset) for place in self._shared_buffers},
        )

    def to_vector(self, update: Update) -> Tensor | None:
        """Return the inverse of `to_update`, or None if the update's names, shapes or types are not the model's."""
        pairs = [(place, update.tensors.get(place.name)) for place in self._shared_parameters]
        pairs += [(place, update.buffers.get(place.name)) for place in self._shared_buffers]
        fits = len(update.tensors) + len(update.buffers) == len(pairs) and all(
            tensor is not None and tensor.shape == place.shape and tensor.dtype == self.values.dtype
            for place, tensor in pairs
        )
        if not fits:
            return None
        return torch.cat([place.flatten(tensor) for place, tensor in pairs if tensor is not None])

    def private_tensors(self) -> dict[str, Tensor]:
        """Return copies of the tensors that stay on the device."""
        return {place.name: place.of(self.values).clone() for place in self._private}

    def set_private(self, tensors: Tensors) -> None:
        """Overwrite the tensors that stay on the device."""
        _check_fit(self._private, tensors, "A client's private tensors")
        with torch.no_grad():
            for place in self._private:
                place.of(self.values).copy_(tensors[place.name])


def _check_fit(places: Sequence[Place], tensors: Tensors, whose: str) -> None:
    """Raise unless every place has its tensor: server and client may lock different blocks, or differ in key length."""
    for place in places:
        found = tensors.get(place.name)
        if found is None or found.shape != place.shape:
            got = "none" if found is None else f"shape {tuple(found.shape)}"
            raise ConfigError(
                f"{whose} must have {place.name} of shape {tuple(place.shape)}, got {got}. "
                "All clients and the server must have one model and one defence, with the same settings."
            )
