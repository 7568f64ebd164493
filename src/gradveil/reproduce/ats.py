"""ATS (Gao et al. 2021): the search for policies, and attacks in the first training steps (Balunovic et al. 2022)."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.attacks.gs import Gs
from gradveil.attacks.untransform import Untransform
from gradveil.data import Dataset, Split, load_dataset
from gradveil.data.pixels import to_batch
from gradveil.defences import build_defence
from gradveil.defences.ats import policy_of, random_signs, transformed
from gradveil.defences.parts.policies import Candidate, PolicySearch, accuracy_score, privacy_scores, search_policies
from gradveil.federated.client import Broadcast, Device, Streams, play_client
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.metrics.psnr import Psnr
from gradveil.models import create_model
from gradveil.randomness import stream
from gradveil.reproduce.base import Experiment, Lab, Paper, Result, rounded
from gradveil.secret_stream import SecretStream
from gradveil.threat import Observation, PublicKnowledge, Reconstruction, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch

MODEL = "lenet-dlg:activation=relu,init=default"
PUBLISHED = ("21-13-3", "7-4-15")
SHOWN = 10
KEPT = 63
"""Approximate number of images in the authors' accuracy score: one per class among 100 images of CIFAR-100."""


def _images(split: Split, rows: np.ndarray) -> Batch:
    return to_batch(split.images[rows], split.labels[rows])


def _network(dataset: Dataset, seed: int) -> nn.Module:
    return create_model(MODEL, dataset.shape, dataset.num_classes, seed)


def _trained(lab: Lab, dataset: Dataset, spec: str, steps: int, epochs: int = 1) -> nn.Module:
    """Return a network after ``steps`` steps of 32 images per epoch under a defence."""
    net = FlatModel(_network(dataset, lab.seed), lambda name: False)
    received = net.values[net.shared].clone()
    if steps:
        order = torch.randperm(len(dataset.train), generator=stream(lab.seed, "ats", "train"))
        device = Device(_images(dataset.train, order[: 32 * steps].numpy()))
        streams = Streams(SecretStream(lab.seed, "ats", "client"), SecretStream(lab.seed, "ats", "batches"))
        how = LocalSettings(epochs=epochs, batch_size=32, momentum=0.9)
        play_client(net, device, Broadcast(received, lr=0.01), build_defence(spec), how, streams)
    return net.module.eval()


def _under(policy: str, images: Tensor, rng: SecretStream) -> Tensor:
    steps = policy_of(policy)
    return transformed(images, steps, random_signs(len(images), len(steps), rng))


def search(lab: Lab) -> Result:
    """Rank random policies that keep enough accuracy by privacy, and score the published policies."""
    dataset = load_dataset("cifar10", lab.data_root)
    candidates, looked = lab.pick(3, 60, 1600), lab.pick(8, 50, 100)
    semi = _trained(lab, dataset, "none", lab.pick(2, 40, 156), epochs=lab.pick(1, 5, 100))
    fresh = _network(dataset, lab.seed).eval()
    batch = _images(dataset.test, np.arange(looked))
    least = -85.0 * looked / KEPT
    wanted = PolicySearch(candidates, least_accuracy=least, privacy_images=lab.pick(4, 16, 50))
    found = search_policies(
        semi, fresh, batch, _under, wanted, SecretStream(lab.seed, "ats", "search"),
        progress=lambda share: lab.progress(share, "policies"),
    )  # fmt: skip
    rng = SecretStream(lab.seed, "ats", "published")
    for policy in PUBLISHED:
        images = _under(policy, batch.images, rng)
        few = slice(0, lab.pick(4, 16, 50))
        privacy = float(privacy_scores(semi, images[few], batch.labels[few], rng).mean())
        found.append(Candidate(policy, privacy, accuracy_score(fresh, images)))
    shown = [*found[:SHOWN], *found[-len(PUBLISHED) :]] if len(found) > SHOWN + len(PUBLISHED) else found
    rows = [
        {"policy": each.policy, "published": each.policy in PUBLISHED, "privacy": rounded(each.privacy),
         "accuracy": rounded(each.accuracy), "enough": each.accuracy >= least}
        for each in shown
    ]  # fmt: skip
    notes = [
        f"{candidates:,} random policies of one to three operations (the paper: 1,600), {looked} test images, {MODEL}. "
        f"The authors require an accuracy score of -85 on about {KEPT} images, or {least:.3g} on {looked} images.",
        "Lower privacy scores hide more; higher accuracy scores keep more accuracy.",
    ]
    return Result(rows, notes)


