"""LODA (Wan et al. 2022): obscured images compared with pruning, Mixup and InstaHide, and attacks that decode them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gradveil.attacks.encodings import Encodings
from gradveil.data import load_dataset
from gradveil.defences import build_defence
from gradveil.defences.mixup import Mixup
from gradveil.metrics import align, score_targets
from gradveil.randomness import stream
from gradveil.reproduce.base import Experiment, Lab, Paper, Result, picture_lines
from gradveil.reproduce.loda_images import (
    ATTACKED,
    LodaScene,
    decoder_of,
    device,
    figures_under,
    learned,
    loda_spec,
    make_scene,
    shown,
    sizes_of,
    summary,
    svhn,
)

RIVALS = {
    "no defence": "none", "GradPruning p=0.9": "prune:fraction=0.9", "GradPruning p=0.99": "prune:fraction=0.99",
    "Mixup k=4": "mixup:k=4,pool=data", "Mixup k=6": "mixup:k=6,pool=data",
    "InstaHide k=4": "instahide:k=4,pool=data", "InstaHide k=6": "instahide:k=6,pool=data",
}  # fmt: skip
VARIANTS = {"LODA_1": ("first-5", 20.0), "LODA_2": ("all", 30.0), "LODA_3": ("last-5", 1.0)}

# Accuracy; "mean / lowest LPIPS, mean / highest PSNR" of plain inversion, and of the attack that knows the defence.
CIFAR10 = {
    "no defence": (0.9520, "0.098 / 0.016, 16.61 / 20.78", "0.098 / 0.016, 16.61 / 20.78"),
    "GradPruning p=0.9": (0.9330, "0.224 / 0.074, 11.48 / 15.52", "0.224 / 0.074, 11.48 / 15.52"),
    "GradPruning p=0.99": (0.8864, "0.490 / 0.300, 5.44 / 10.43", "0.490 / 0.300, 5.44 / 10.43"),
    "Mixup k=4": (0.9384, "0.377 / 0.091, 15.01 / 18.02", "0.039 / 0.016, 29.23 / 34.04"),
    "Mixup k=6": (0.9238, "0.400 / 0.224, 14.2 / 18.03", "0.040 / 0.015, 28.25 / 31.94"),
    "InstaHide k=4": (0.9180, "0.656 / 0.607, 9.51 / 12.87", "0.395 / 0.273, 10.77 / 18.72"),
    "InstaHide k=6": (0.8852, "0.628 / 0.560, 9.98 / 12.25", "0.394 / 0.233, 10.62 / 18.86"),
    "LODA_1": (0.8950, "0.589 / 0.480, 5.77 / 7.77", "0.537 / 0.452, 12.95 / 16.24"),
    "LODA_2": (0.9178, "0.566 / 0.423, 7.41 / 12.08", "0.558 / 0.456, 13.04 / 16.91"),
}
SVHN = {
    "no defence": (0.9633, "0.168 / 0.034, 23.44 / 30.63", "0.168 / 0.034, 23.44 / 30.63"),
    "GradPruning p=0.9": (0.9598, "0.287 / 0.073, 20.51 / 26.29", "0.287 / 0.073, 20.51 / 26.29"),
    "GradPruning p=0.99": (0.9524, "0.495 / 0.361, 16.08 / 20.88", "0.495 / 0.361, 16.08 / 20.88"),
    "Mixup k=4": (0.9499, "0.341 / 0.135, 16.37 / 21.54", "0.046 / 0.016, 24.71 / 28.42"),
    "Mixup k=6": (0.9402, "0.340 / 0.085, 15.79 / 21.59", "0.058 / 0.016, 24.44 / 29.13"),
    "InstaHide k=4": (0.9493, "0.694 / 0.622, 10.43 / 12.05", "0.286 / 0.031, 16.96 / 24.80"),
    "InstaHide k=6": (0.9242, "0.696 / 0.603, 10.46 / 12.85", "0.243 / 0.067, 18.95 / 23.62"),
    "LODA_3": (0.9529, "0.715 / 0.648, 8.46 / 11.52", "0.604 / 0.519, 13.35 / 19.02"),
}
TABLE_5 = {10: (0.9302, 6.39), 20: (0.8950, 5.77), 30: (0.8346, 5.73), 40: (0.7848, 5.83), 50: (0.7186, 5.82)}
TABLE_6 = {10: (0.9395, 9.72), 20: (0.9349, 8.07), 30: (0.9178, 7.41), 40: (0.8940, 6.55), 50: (0.8778, 6.05)}
TABLE_7 = {
    "CIFAR10": "0.9520 / 0.9547 / 0.9344 / 0.9446", "LODA_1": "0.8950 / 0.8905 / 0.8377 / 0.8783",
    "LODA_2": "0.9178 / 0.9142 / 0.8881 / 0.9032",
}  # fmt: skip


# --- Tables -----------------------------------------------------------------------------------------------------------


def _comparison(lab: Lab, dataset: str, paper: Mapping[str, tuple[float, str, str]], *, adaptive: bool) -> Result:
    scene = make_scene(lab, load_dataset(dataset, lab.data_root))
    specs = {name: loda_spec(lab, scene, *VARIANTS[name]) if name in VARIANTS else RIVALS[name] for name in paper}
    rows = []
    for done, (name, spec) in enumerate(specs.items()):
        lab.progress(done / len(specs), name)
        figures, _ = figures_under(lab, scene, spec, adaptive=adaptive)
        row = {"defence": name, "accuracy": learned(lab, scene, spec), "paper_accuracy": paper[name][0]}
        rows.append(row | summary(figures) | {"paper_lpips_psnr": paper[name][2 if adaptive else 1]})
    lab.progress(1.0, "done")
    return Result(rows, _notes(lab, adaptive=adaptive))


def _notes(lab: Lab, *, adaptive: bool) -> list[str]:
    sizes = sizes_of(lab)
    notes = [
        f"Attacked: {ATTACKED}, uniform initialisation, one encoded image per gradient, labels known (mixed labels if "
        f"the defence mixes), {sizes.iterations} steps of gs; {sizes.targets} private images. The paper does not "
        "name its network.",
        "The weight of total variation is chosen from the paper's grid on public images, which attackers who know the "
        "defence first encode themselves; the paper chose it on the private images.",
        _learning(lab),
        EXTRACTOR_NOTE,
        "A guess is compared with its private image. Decoded images of Mixup and InstaHide are matched to private "
        "images one to one. Without decoding, each private image gets its nearest mixture, which no attacker can "
        "choose.",
    ]
    if adaptive:
        notes.append(
            f"`unmix` decodes Mixup and InstaHide from {sizes.rounds} encodings of {sizes.targets} images, with public "
            f"test images. LODA is decoded by Eq. 6 from a grey image, {_eq_6(lab)}. The grey image has about 12 dB."
        )
    return notes


EXTRACTOR_NOTE = (
    "LODA's feature extractor is a resnet20 trained on SVHN, or on CIFAR-10 for SVHN (the paper: a ResNet18 trained on "
    "CIFAR-100, or on SVHN's extra images for SVHN). LODA starts from test images that no measurement uses (the paper: "
    "from CIFAR-100)."
)


def _learning(lab: Lab) -> str:
    sizes = sizes_of(lab)
    return f"Accuracy: {sizes.model}, {sizes.epochs} epochs on {sizes.learn:,} images (the paper: ResNet18 on all)."


def _eq_6(lab: Lab) -> str:
    return "c = 1" if lab.scale == "smoke" else "c and steps chosen on public images that the attacker obscured"


def table_1(lab: Lab) -> Result:
    """Compare the defences under gradient inversion on CIFAR-10."""
    return _comparison(lab, "cifar10", CIFAR10, adaptive=False)


def table_2(lab: Lab) -> Result:
    """Compare the defences under gradient inversion and decoding on CIFAR-10."""
    return _comparison(lab, "cifar10", CIFAR10, adaptive=True)


def table_3(lab: Lab) -> Result:
    """Compare the defences under gradient inversion on SVHN."""
    return _comparison(lab, svhn(lab), SVHN, adaptive=False)


def table_4(lab: Lab) -> Result:
    """Compare the defences under gradient inversion and decoding on SVHN."""
    return _comparison(lab, svhn(lab), SVHN, adaptive=True)


def _weights(lab: Lab, name: str, paper: Mapping[int, tuple[float, float]], small: Sequence[int]) -> Result:
    scene = make_scene(lab, load_dataset("cifar10", lab.data_root))
    more = lab.pick((20,), small, (10, 20, 30, 40, 50, 100, 200, 500))
    rows = []
    for done, c in enumerate(more):
        lab.progress(done / len(more), f"c = {c}")
        spec = loda_spec(lab, scene, VARIANTS[name][0], c)
        figures = summary(lab.once(("likeness", spec), partial(_likeness, lab, scene, spec)))
        accuracy, psnr = paper.get(c, (None, None))
        own = {"c": c, "accuracy": learned(lab, scene, spec), "paper_accuracy": accuracy}
        rows.append(own | figures | {"paper_psnr": psnr})
    lab.progress(1.0, "done")
    notes = ["Privacy is measured on the obscured images themselves, which a perfect gradient inversion would recover."]
    return Result(rows, [*notes, _learning(lab), EXTRACTOR_NOTE])


def _likeness(lab: Lab, scene: LodaScene, spec: str) -> list[dict[str, Any]]:
    """Score the obscured images themselves."""
    obscured = build_defence(spec).on_data(scene.private, device(lab, scene)).images
    figures, _ = score_targets(scene.private.images[:, None], obscured[:, None], lab.data_root)
    return [dict(each) for each in figures]


def table_5(lab: Lab) -> Result:
    """Measure LODA_1 for several weights c."""
    return _weights(lab, "LODA_1", TABLE_5, (10, 20, 50, 100, 200))


def table_6(lab: Lab) -> Result:
    """Measure LODA_2 for several weights c."""
    return _weights(lab, "LODA_2", TABLE_6, (10, 30, 100))


def table_7(lab: Lab) -> Result:
    """Train several networks on the same obscured images."""
    models = lab.pick(
        ("resnet20:width=4", "convnet:width=8"),
        ("resnet18:width=16", "resnet34:width=16", "convnet:width=32"),
        ("resnet18", "resnet34", "vgg16", "densenet121"),
    )
    scene, rows = make_scene(lab, load_dataset("cifar10", lab.data_root)), []
    for done, (name, paper) in enumerate(TABLE_7.items()):
        lab.progress(done / len(TABLE_7), name)
        spec = loda_spec(lab, scene, *VARIANTS[name]) if name in VARIANTS else "none"
        rows.append({"data": name, **{model: learned(lab, scene, spec, model) for model in models}, "paper": paper})
    lab.progress(1.0, "done")
    sizes = sizes_of(lab)
    order = (
        f"Accuracy after {sizes.epochs} epochs on {sizes.learn:,} images (the paper: all images), one seed. The "
        "paper's networks are ResNet18, ResNet34, VGG16 and DenseNet121."
    )
    return Result(rows, [order, EXTRACTOR_NOTE])


def from_encodings(lab: Lab) -> Result:
    """Decode the encodings themselves, without gradient inversion."""
    scene, sizes = make_scene(lab, load_dataset("cifar10", lab.data_root)), sizes_of(lab)
    specs = {name: spec for name, spec in RIVALS.items() if spec.startswith(("mixup", "instahide"))}
    specs |= {"ATS 21-13-3": "ats:policy=21-13-3", "ATS 7-4-15": "ats:policy=7-4-15"}
    specs |= {f"LODA_1, c={c}": loda_spec(lab, scene, "first-5", c) for c in lab.pick((20,), (20, 100), (20, 100))}
    rows = []
    for done, (name, spec) in enumerate(specs.items()):
        lab.progress(done / len(specs), name)
        rows.append({"defence": name} | lab.once(("decoded", spec), partial(_decoded, lab, scene, spec)))
    lab.progress(1.0, "done")
    notes = [
        "The attacker has the encodings, as Carlini et al. had, and knows the defence and public test images, but not "
        "the coefficients, partners or signs. For LODA it learns a filter from public images.",
        f"{sizes.targets} private CIFAR-10 images, mixed among themselves; a grey image has about 12 dB.",
    ]
    return Result(rows, notes)


def _decoded(lab: Lab, scene: LodaScene, spec: str) -> dict[str, Any]:
    """Score the encodings of one defence, and the images decoded from them."""
    defence, sizes = build_defence(spec), sizes_of(lab)
    rounds = sizes.rounds // sizes.targets if isinstance(defence, Mixup) else 1
    truth, seen = scene.private.images, shown(lab, scene, defence, rounds)
    found = Encodings().run(seen, stream(lab.seed, "loda"))
    decoder = decoder_of(lab, defence, way="learned")
    decoded = found if decoder is None else decoder.decode(found, seen, stream(lab.seed, "loda", "decode"))
    row: dict[str, Any] = {"encodings": rounds * sizes.targets}
    for kind, images in (("encoded", found.images[0]), ("decoded", decoded.images[0])):
        figures, _ = score_targets(truth[:, None], align(truth, images)[:, None], lab.data_root)
        row |= {f"{kind}_{key}": value for key, value in summary(figures).items()}
    return row


def figure_2(lab: Lab) -> Result:
    """Draw private images and their reconstructions under each defence; LODA is decoded by a learned filter."""
    scene = make_scene(lab, load_dataset("cifar10", lab.data_root))
    specs = {name: RIVALS[name] for name in ("GradPruning p=0.99", "Mixup k=6", "InstaHide k=6")}
    specs["LODA_1"] = loda_spec(lab, scene, *VARIANTS["LODA_1"])
    pictures, rows = {"private": scene.private.images}, []
    for done, (name, spec) in enumerate(specs.items()):
        for adaptive in (False, True):
            lab.progress((2 * done + adaptive) / len(specs) / 2, name)
            figures, guess = figures_under(lab, scene, spec, adaptive=adaptive, way="learned")
            pictures[f"{name}{', decoded' if adaptive else ''}"] = guess
            rows.append({"defence": name, "decoded": adaptive} | summary(figures))
    lab.progress(1.0, "done")
    return Result(rows, _notes(lab, adaptive=True), {"pictures": picture_lines(pictures)})


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
        "7": Experiment("Other networks trained on obscured images", table_7),
        "fig2": Experiment("Pictures of reconstructions", figure_2),
        "encodings": Experiment("Decoding given encodings (ours)", from_encodings),
    },
)
