"""The best informed attacker: one who knows all images of a client but one, and takes their part off the update."""

from dataclasses import replace

import torch

from gradveil.threat.seen import Seen
from gradveil.types import Batch, Tensors, Update


def alone(one: Seen, place: int, others: Tensors, lr: float) -> Seen:
    r"""Return a client's round as if it had a single image: what is left for someone who knows all the others.

    A client that sends the noisy mean of n contributions, :math:`-\eta (\sum_i g_i + z) / n`, sends for such an
    attacker :math:`-\eta (g_j + z)`, with the same noise. The same goes for the mean of several clients.

    Args:
        one: the round; its update is one step on the mean over ``num_examples`` images.
        place: the position of the unknown image among the private ones.
        others: the sum of the other images' contributions to the gradient, by name.
        lr: the learning rate of the round.
    """
    count = one.update.num_examples
    left = {name: change.double() * count + lr * others[name].double() for name, change in one.update.tensors.items()}
    kept = Update({name: left[name].to(change) for name, change in one.update.tensors.items()}, 1, one.update.buffers)
    unknown = torch.tensor([place], device=one.private.labels.device)
    private: Batch = one.private[unknown]
    return replace(one, private=private, encodings=private, update=kept, clients=1)
