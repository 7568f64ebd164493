"""No defence: the baseline that all defences are compared with."""

from dataclasses import dataclass
from typing import ClassVar

from gradveil.defences.base import Defence


@dataclass(frozen=True)
class None_(Defence):  # noqa: N801 - `None` is a keyword
    """Send the update unchanged.

    Threat model: none; this is the undefended baseline.
    Does not protect: against anything.
    Guarantee: none.
    Reference: McMahan et al. 2017, https://arxiv.org/abs/1602.05629.
    Differs from the paper: nothing.
    """

    name: ClassVar[str] = "none"
    post_processing: ClassVar[bool] = True
