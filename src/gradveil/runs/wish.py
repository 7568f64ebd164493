"""A wish for protection: what is protected, against whom, and what it may cost."""

import math
from dataclasses import asdict, dataclass, replace

from scipy.special import ndtri

from gradveil.config import TrainSettings, names_options, setting, with_absolute_paths
from gradveil.defences.parts.gaussian_dp import CANDIDATES, epsilon_of, identification_bound, mu_of
from gradveil.errors import ConfigError
from gradveil.models.base import model_uses_aux
from gradveil.validate import in_range, one_of

DELTA = 1e-5
SERVERS, PROTECTED, PROOFS = ("honest", "malicious"), ("image", "membership", "client"), ("required", "measured")
ROUNDED = 3
"""Digits of mu and of noise in the texts of defences; mu is rounded down and noise up."""


@dataclass(frozen=True)
class Wish:
    """What is to be protected, against whom, and what it may cost. The command line has one option per field."""

    dataset: str = setting("mnist-5k", "A named set (gradveil list datasets), a .npz file or a folder of pictures.")
    model: str = setting("lenet5", "The model that would be trained without protection; accuracy is compared with it.")
    weights: str = setting("", "Weights of that model from public data; a head on its frozen trunk is tried too.")
    aux: str = setting("", "Data set of public images, for features; by default two photographs.")
    server: str = setting("honest", "The server: honest (it sums as agreed) or malicious (it may do anything).")
    protect: str = setting("image", "What is protected: image (its content), membership, or client (all its images).")
    proof: str = setting(
        "required", "required recommends what holds by proof; measured also what no attacker of ours has broken."
    )
    max_loss: float = setting(1.0, "Largest loss of accuracy in percentage points.")
    identified: float = setting(0.02, "Largest chance to pick an image among 1,000, with --protect image.")
    epsilon: float = setting(8.0, "Largest epsilon at delta 1e-5, with --protect membership or client.")
    clients: int = setting(10, "Number of clients.")
    partition: str = setting("iid", "How training images are divided among clients.")
    rounds: int = setting(20, "Rounds of the unprotected training.")
    epochs: int = setting(1, "Local epochs per round of the unprotected training.")
    batch_size: int = setting(32, "Images per local step of the unprotected training.")
    lr: float = setting(0.05, "Learning rate of the unprotected training.")
    held_out: float = setting(0.2, "Share of the training images by which candidates are compared; never test images.")
    seeds: int = setting(3, "Trainings of the recommended configuration in its verification, with different seeds.")
    seed: int = setting(0, "Every random draw comes from this seed; the verification takes it and the next ones.")
    device: str = setting("cpu", "cpu, cuda or cuda:1.")

    @names_options
    def __post_init__(self) -> None:
        one_of("server", self.server, SERVERS)
        one_of("protect", self.protect, PROTECTED)
        one_of("proof", self.proof, PROOFS)
        in_range("max_loss", self.max_loss, 0, 100)
        in_range("identified", self.identified, 1 / CANDIDATES, 1, open_low=True, open_high=True)
        in_range("epsilon", self.epsilon, 0, open_low=True)
        in_range("rounds", self.rounds, 1)
        in_range("held_out", self.held_out, 0, 0.5, open_low=True)
        in_range("seeds", self.seeds, 1, 100)
        self._refuse_contradictions()
        self.reference()

    def _refuse_contradictions(self) -> None:
        """Raise ConfigError if parts of the wish exclude each other."""
        if self.protect == "client" and self.clients < 2:
            raise ConfigError(
                f"clients must be at least 2 to hide one among others, got {self.clients}. Raise --clients."
            )
        right, wrong = ("identified", "epsilon") if self.protect == "image" else ("epsilon", "identified")
        if getattr(self, wrong) != getattr(Wish, wrong):
            raise ConfigError(
                f"{wrong} is no measure of --protect {self.protect}, got {getattr(self, wrong):g}. Use --{right}, or "
                "protect something else."
            )
        if self.proof == "measured" and (self.protect != "image" or self.server != "honest"):
            raise ConfigError(
                f"proof must be required with --protect {self.protect} --server {self.server}: our attackers measure "
                "images that an honest server sees, and nothing else. Drop --proof measured."
            )

    def reference(self) -> TrainSettings:
        """Return the settings of the unprotected training."""
        mine = asdict(self)
        same = {name: mine[name] for name in TrainSettings.__dataclass_fields__ if name in mine}
        aux = self.aux if self.aux and model_uses_aux(self.model) else ""
        return with_absolute_paths(TrainSettings(**same | {"aux": aux}))

    @property
    def mu(self) -> float:
        """The largest mu that keeps the wish, rounded down."""
        exact = (
            ndtri(self.identified) - ndtri(1 / CANDIDATES) if self.protect == "image" else mu_of(self.epsilon, DELTA)
        )
        return float(int(float(exact) * 10**ROUNDED) / 10**ROUNDED)

    def at(self, mu: float) -> "Wish":
        """Return the same wish with another budget, as near as one can be wished."""
        if self.protect == "image":
            return replace(self, identified=min(max(identification_bound(mu), 1.1 / CANDIDATES), 0.999))
        return replace(self, epsilon=max(epsilon_of(mu, DELTA), 1e-3))

    @property
    def whole_epsilon(self) -> float:
        """The largest epsilon at delta that keeps the wish, for mechanisms whose mu is not known.

        What has a chance of 1 / M without an image has at most e^epsilon / M + delta with it.
        """
        return math.log((self.identified - DELTA) * CANDIDATES) if self.protect == "image" else self.epsilon

    @property
    def promise(self) -> str:
        """The wish as a sentence."""
        if self.protect == "image":
            return f"nobody picks a training image among {CANDIDATES:,} with a chance above {self.identified:.1%}"
        whose = "whether an image was used" if self.protect == "membership" else "whether a client took part"
        return f"nobody can tell {whose} (epsilon {self.epsilon:g} at delta {DELTA:g})"
