"""LODA (Wan et al. 2022): obscured images against pruning, Mixup and InstaHide, and the attacks that decode them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from gradveil.attacks.base import Decoder
from gradveil.attacks.encodings import Encodings
from gradveil.attacks.gs import Gs
from gradveil.attacks.stationarity import Stationarity
from gradveil.attacks.unmix import Unmix
from gradveil.attacks.untransform import Untransform
from gradveil.client import LocalSettings, score, train_locally
from gradveil.data import Dataset, load_dataset
from gradveil.defences import Client, Defence, build_defence
from gradveil.defences.ats import Ats
from gradveil.defences.loda import Loda
from gradveil.defences.mixup import Mixup
from gradveil.errors import MissingDataError
from gradveil.flat import FlatModel
from gradveil.metrics import align, score_targets
from gradveil.models import Normalisation, create_model
from gradveil.observe import observe
from gradveil.randomness import stream
from gradveil.reproduce.base import Experiment, Lab, Paper, Result, rounded
from gradveil.threat import Observation, Reconstruction, ThreatModel
from gradveil.types import Batch

ATTACKED = "lenet-dlg"
_NOWHERE = Path("no data root")
EXTRACTOR = "cifar10_resnet20.safetensors"
MEAN, STD = "0.4914/0.4822/0.4465", "0.2023/0.1994/0.201"
PUBLIC = 500
"""Test images, the last, that stand for public data; accuracy is taken on the first."""

RIVALS = {
    "no defence": "none", "GradPruning p=0.9": "prune:fraction=0.9", "GradPruning p=0.99": "prune:fraction=0.99",
    "Mixup k=4": "mixup:k=4,pool=data", "Mixup k=6": "mixup:k=6,pool=data",
    "InstaHide k=4": "instahide:k=4,pool=data", "InstaHide k=6": "instahide:k=6,pool=data",
}  # fmt: skip
VARIANTS = {"LODA_1": ("first-5", 20.0), "LODA_2": ("all", 30.0), "LODA_3": ("last-5", 1.0)}

# Accuracy; mean and least LPIPS, mean and greatest PSNR of plain inversion; the same of the attack that knows it.
CIFAR10 = {
    "no defence": ("95.20", "0.098 / 0.016, 16.61 / 20.78", "0.098 / 0.016, 16.61 / 20.78"),
    "GradPruning p=0.9": ("93.30", "0.224 / 0.074, 11.48 / 15.52", "0.224 / 0.074, 11.48 / 15.52"),
    "GradPruning p=0.99": ("88.64", "0.490 / 0.300, 5.44 / 10.43", "0.490 / 0.300, 5.44 / 10.43"),
    "Mixup k=4": ("93.84", "0.377 / 0.091, 15.01 / 18.02", "0.039 / 0.016, 29.23 / 34.04"),
    "Mixup k=6": ("92.38", "0.400 / 0.224, 14.2 / 18.03", "0.040 / 0.015, 28.25 / 31.94"),
    "InstaHide k=4": ("91.80", "0.656 / 0.607, 9.51 / 12.87", "0.395 / 0.273, 10.77 / 18.72"),
    "InstaHide k=6": ("88.52", "0.628 / 0.560, 9.98 / 12.25", "0.394 / 0.233, 10.62 / 18.86"),
    "LODA_1": ("89.50", "0.589 / 0.480, 5.77 / 7.77", "0.537 / 0.452, 12.95 / 16.24"),
    "LODA_2": ("91.78", "0.566 / 0.423, 7.41 / 12.08", "0.558 / 0.456, 13.04 / 16.91"),
}
SVHN = {
    "no defence": ("96.33", "0.168 / 0.034, 23.44 / 30.63", "0.168 / 0.034, 23.44 / 30.63"),
    "GradPruning p=0.9": ("95.98", "0.287 / 0.073, 20.51 / 26.29", "0.287 / 0.073, 20.51 / 26.29"),
    "GradPruning p=0.99": ("95.24", "0.495 / 0.361, 16.08 / 20.88", "0.495 / 0.361, 16.08 / 20.88"),
    "Mixup k=4": ("94.99", "0.341 / 0.135, 16.37 / 21.54", "0.046 / 0.016, 24.71 / 28.42"),
    "Mixup k=6": ("94.02", "0.340 / 0.085, 15.79 / 21.59", "0.058 / 0.016, 24.44 / 29.13"),
    "InstaHide k=4": ("94.93", "0.694 / 0.622, 10.43 / 12.05", "0.286 / 0.031, 16.96 / 24.80"),
    "InstaHide k=6": ("92.42", "0.696 / 0.603, 10.46 / 12.85", "0.243 / 0.067, 18.95 / 23.62"),
    "LODA_3": ("95.29", "0.715 / 0.648, 8.46 / 11.52", "0.604 / 0.519, 13.35 / 19.02"),
}
TABLE_5 = {10: (93.02, 6.39), 20: (89.50, 5.77), 30: (83.46, 5.73), 40: (78.48, 5.83), 50: (71.86, 5.82)}
TABLE_6 = {10: (93.95, 9.72), 20: (93.49, 8.07), 30: (91.78, 7.41), 40: (89.40, 6.55), 50: (87.78, 6.05)}
TABLE_7 = {
    "CIFAR10": "95.20 / 95.47 / 93.44 / 94.46", "LODA_1": "89.50 / 89.05 / 83.77 / 87.83",
    "LODA_2": "91.78 / 91.42 / 88.81 / 90.32",
}  # fmt: skip


@dataclass(frozen=True)
class _Sizes:
    """How much of everything a scale takes."""

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


def _sizes(lab: Lab) -> _Sizes:
    return lab.pick(
        _Sizes(6, 24, 5, 3, 10, 2, 40, 100, 1, "resnet20:width=4"),
        _Sizes(8, 400, 300, 500, 150, 12, 300, 2000, 20, "resnet20:width=8"),
        _Sizes(16, 800, 24_000, 500, 1000, 40, 50_000, 9500, 200, "resnet18"),
    )


class _Scene(NamedTuple):
    """The private images that are attacked, those that are learned from and tested on, and public ones."""

    private: Batch
    learn: Batch
    test: Batch
    public: Batch


def _scene(lab: Lab, dataset: Dataset) -> _Scene:
    sizes = _sizes(lab)
    order = torch.randperm(len(dataset.train), generator=stream(lab.seed, "loda", "targets"))
    private, learn = order[: sizes.targets], order[sizes.targets :][: sizes.learn]
    count = len(dataset.test)
    return _Scene(
        _batch(dataset.train, private.numpy()),
        _batch(dataset.train, learn.numpy()),
        _batch(dataset.test, np.arange(min(sizes.test, count - PUBLIC))),
        _batch(dataset.test, np.arange(count - PUBLIC, count)),
    )


def _batch(split: Any, rows: np.ndarray) -> Batch:  # noqa: ANN401 - a Split
    images = torch.from_numpy(np.ascontiguousarray(split.images[rows]))
    images = images.float() / 255 if images.dtype == torch.uint8 else images
    return Batch(images, torch.from_numpy(split.labels[rows]), torch.zeros(len(rows), dtype=torch.bool))


def loda_spec(lab: Lab, layers: str, c: float) -> str:
    """LODA with the given extractor, as a text; the weights lie in the folder ``weights`` of the data root."""
    path = (lab.data_root or _NOWHERE) / "weights" / EXTRACTOR
    if not path.is_file():
        raise MissingDataError(
            f"{path} must hold a resnet20 trained on CIFAR-10, for LODA's features, got no such file. Put it there."
        )
    steps = _sizes(lab).obscuring
    return (
        f"loda:extractor=resnet20,weights={path},classes=10,mean={MEAN},std={STD},layers={layers},c={c},steps={steps}"
    )


# --- what is attacked -------------------------------------------------------------------------------------------------


def _guessed(lab: Lab, scene: _Scene, defence: Defence, tv: float) -> tuple[Tensor, Reconstruction, Observation]:
    """The private images, what gradient inversion finds of single encodings of them, and what was seen."""
    sizes, mixes = _sizes(lab), isinstance(defence, Mixup)
    network = create_model(ATTACKED, _shape(scene.private), 10, lab.seed).eval()
    count = len(scene.private)
    clients = [scene.private] if mixes else [scene.private[slice(i, i + 1)] for i in range(count)]
    seen = observe(
        network,
        clients,
        threat=ThreatModel.of("labels", "num-examples", "defence", "public-data"),
        num_classes=10,
        defence=defence,
        how=LocalSettings(algorithm="fedsgd", batch_size=1, batch_norm="freeze"),
        rounds=sizes.rounds if mixes else 1,
        public_data=scene.public,
        aux=scene.public,
        seed=lab.seed,
    )
    attack = Gs(iterations=sizes.iterations, tv=tv, sign="none", schedule="cosine", lr=0.1)
    return scene.private.images, attack.run(seen, stream(lab.seed, "loda", "gs")), seen


def _decoder(lab: Lab, defence: Defence, way: str = "stationarity") -> Decoder | None:
    sizes = _sizes(lab)
    if isinstance(defence, Mixup):
        return Unmix(train=sizes.train, restarts=lab.pick(1, 2, 8), rounds=sizes.unmixing)
    if isinstance(defence, Loda):
        rehearsed = lab.pick(4, 24, 100) if way == "learned" else lab.pick(0, 0, 8)
        return Stationarity(way=way, steps=lab.pick(5, 100, 100), search=rehearsed)
    return Untransform() if isinstance(defence, Ats) else None


def _figures(lab: Lab, scene: _Scene, spec: str, tv: float, *, adaptive: bool) -> tuple[list[dict[str, Any]], Tensor]:
    """The figures of each private image, and the guess for it."""
    defence = build_defence(spec)
    truth, found, seen = _guessed(lab, scene, defence, tv)
    decoder = _decoder(lab, defence) if adaptive else None
    if decoder is not None:
        found = decoder.decode(found, seen, stream(lab.seed, "loda", "decode"))
    guesses = found.images.flatten(0, 1)
    apart = torch.cdist(truth.flatten(1), guesses.nan_to_num(9.0).flatten(1))
    nearest = guesses[apart.argmin(1)] if len(guesses) != len(truth) or decoder is not None else guesses
    figures, _ = score_targets(truth[:, None], nearest[:, None], lab.data_root)
    return [dict(each) for each in figures], nearest


def _summary(figures: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    lpips = [each["lpips"] for each in figures if each["lpips"] is not None]
    psnr = [each["psnr"] for each in figures if each["psnr"] is not None]
    return {
        "lpips": rounded(sum(lpips) / len(lpips)) if lpips else None,
        "lpips_min": rounded(min(lpips)) if lpips else None,
        "psnr": rounded(sum(psnr) / len(psnr)) if psnr else None,
        "psnr_max": rounded(max(psnr)) if psnr else None,
    }


# --- what is learned --------------------------------------------------------------------------------------------------


def accuracy_under(defence: Defence, scene: _Scene, model: str, epochs: int, seed: int) -> float:
    """Test accuracy of a network that one client trains from scratch under a defence."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        network = create_model(model, _shape(scene.learn), 10, seed, Normalisation(_numbers(MEAN), _numbers(STD)))
        net = FlatModel(network, lambda name: False)
        received = net.values[net.shared].clone()
        rng = stream(seed, "loda", "client")
        client = Client(0, 1, net.module, net.shared_tensors(received), scene.learn, {}, {}, rng, scene.public)
        client = replace(client, data=defence.on_data(scene.learn, client))
        how = LocalSettings(epochs=epochs, batch_size=32, momentum=0.9, weight_decay=5e-4)
        train_locally(net, received, client, defence, how, 0.02, stream(seed, "loda", "batches"))
    images = len(scene.test)
    parts = [score(net.module, scene.test[slice(start, start + 500)]) for start in range(0, images, 500)]
    return sum(part.correct for part in parts) / images


