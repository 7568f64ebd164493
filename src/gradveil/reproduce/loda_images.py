"""The measurements of the LODA paper: inverting and decoding encoded images, and training on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks.decoder import Decoder
from gradveil.attacks.encodings import Encodings
from gradveil.attacks.gs import Gs
from gradveil.attacks.stationarity import Stationarity
from gradveil.attacks.unmix import Unmix
from gradveil.attacks.untransform import Untransform
from gradveil.config import TrainSettings
from gradveil.data import Dataset, Split, load_dataset
from gradveil.data.pixels import to_batch
from gradveil.defences import Client, Defence, build_defence
from gradveil.defences.ats import Ats
from gradveil.defences.loda import Loda
from gradveil.defences.mixup import Mixup
from gradveil.engines.simulation import Simulation
from gradveil.federated.client import Broadcast, Device, Streams, play_client, score
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.metrics import align, score_targets
from gradveil.models import Normalisation, create_model
from gradveil.randomness import stream
from gradveil.reproduce.base import Lab, rounded
from gradveil.secret_stream import SecretStream
from gradveil.storage import PrivateFolder
from gradveil.threat import Observation, PublicKnowledge, Reconstruction, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch, Tensors

ATTACKED = "lenet-dlg"
NOWHERE = Path("no data root")
EXTRACTOR = "resnet20"
MEAN, STD = "0.4914/0.4822/0.4465", "0.2023/0.1994/0.201"
TV = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""The grid from which the paper chooses the weight of total variation."""
REHEARSED = 8
"""Number of public mixtures that the grid is tried on; other defences use as many images as are attacked."""
NUM_PUBLIC = 500
"""Number of test images, taken from the end, that serve as public data; accuracy is measured on the first ones."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements at one scale."""

    targets: int
    rounds: int
    iterations: int
    obscuring: int
    train: int
    unmixing: int
    learn: int
    test: int
    epochs: int
    model: str


def sizes_of(lab: Lab) -> Sizes:
    """Return the sizes of the lab's scale."""
    return lab.pick(
        Sizes(6, 24, 5, 3, 10, 2, 40, 100, 1, "resnet20:width=4"),
        Sizes(8, 400, 300, 500, 150, 12, 200, 2000, 20, "resnet20:width=8"),
        Sizes(16, 800, 24_000, 500, 1000, 40, 50_000, 9500, 200, "resnet18"),
    )


class LodaScene(NamedTuple):
    """The images of one data set: attacked private ones, ones to train and to test on, and public ones."""

    name: str
    private: Batch
    learn: Batch
    test: Batch
    public: Batch


def make_scene(lab: Lab, dataset: Dataset) -> LodaScene:
    """Draw the private and the training images, and split the test images."""
    sizes = sizes_of(lab)
    order = torch.randperm(len(dataset.train), generator=stream(lab.seed, "loda", "targets"))
    private, learn = order[: sizes.targets], order[sizes.targets :][: sizes.learn]
    count = len(dataset.test)
    return LodaScene(
        dataset.name,
        _batch(dataset.train, private.numpy()),
        _batch(dataset.train, learn.numpy()),
        _batch(dataset.test, np.arange(min(sizes.test, count - NUM_PUBLIC))),
        _batch(dataset.test, np.arange(count - NUM_PUBLIC, count)),
    )


def _batch(split: Split, rows: np.ndarray) -> Batch:
    return to_batch(split.images[rows], split.labels[rows])


def loda_spec(lab: Lab, scene: LodaScene, layers: str, c: float) -> str:
    """Return the spec of LODA with an extractor trained on public data."""
    return (
        f"loda:extractor={EXTRACTOR},weights={extractor(lab, scene)},classes=10,mean=0/0/0,std=1/1/1,layers={layers},"
        f"c={c},steps={sizes_of(lab).obscuring}"
    )


def extractor(lab: Lab, scene: LodaScene) -> Path:
    """Train a network without normalisation on the other of CIFAR-10 and SVHN, and return its file of weights."""
    name = svhn(lab) if scene.name == "cifar10" else "cifar10"

    def work() -> Tensors:
        data = load_dataset(name, lab.data_root)
        most = lab.pick(64, 8000, None)
        data = replace(data, train=Split(data.train.images[:most], data.train.labels[:most]))
        settings = TrainSettings(
            dataset=name, model=EXTRACTOR, clients=1, rounds=lab.pick(1, 12, 60), batch_size=64, lr=0.05,
            normalise="none", seed=lab.seed,
        )  # fmt: skip
        with Simulation(settings, dataset=data, workers=0) as simulation:
            for row in simulation.run():
                lab.progress(0.0, f"extractor, epoch {row['round']} of {settings.rounds}")
            return dict(simulation.model)

    return lab.tensors_file(("extractor", name), work)