def early(lab: Lab) -> Result:
    """Attack networks by gradient inversion after few training steps under the hybrid policy."""
    dataset = load_dataset("cifar10", lab.data_root)
    spec, count = "ats", lab.pick(2, 8, 32)
    order = torch.randperm(len(dataset.train), generator=stream(lab.seed, "ats", "targets"))[:count]
    private = _images(dataset.train, order.numpy())
    public = _images(dataset.test, np.arange(500))
    rows: list[dict[str, Any]] = []
    stages = lab.pick((0, 2), (0, 1, 10, 50, 200), (0, 1, 5, 10, 20, 50, 200, 1000))
    for done, steps in enumerate(stages):
        lab.progress(done / len(stages), f"after {steps} steps")

        def work(steps: int = steps) -> dict[str, float | None]:
            return _inverted(lab, dataset, _trained(lab, dataset, spec, steps), spec, private, public)

        rows.append({"steps": steps} | lab.once(("early", spec, steps, count), work))
    lab.progress(1.0, "done")
    notes = [
        f"{MODEL}, one CIFAR-10 image per gradient, labels known, policy 21-13-3+7-4-15, {count} attacked images; "
        "training takes 32 images per step.",
        "Balunovic et al. invert batches of 32 after 1 to 50 steps; they find that ATS does not protect this early.",
    ]
    return Result(rows, notes)


def _inverted(
    lab: Lab, dataset: Dataset, network: nn.Module, spec: str, private: Batch, public: Batch
) -> dict[str, float | None]:
    """Return the mean PSNR of gradient inversion on single images, before and after undoing the policy."""
    seen = observe(
        network,
        [private[slice(i, i + 1)] for i in range(len(private))],
        threat=ThreatModel.of("labels", "num-examples", "defence", "public-data", "encodings"),
        num_classes=dataset.num_classes,
        defence=build_defence(spec),
        public=PublicKnowledge(public),
        federation=Federation(seed=lab.seed),
    )
    attack = Gs(iterations=lab.pick(5, 1000, 2000), tv=1e-5, sign="none", schedule="cosine")
    found = attack.run(seen, stream(lab.seed, "ats", "gs"))
    back = Untransform().decode(found, seen, stream(lab.seed, "ats", "decode"))
    shown, guess, decoded = seen.encodings.images, found.images.flatten(0, 1), back.images.flatten(0, 1)
    pairs = {
        "psnr_to_transformed": (shown, guess), "psnr_to_private": (private.images, guess),
        "psnr_undone": (private.images, decoded), "psnr_undone_from_exact": (private.images, _exact(seen, back)),
    }  # fmt: skip
    return {name: rounded(float(Psnr()(*pair).mean())) for name, pair in pairs.items()}


def _exact(seen: Observation, back: Reconstruction) -> Tensor:
    """Undo the policy on the true transformed images."""
    shown = seen.encodings.images.view_as(back.images)
    return Untransform().decode(replace(back, images=shown), seen, torch.Generator()).images.flatten(0, 1)


PAPER = Paper(
    "ats",
    "Gao et al. 2021, Privacy-preserving Collaborative Learning with Automatic Transformation Search, CVPR",
    {
        "search": Experiment("Policies ranked by their scores", search),
        "early": Experiment("Gradient inversion in the first training steps", early),
    },
)