def _learned(lab: Lab, scene: _Scene, spec: str) -> float | None:
    sizes = _sizes(lab)
    trained = spec.replace("prune:", "prune:where=gradient,")
    return rounded(accuracy_under(build_defence(trained), scene, sizes.model, sizes.epochs, lab.seed))


# --- the tables -------------------------------------------------------------------------------------------------------


def _comparison(
    lab: Lab, dataset: str, paper: Mapping[str, tuple[str, str, str]], tv: float, *, adaptive: bool
) -> Result:
    scene = _scene(lab, load_dataset(dataset, lab.data_root))
    specs = {name: loda_spec(lab, *VARIANTS[name]) if name in VARIANTS else RIVALS[name] for name in paper}
    rows = []
    for done, (name, spec) in enumerate(specs.items()):
        lab.progress(done / len(specs), name)
        figures, _ = _figures(lab, scene, spec, tv, adaptive=adaptive)
        row = {"defence": name, "accuracy": _learned(lab, scene, spec), "paper_accuracy": paper[name][0]}
        rows.append(row | _summary(figures) | {"paper_lpips_psnr": paper[name][2 if adaptive else 1]})
    lab.progress(1.0, "done")
    return Result(rows, _notes(lab, adaptive=adaptive))


def _notes(lab: Lab, *, adaptive: bool) -> list[str]:
    sizes = _sizes(lab)
    notes = [
        f"Attacked: {ATTACKED}, uniform initialisation, one encoded image a gradient, labels known (mixtures where "
        f"they are), {sizes.iterations} steps of gs; {sizes.targets} private images. The paper names no network.",
        f"Accuracy: {sizes.model}, {sizes.epochs} epochs on {sizes.learn:,} images (the paper: ResNet18 on all).",
        "LODA's extractor is a resnet20 trained on CIFAR-10 itself (the paper: a ResNet18 trained on CIFAR-100, for "
        "SVHN on its extra images); its starts are test images that nothing is measured on (the paper: CIFAR-100).",
        "A guess is compared with the private image; of Mixup and InstaHide each image with its nearest guess.",
    ]
    if adaptive:
        notes.append(
            f"Mixup and InstaHide are decoded by `unmix` from {sizes.rounds} encodings of {sizes.targets} images, with "
            "public test images; LODA by Eq. 6 from a grey image, c = 1. A grey image alone has some 12 dB."
        )
    return notes


