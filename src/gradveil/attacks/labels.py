"""Label counts: how often each class occurs among a client's images, from the last layer's change."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import Attack
from gradveil.attacks.parts.label_counts import POINTS, class_outputs, class_shares, rounded
from gradveil.attacks.parts.labels import counted, known_or_recovered, last_layer, likely_prediction
from gradveil.threat import Knowledge, Observation, Reconstruction
from gradveil.validate import in_range


@dataclass(frozen=True)
class Labels(Attack):
    r"""Count the labels behind an update, and look for no pictures.

    .. math:: \frac{n_c}{B} = \bar p_c - \bar g_c, \qquad \bar g = -\frac{\Delta b}{\eta \sum_k w_k}

    with the last layer's mean bias gradient :math:`\bar g` over all local steps (its change :math:`\Delta b` over the
    learning rate times the sum of the steps' weights) and the network's mean output :math:`\bar p` on the client's
    images. With public images, the output on each class is known and the counts solve linear equations
    (`gradveil.attacks.parts.label_counts`); without them, :math:`\bar p` is estimated on noise. One layer is looked at
    once, so that the number of images and of local steps does not matter.

    Needs: the number of examples and, for several local steps, how clients train. Granted labels are not used. Public
    images help much if the network is trained.
    Fails: on well-trained networks, whose outputs on private images are close to their labels, so that both terms
    cancel; if a defence changes the last layer. Does not adapt to a known defence.
    Reference: Wainakh et al. 2022 (LLG), https://arxiv.org/abs/2105.09369; for one image Zhao et al. 2020 (iDLG),
    https://arxiv.org/abs/2001.02610.
    Differs from the paper: finds all counts at once, so that they sum to the number of images, where LLG takes one
    label after the other; averages estimated outputs over models on the client's way.

    Attributes:
        prior: with public images, how much their classes' shares count beside the update; chosen on MNIST.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.NUM_EXAMPLES})
    ignores: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS})
    replays: ClassVar[bool] = True
    seeks: ClassVar[str] = "labels"

    prior: float = 0.01

    def __post_init__(self) -> None:
        in_range("prior", self.prior, 0)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Count the labels of every target; there are no pictures, and no loss to choose by."""
        labels = self._counted(seen)
        like = next(iter(seen.updates.values()))
        images = like.new_full((*labels.shape, *seen.shape), torch.nan)
        return Reconstruction(
            images=images,
            labels=labels.to(like.device),
            loss=images[:, 0, 0, 0, 0],
            converged=torch.ones(len(labels), dtype=torch.bool, device=like.device),
        )

    def _counted(self, seen: Observation) -> Tensor:
        weight, bias = last_layer(seen, seen.mean_gradients)
        if seen.num_examples == 1:
            return known_or_recovered(seen)
        if bias is None or not seen.knows(Knowledge.PUBLIC_DATA):
            return counted(weight, bias, seen.num_examples, likely_prediction(seen, POINTS))
        public = seen.public_data
        prior = torch.bincount(public.labels.cpu(), minlength=seen.num_classes) / len(public)
        outputs = class_outputs(seen, public)
        shares = [class_shares(*each, prior, self.prior) for each in zip(bias, outputs, strict=True)]
        return torch.stack([rounded(each, seen.num_examples) for each in shares])
