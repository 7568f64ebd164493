"""BatchNorm in training mode for many batches at once: each group of examples is a batch of its own."""

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNormOfGroups(_BatchNorm):
    r"""Normalise each group of consecutive examples by the mean and variance of that group.

    .. math:: \gamma \frac{x - \mu_g}{\sqrt{\sigma_g^2 + \epsilon}} + \beta

    It computes what a BatchNorm in training mode computes for each group alone, in plain arithmetic, which can be
    differentiated twice and vectorised. Running statistics are neither used nor kept. Scale and shift are those of the
    given layer, under the same names.

    Args:
        layer: the BatchNorm to stand in for; not changed.
        size: examples per group; 0 takes all examples as one group.

    Example:
        >>> import torch
        >>> layer = BatchNormOfGroups(torch.nn.BatchNorm1d(1, affine=False), size=2)
        >>> layer(torch.tensor([[1.0], [3.0], [10.0], [30.0]])).round(decimals=3).flatten().tolist()
        [-1.0, 1.0, -1.0, 1.0]
    """

    def __init__(self, layer: _BatchNorm, size: int) -> None:
        super().__init__(layer.num_features, layer.eps, affine=False, track_running_stats=False)
        for name in ("weight", "bias"):
            del self._parameters[name]
            setattr(self, name, getattr(layer, name))  # a Parameter, or None if the layer has none
        self.affine, self.size = layer.affine, size
        self.train(layer.training)

    def normalised(self, inputs: Tensor) -> Tensor:
        """Return the inputs (N, C, ...) before scale and shift."""
        groups = inputs.reshape(-1, self.size or len(inputs), *inputs.shape[1:])  # (groups, size, C, ...)
        axes = tuple(axis for axis in range(1, groups.dim()) if axis != 2)
        centred = groups - groups.mean(axes, keepdim=True)
        return (centred * (centred.square().mean(axes, keepdim=True) + self.eps).rsqrt()).reshape(inputs.shape)

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise, scale and shift."""
        result = self.normalised(inputs)
        shape = (-1, *[1] * (inputs.dim() - 2))
        if self.weight is not None:
            result = result * self.weight.view(shape)
        return result if self.bias is None else result + self.bias.view(shape)