def table_1(lab: Lab) -> Result:
    """Gradient inversion on CIFAR-10."""
    return _comparison(lab, "cifar10", CIFAR10, 1e-4, adaptive=False)


def table_2(lab: Lab) -> Result:
    """Gradient inversion and decoding on CIFAR-10."""
    return _comparison(lab, "cifar10", CIFAR10, 1e-4, adaptive=True)


def table_3(lab: Lab) -> Result:
    """Gradient inversion on SVHN."""
    return _comparison(lab, _svhn(lab), SVHN, 1e-2, adaptive=False)


def table_4(lab: Lab) -> Result:
    """Gradient inversion and decoding on SVHN."""
    return _comparison(lab, _svhn(lab), SVHN, 1e-2, adaptive=True)


def _svhn(lab: Lab) -> str:
    """The crops that lie in the data root as a file, else the named set."""
    path = (lab.data_root or _NOWHERE) / "svhn.npz"
    return str(path) if path.is_file() else "svhn"


def _weights(lab: Lab, name: str, paper: Mapping[int, tuple[float, float]]) -> Result:
    scene = _scene(lab, load_dataset("cifar10", lab.data_root))
    more = lab.pick((20,), (10, 20, 50, 100, 200), (10, 20, 30, 40, 50, 100, 200, 500))
    rows = []
    for done, c in enumerate(more):
        lab.progress(done / len(more), f"c = {c}")
        spec = loda_spec(lab, VARIANTS[name][0], c)
        defence = build_defence(spec)
        obscured = defence.on_data(scene.private, _device(lab, scene)).images
        figures, _ = score_targets(scene.private.images[:, None], obscured[:, None], lab.data_root)
        accuracy, psnr = paper.get(c, (None, None))
        rows.append(
            {"c": c, "accuracy": _learned(lab, scene, spec), "paper_accuracy": accuracy}
            | _summary(figures)
            | {"paper_psnr": psnr}
        )
    lab.progress(1.0, "done")
    notes = ["Privacy is that of the obscured images themselves: what a perfect gradient inversion would see."]
    return Result(rows, [*notes, *_notes(lab, adaptive=False)[1:3]])