def svhn(lab: Lab) -> str:
    """Return the path of svhn.npz in the data root if it exists, or else the name of the set."""
    path = (lab.data_root or NOWHERE) / "svhn.npz"
    return str(path) if path.is_file() else "svhn"


# --- Attacks ----------------------------------------------------------------------------------------------------------


def searched_tv(lab: Lab, scene: LodaScene, spec: str) -> float:
    """Return the weight of total variation, out of the paper's grid, that reconstructs public images best.

    The attacker encodes public images by the defence that it knows, inverts their gradients, and compares the
    reconstructions with the encodings.
    """
    defence, sizes = build_defence(spec), sizes_of(lab)

    def work() -> float:
        own = scene.public[slice(sizes.targets)]
        seen = _gradients(lab, scene, own, defence, min(sizes.rounds, REHEARSED), "encodings")
        truth = Encodings().run(seen, stream(lab.seed, "loda", "tv")).images
        misses = []
        for tv in TV:
            found = _inversion(lab, defence, tv, adaptive=True).run(seen, stream(lab.seed, "loda", "tv")).images
            misses.append(float((found - truth).square().flatten(1).mean(1).log().mean()))
        return TV[int(np.nanargmin(misses))]

    return lab.once(("tv", scene.name, spec), work)


def _inversion(lab: Lab, defence: Defence, tv: float, *, adaptive: bool) -> Gs:
    adapt = "" if adaptive and not defence.hides_images else "none"  # encoded images are decoded later
    return Gs(iterations=sizes_of(lab).iterations, tv=tv, sign="none", schedule="cosine", lr=0.1, adapt=adapt)


def _guessed(
    lab: Lab, scene: LodaScene, defence: Defence, tv: float, *, adaptive: bool
) -> tuple[Reconstruction, Observation]:
    """Invert the gradients of single encodings of private images; return reconstructions and observation."""
    seen = _gradients(lab, scene, scene.private, defence, sizes_of(lab).rounds)
    attack = _inversion(lab, defence, tv, adaptive=adaptive)

    def work() -> Tensors:
        found = attack.run(seen, stream(lab.seed, "loda", "gs"))
        return {name: getattr(found, name) for name in ("images", "labels", "loss", "converged")}

    found = lab.tensors_once(("inverted", scene.name, defence.spec, attack.spec), work)
    return Reconstruction(found["images"], found["labels"], found["loss"], found["converged"]), seen


def _gradients(lab: Lab, scene: LodaScene, hidden: Batch, defence: Defence, rounds: int, *knows: str) -> Observation:
    """Return what the server sees of encoded images: one gradient per image, or per round for mixtures."""
    mixes = isinstance(defence, Mixup)
    network = create_model(ATTACKED, _shape(hidden), 10, lab.seed).eval()
    clients = [hidden] if mixes else [hidden[slice(i, i + 1)] for i in range(len(hidden))]
    return observe(
        network,
        clients,
        threat=ThreatModel.of("labels", "num-examples", "defence", "public-data", *knows),
        num_classes=10,
        defence=defence,
        protocol=Protocol(LocalSettings("fedsgd", batch_size=1, batch_norm="freeze"), rounds=rounds if mixes else 1),
        public=PublicKnowledge(scene.public),
        federation=Federation(aux=scene.public, seed=lab.seed),
    )


def decoder_of(lab: Lab, defence: Defence, way: str = "stationarity") -> Decoder | None:
    """Return the decoder of an attacker who knows the defence, or None if there is nothing to decode."""
    sizes = sizes_of(lab)
    if isinstance(defence, Mixup):
        return Unmix(train=sizes.train, restarts=lab.pick(1, 2, 8), rounds=sizes.unmixing)
    if isinstance(defence, Loda):
        rehearsed = lab.pick(4, 24, 100) if way == "learned" else lab.pick(0, 8, 8)
        return Stationarity(way=way, steps=lab.pick(5, 100, 100), search=rehearsed)
    return Untransform() if isinstance(defence, Ats) else None


def figures_under(
    lab: Lab, scene: LodaScene, spec: str, *, adaptive: bool, way: str = "stationarity"
) -> tuple[list[dict[str, Any]], Tensor]:
    """Return the scores and the guess of each private image; ``way`` is how LODA is decoded."""
    defence, truth = build_defence(spec), scene.private.images
    tv = searched_tv(lab, scene, spec if adaptive else "none")

    def work() -> Tensors:
        found, seen = _guessed(lab, scene, defence, tv, adaptive=adaptive)
        decoder = decoder_of(lab, defence, way) if adaptive else None
        if decoder is not None:
            found = decoder.decode(found, seen, stream(lab.seed, "loda", "decode"))
        return {"guesses": _paired(truth, found.images.flatten(0, 1), mixed=isinstance(defence, Mixup))}

    guesses = lab.tensors_once(("attack", scene.name, spec, tv, adaptive, way), work)["guesses"]
    figures, _ = score_targets(truth[:, None], guesses[:, None], lab.data_root)
    return [dict(each) for each in figures], guesses