def _device(lab: Lab, scene: _Scene) -> Client:
    network = create_model(ATTACKED, _shape(scene.private), 10, lab.seed)
    rng = stream(lab.seed, "loda", "obscure")
    return Client(0, 1, network, {}, scene.private, {}, {}, rng, scene.public)


def table_5(lab: Lab) -> Result:
    """LODA_1 over its weight c."""
    return _weights(lab, "LODA_1", TABLE_5)


def table_6(lab: Lab) -> Result:
    """LODA_2 over its weight c."""
    return _weights(lab, "LODA_2", TABLE_6)


def table_7(lab: Lab) -> Result:
    """The same obscured images train other networks."""
    models = lab.pick(
        ("resnet20:width=4", "convnet:width=8"),
        ("resnet18:width=16", "resnet34:width=16", "convnet:width=32"),
        ("resnet18", "resnet34", "vgg16", "densenet121"),
    )
    scene, epochs = _scene(lab, load_dataset("cifar10", lab.data_root)), _sizes(lab).epochs
    rows = []
    for done, (name, paper) in enumerate(TABLE_7.items()):
        lab.progress(done / len(TABLE_7), name)
        learn = scene.learn
        if name in VARIANTS:  # obscured once, for all networks
            learn = build_defence(loda_spec(lab, *VARIANTS[name])).on_data(learn, _device(lab, scene))
        found = {
            model: rounded(accuracy_under(Defence(), scene._replace(learn=learn), model, epochs, lab.seed))
            for model in models
        }
        rows.append({"data": name, **found, "paper": paper})
    lab.progress(1.0, "done")
    order = "The paper's are ResNet18, ResNet34, VGG16 and DenseNet121."
    return Result(rows, [order, *_notes(lab, adaptive=False)[1:3]])


def from_encodings(lab: Lab) -> Result:
    """What decoders get from the encodings themselves, whatever becomes of gradient inversion."""
    scene, sizes = _scene(lab, load_dataset("cifar10", lab.data_root)), _sizes(lab)
    specs = {name: spec for name, spec in RIVALS.items() if spec.startswith(("mixup", "instahide"))}
    specs |= {"ATS 21-13-3": "ats:policy=21-13-3", "ATS 7-4-15": "ats:policy=7-4-15"}
    specs |= {f"LODA_1, c={c}": loda_spec(lab, "first-5", c) for c in lab.pick((20,), (20, 100), (20, 100))}
    rows = []
    for done, (name, spec) in enumerate(specs.items()):
        lab.progress(done / len(specs), name)
        defence = build_defence(spec)
        rounds = sizes.rounds // sizes.targets if isinstance(defence, Mixup) else 1
        truth, seen = scene.private.images, _shown(lab, scene, defence, rounds)
        found = Encodings().run(seen, stream(lab.seed, "loda"))
        decoder = _decoder(lab, defence, way="learned")
        decoded = found if decoder is None else decoder.decode(found, seen, stream(lab.seed, "loda", "decode"))
        row: dict[str, Any] = {"defence": name, "encodings": rounds * sizes.targets}
        for kind, images in (("encoded", found.images[0]), ("decoded", decoded.images[0])):
            figures, _ = score_targets(truth[:, None], align(truth, images)[:, None], lab.data_root)
            row |= {f"{kind}_{key}": value for key, value in _summary(figures).items()}
        rows.append(row)
    lab.progress(1.0, "done")
    notes = [
        "The attacker was given the encodings, as Carlini et al. were, and knew the defence and public test images, "
        "not the coefficients, partners or signs. For LODA it learned a filter from public images.",
        f"{sizes.targets} private CIFAR-10 images, mixed among themselves; a grey image has some 12 dB.",
    ]
    return Result(rows, notes)