def _paired(truth: Tensor, guesses: Tensor, *, mixed: bool) -> Tensor:
    """Return the guess for each private image.

    Each client has one image, so guesses are already in order unless they are ``mixed``. Mixed guesses are assigned one
    to one. If there are more guesses than images, as for mixtures that were not decoded, each image gets its nearest
    guess, which no attacker can choose.
    """
    if not mixed:
        return guesses
    if len(guesses) == len(truth):
        return align(truth, guesses)
    return guesses[torch.cdist(truth.flatten(1), guesses.nan_to_num(9.0).flatten(1)).argmin(1)]


def summary(figures: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return means, and the values of the worst-protected image."""
    lpips = [each["lpips"] for each in figures if each["lpips"] is not None]
    psnr = [each["psnr"] for each in figures if each["psnr"] is not None]
    return {
        "lpips": rounded(sum(lpips) / len(lpips)) if lpips else None,
        "lpips_min": rounded(min(lpips)) if lpips else None,
        "psnr": rounded(sum(psnr) / len(psnr)) if psnr else None,
        "psnr_max": rounded(max(psnr)) if psnr else None,
    }


# --- Accuracy ---------------------------------------------------------------------------------------------------------


def accuracy_under(defence: Defence, scene: LodaScene, model: str, epochs: int, seed: int) -> float:
    """Return the test accuracy of a network that one client trains from scratch under a defence."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        network = create_model(model, _shape(scene.learn), 10, seed, Normalisation(_numbers(MEAN), _numbers(STD)))
        net = FlatModel(network, lambda name: False)
        received = net.values[net.shared].clone()
        streams = Streams(SecretStream(seed, "loda", "client"), SecretStream(seed, "loda", "batches"))
        how = LocalSettings(epochs=epochs, batch_size=32, momentum=0.9, weight_decay=5e-4)
        device = Device(scene.learn, aux=scene.public)
        play_client(net, device, Broadcast(received, lr=0.02), defence, how, streams)
    images = len(scene.test)
    parts = [score(net.module, scene.test[slice(start, start + 500)]) for start in range(0, images, 500)]
    return sum(part.correct for part in parts) / images


def learned(lab: Lab, scene: LodaScene, spec: str, model: str = "") -> float | None:
    """Return the accuracy of the scale's network or of ``model``; here pruning acts on the gradient of every step."""
    sizes = sizes_of(lab)
    model = model or sizes.model
    spec = spec.replace("prune:", "prune:where=gradient,")

    def work() -> float | None:
        defence, images = build_defence(spec), scene
        if isinstance(defence, Loda):  # obscured once, for all networks
            images, defence = scene._replace(learn=_obscured(lab, scene, defence)), Defence()
        return rounded(accuracy_under(defence, images, model, sizes.epochs, lab.seed))

    return lab.once(("accuracy", scene.name, spec, model), work)


def _obscured(lab: Lab, scene: LodaScene, loda: Loda) -> Batch:
    """Return the training images as obscured by LODA."""

    def work() -> Tensors:
        return {"images": loda.on_data(scene.learn, device(lab, scene)).images}

    return replace(scene.learn, images=lab.tensors_once(("obscured", scene.name, loda.spec), work)["images"])


def device(lab: Lab, scene: LodaScene) -> Client:
    """Return a client with the private images and the public images."""
    network = create_model(ATTACKED, _shape(scene.private), 10, lab.seed)
    rng = SecretStream(lab.seed, "loda", "obscure")
    folder = PrivateFolder(lab.kept / "obscured")  # keeps finished batches if interrupted
    return Device(scene.private, aux=scene.public, folder=folder).client(network, rng)


def shown(lab: Lab, scene: LodaScene, defence: Defence, rounds: int) -> Observation:
    """Return what an attacker sees who is given the encodings of ``rounds`` rounds."""
    return observe(
        create_model(ATTACKED, _shape(scene.private), 10, lab.seed).eval(),
        [scene.private],
        threat=ThreatModel.of("encodings", "labels", "num-examples", "defence", "public-data"),
        num_classes=10,
        defence=defence,
        protocol=Protocol(rounds=rounds),
        public=PublicKnowledge(scene.public),
        federation=Federation(aux=scene.public, seed=lab.seed),
    )


def _shape(batch: Batch) -> tuple[int, int, int]:
    channels, height, width = batch.images.shape[1:]
    return channels, height, width


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split("/"))