def _shown(lab: Lab, scene: _Scene, defence: Defence, rounds: int) -> Observation:
    return observe(
        create_model(ATTACKED, _shape(scene.private), 10, lab.seed).eval(),
        [scene.private],
        threat=ThreatModel.of("encodings", "labels", "num-examples", "defence", "public-data"),
        num_classes=10,
        defence=defence,
        rounds=rounds,
        public_data=scene.public,
        aux=scene.public,
        seed=lab.seed,
    )


def figure_2(lab: Lab) -> Result:
    """Pictures: private, and what the strongest attack gets under each defence."""
    scene = _scene(lab, load_dataset("cifar10", lab.data_root))
    shown = {name: RIVALS[name] for name in ("GradPruning p=0.99", "Mixup k=6", "InstaHide k=6")}
    shown["LODA_1"] = loda_spec(lab, *VARIANTS["LODA_1"])
    pictures, rows = {"private": scene.private.images}, []
    for done, (name, spec) in enumerate(shown.items()):
        for adaptive in (False, True):
            lab.progress((2 * done + adaptive) / len(shown) / 2, name)
            figures, guess = _figures(lab, scene, spec, 1e-4, adaptive=adaptive)
            pictures[f"{name}{', decoded' if adaptive else ''}"] = guess
            rows.append({"defence": name, "decoded": adaptive} | _summary(figures))
    lab.progress(1.0, "done")
    return Result(rows, _notes(lab, adaptive=True), {"pictures": _pictures(pictures)})


def _pictures(rows: Mapping[str, Tensor]) -> Figure:
    columns = len(next(iter(rows.values())))
    figure = Figure(figsize=(1.2 * columns + 1.6, 1.2 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, images) in zip(panels, rows.items(), strict=True):
        for axes, image in zip(line, images, strict=True):
            axes.imshow(image.nan_to_num(0.5).permute(1, 2, 0).numpy())
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=7)
    return figure


def _shape(batch: Batch) -> tuple[int, int, int]:
    channels, height, width = batch.images.shape[1:]
    return channels, height, width


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split("/"))


PAPER = Paper(
    "loda",
    "Wan et al. 2022, Defense Against Gradient Leakage Attacks via Learning to Obscure Data, arXiv 2206.00769",
    {
        "1": Experiment("Accuracy and privacy under gradient inversion, CIFAR-10", table_1),
        "2": Experiment("Accuracy and privacy under gradient inversion and decoding, CIFAR-10", table_2),
        "3": Experiment("Accuracy and privacy under gradient inversion, SVHN", table_3),
        "4": Experiment("Accuracy and privacy under gradient inversion and decoding, SVHN", table_4),
        "5": Experiment("The weight c of LODA_1", table_5),
        "6": Experiment("The weight c of LODA_2", table_6),
        "7": Experiment("Obscured images train other networks", table_7),
        "fig2": Experiment("Pictures of what comes back", figure_2),
        "encodings": Experiment("Decoding from given encodings (ours)", from_encodings),
    },
)
