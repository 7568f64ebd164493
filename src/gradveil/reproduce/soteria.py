"""Soteria (Sun et al. 2021): leaked representations, privacy against accuracy, and convergence."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from gradveil.audits import audit, make_audit_settings
from gradveil.config import TrainSettings
from gradveil.data import load_dataset
from gradveil.engines.simulation import Simulation
from gradveil.errors import TrainingError
from gradveil.report.summary import summarise
from gradveil.reproduce.base import Experiment, Lab, Paper, Result, rounded
from gradveil.reproduce.soteria_convergence import Convergence, converge
from gradveil.reproduce.soteria_representations import measure_representations
from gradveil.reproduce.trainings import trained

GS_SHORT = "gs:iterations=120,sign=none,schedule=constant"
ATTACKED = "lenet-dlg:convs=4"
"""The network that the authors' code attacks."""
PICTURES = "Pictures: report.html in the folder of the audit."
GS_LONG = "gs:iterations={},sign=none,schedule=cosine,lr=0.3,tv=1e-6"


# --- Table 1: representations inferred from updates -------------------------------------------------------------------

TABLE_1 = {
    "E=1, B=32": (1, 32, "by-class:classes=2,per_class=20", "0.98 / 0.99 / 0.99"),
    "E=5, B=32": (5, 32, "by-class:classes=2,per_class=20", "0.82 / 0.90 / 0.92"),
    "E=10, B=32": (10, 32, "by-class:classes=2,per_class=20", "0.70 / 0.78 / 0.82"),
    "E=1, B=16": (1, 16, "by-class:classes=2,per_class=20", "0.82 / 0.93 / 0.99"),
    "E=1, B=8": (1, 8, "by-class:classes=2,per_class=20", "0.85 / 0.89 / 0.92"),
    "E=1, B=32 (IID)": (1, 32, "iid:images=40", "0.48 / 0.31 / 0.18"),
}


def table_1(lab: Lab) -> Result:
    """Correlate inferred with true class-wise representations at the three fully connected layers."""
    rounds = lab.pick(2, 20, 200)
    data = load_dataset("cifar10", lab.data_root)
    rows = []
    for done, (title, (epochs, batch, partition, paper)) in enumerate(TABLE_1.items()):
        settings = TrainSettings(
            dataset="cifar10", model="lenet5", clients=100, sampled=10, rounds=rounds, partition=partition,
            epochs=epochs, batch_size=batch, lr=0.01, momentum=0.0, eval_every=rounds,
            save_rounds=tuple(range(1, rounds + 1)), seed=lab.seed,
        )  # fmt: skip

        def correlations(settings: TrainSettings = settings, done: int = done, title: str = title) -> dict[str, str]:
            found = measure_representations(settings, data, lab.telling(title, done, len(TABLE_1)))
            return {
                "errors": found.mean(found.own, "errors"),
                "errors_other_class": found.mean(found.other, "errors"),
                "elements": found.mean(found.own, "elements"),
                "elements_other_class": found.mean(found.other, "elements"),
                "classes_exact": f"{sum(found.exact) / len(found.exact):.0%}",
            }

        rows.append(
            {"training": title, "paper_fc1_fc2_fc3": paper} | lab.once(("representations", settings), correlations)
        )
    notes = [
        f"CIFAR-10, 100 clients, 10 per round, SGD with learning rate 0.01, the first {rounds} rounds (paper: 200). "
        "The paper describes its network in an appendix that the published version lacks; lenet5 has the same number "
        "of fully connected layers.",
        "The rows of a class are found in two ways: `elements` follows our reading of the paper, `errors` (ours) uses "
        "the known weights. If the correlation with another class of the same client is equally high, it reflects what "
        "all images share.",
    ]
    return Result(rows, notes)


# --- Figure 3: which part of the gradient leaks -----------------------------------------------------------------------

PARTS = {"all": "WG (whole gradient)", "convolutions": "CLG (convolutions)", "linear": "Rep (last layer's gradient)"}


def figure_3(lab: Lab) -> Result:
    """Run DLG on the whole gradient, the convolutions, the linear layer, and on the representation alone."""
    iterations = lab.pick(10, 100, 300)
    attacks = {f"dlg:iterations={iterations},parts={part}": title for part, title in PARTS.items()}
    attacks[f"representations:iterations={lab.pick(20, 1000, 3000)}"] = "Rep (inferred, then inverted)"
    rows = []
    for model in (ATTACKED, "lenet-dlg"):
        lines = _audited(lab, "cifar10", model, ["none"], list(attacks), targets=lab.pick(2, 8, 32), adaptive=False)
        rows += _parts(model, attacks, lines)
    notes = [
        f"Uniform initialisation, CIFAR-10, one image per target, {iterations} L-BFGS steps; DLG also searches the "
        f"label. {ATTACKED} is the network of the authors' code; lenet-dlg is DLG's own, with one convolution fewer.",
        "The paper describes Rep as DLG on representations inferred from an update, and gives no further detail.",
        PICTURES,
    ]
    return Result(rows, notes)


def _parts(model: str, attacks: Mapping[str, str], lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"network": model, "part": attacks[line["attack"]], "mse": rounded(line["mse"]), "psnr": rounded(line["psnr"]),
         "ssim": rounded(line["ssim"]), "recognisable": f"{line['recognisable']} of {line['images']}",
         "paper": "not recognisable" if "convolutions" in line["attack"] else "recognisable"}
        for line in lines
    ]  # fmt: skip


# --- Figures 5 and 6: privacy against accuracy ------------------------------------------------------------------------


def figure_5(lab: Lab) -> Result:
    """Compare the MSE of reconstructions with accuracy, for four defences over the ranges of Table 2."""
    rows: list[dict[str, Any]] = []
    figures = {}
    for dataset in lab.pick(("mnist-5k",), ("mnist", "cifar10"), ("mnist", "cifar10")):
        steps = lab.pick(20, 1000, 4000)
        attacks = [f"dlg:iterations={lab.pick(3, 30, 300)}", GS_SHORT, GS_LONG.format(steps)]
        defences = _ranges(lab)
        lines = _audited(lab, dataset, ATTACKED, defences, attacks, targets=lab.pick(2, 8, 32), adaptive=True)
        accuracy = _accuracies(lab, dataset, ["none", *defences])
        mine = [
            {"dataset": dataset, "defence": line["defence"], "attack": line["attack"], "adaptive": line["adaptive"],
             "mse": rounded(line["mse"]), "psnr": rounded(line["psnr"]),
             "recognisable": f"{line['recognisable']} of {line['images']}",
             "accuracy": rounded(accuracy[line["defence"]])}
            for line in lines
        ]  # fmt: skip
        rows += mine
        if any(accuracy.values()):
            figures[f"tradeoff-{dataset}"] = _tradeoff(mine, dataset)
    return Result(rows, _notes_5(lab), figures)


def figure_6(lab: Lab) -> Result:
    """Compare Soteria and pruning at the same rates on the same images."""
    rates = lab.pick((0.5,), (0.1, 0.3, 0.5, 0.6, 0.8), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8))
    defences = [f"{name}={rate}" for rate in rates for name in ("soteria:prune", "prune:fraction")]
    attack = GS_LONG.format(lab.pick(20, 1500, 4000))
    lines = _audited(lab, "cifar10", ATTACKED, defences, [attack], targets=lab.pick(1, 8, 32), adaptive=True)
    accuracy = _accuracies(lab, "cifar10", ["none", *defences])
    rows = [
        {"defence": line["defence"], "adaptive": line["adaptive"], "mse": rounded(line["mse"]),
         "psnr": rounded(line["psnr"]), "recognisable": f"{line['recognisable']} of {line['images']}",
         "accuracy": rounded(accuracy[line["defence"]])}
        for line in lines
    ]  # fmt: skip
    notes = [
        "The paper: not recognisable under Soteria at 50 to 60 %, recognisable under compression at 80 %.",
        PICTURES,
        *_notes_5(lab),
    ]
    return Result(rows, notes)


def _ranges(lab: Lab) -> list[str]:
    """Return defence specs at a few points of each range of Table 2."""
    fractions = lab.pick((0.4,), (0.01, 0.2, 0.4, 0.8), (0.01, 0.1, 0.2, 0.4, 0.6, 0.8))
    scales = lab.pick((1e-2,), (1e-4, 1e-3, 1e-2, 1e-1), (1e-4, 1e-3, 1e-2, 3e-2, 1e-1))
    return [
        *(f"soteria:prune={fraction}" for fraction in fractions),
        *(f"prune:fraction={fraction}" for fraction in fractions),
        *(f"gaussian:where=gradient,std={scale}" for scale in scales),
        *(f"laplace:where=gradient,scale={scale}" for scale in scales),
    ]


def _audited(
    lab: Lab,
    dataset: str,
    model: str,
    defences: Sequence[str],
    attacks: Sequence[str],
    *,
    targets: int,
    adaptive: bool,
) -> list[dict[str, Any]]:
    """Run or resume an audit without training, and return its summary."""
    settings = make_audit_settings(
        {
            "dataset": dataset,
            "model": model,
            "defences": list(defences),
            "attacks": list(attacks),
            "targets": targets,
            "adaptive": adaptive,
            "rounds": 0,
            "lr": 1.0,
            "batch_norm": "freeze",
            "seed": lab.seed,
            "normalise": "none",
        }
    )
    result = audit(
        settings,
        lab.out / f"audit-{dataset}-{model.replace(':', '-')}-{lab.origin}",
        resume=True,
        workers=lab.workers,
        data_root=lab.data_root,
        progress=lambda done, total, doing: lab.progress(done / max(total, 1), doing),
    )
    if result.failed:
        reason = next(iter(result.failed.values()))
        raise TrainingError(
            f"The audit in {result.out} must finish, but {len(result.failed)} of its cells failed, the first with: "
            f"{reason}. Run the same command again to repeat them."
        )
    return summarise(result.rows)


def _accuracies(lab: Lab, dataset: str, defences: Iterable[str]) -> dict[str, float | None]:
    """Return the test accuracy after FedAvg under each defence: 100 clients of 2 classes, 10 per round (Section 6.1).

    It is the mean over the last three of ten evaluations, for it changes by points from one round to the next. It is
    None on CIFAR-10 at scale small: with far fewer rounds than the paper's 1,000 the network learns nothing.
    """
    rounds = lab.pick(1, *((200, 200) if dataset.startswith("mnist") else (0, 1000)))
    if not rounds:
        return dict.fromkeys(defences)
    found: dict[str, float | None] = {}
    for defence in dict.fromkeys(defences):
        soteria = defence.startswith("soteria:")
        ranked = f"{defence},probes={PROBES}" if soteria and lab.scale != "full" else defence
        settings = TrainSettings(
            dataset=dataset, model="lenet5", defence=ranked, clients=100, sampled=10, rounds=rounds, lr=0.01,
            partition=f"by-class:classes=2,per_class={_per_class(lab, dataset)}", eval_every=max(1, rounds // 10),
            seed=lab.seed,
        )  # fmt: skip
        ended = trained(lab, settings, lab.telling(f"training under {defence}"))
        evaluated = [row["accuracy"] for row in ended.rows if row["accuracy"] is not None][-3:]
        found[defence] = None if ended.why else statistics.fmean(evaluated)
    return found


def _per_class(lab: Lab, dataset: str) -> int:
    """Return the images per class and client; a copy of CIFAR-10 with 20,000 images has too few for the paper's 100."""
    return lab.pick(5, 100, 100) if dataset.startswith("mnist") else lab.pick(5, 20, 95)


PROBES = 32
"""Random probes that Soteria ranks features by in training, at every scale but full."""


def _notes_5(lab: Lab) -> list[str]:
    rounds = lab.pick("1 round", "200 rounds on MNIST and none on CIFAR-10", "as many rounds as the paper")
    return [
        f"Attacked: {ATTACKED}, uniform initialisation, one image per target. Trained: lenet5 (ReLU), FedAvg, "
        f"momentum 0.9, 100 clients of 2 classes with {_per_class(lab, 'mnist')} images each (CIFAR-10: "
        f"{_per_class(lab, 'cifar10')}), 10 per round, {rounds} (the paper: 100 images per class, 200 rounds on MNIST, "
        "1,000 on CIFAR-10). Accuracy: mean of the last three of ten evaluations. Noise is added to gradients, in "
        "training and under attack."
        + (f" Soteria ranks by {PROBES} probes in training, and exactly under attack." if lab.scale != "full" else ""),
        "The paper's Figure 5 has no table. It claims no loss of accuracy up to an MSE of 0.8, and up to 160 times the "
        "MSE of the baselines at the same accuracy. Its MSE is in normalised units, ours on images in [0, 1].",
    ]


def _tradeoff(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """Plot accuracy over the attacker's MSE, one panel per attack; filled markers are adaptive attackers."""
    attacks = list(dict.fromkeys(row["attack"] for row in rows))
    figure = Figure(figsize=(4 * len(attacks), 3.6), layout="constrained")
    panels = figure.subplots(1, len(attacks), squeeze=False)[0]
    families = list(dict.fromkeys(row["defence"].split(":")[0] for row in rows))
    for axes, attack in zip(panels, attacks, strict=True):
        for index, family in enumerate(families):
            for adaptive in (False, True):
                own = [
                    r
                    for r in rows
                    if r["attack"] == attack and r["defence"].split(":")[0] == family and r["adaptive"] is adaptive
                ]
                points = [(r["mse"], 100 * r["accuracy"]) for r in own if None not in (r["mse"], r["accuracy"])]
                if points:
                    label = family if not adaptive else None
                    face = f"C{index}" if adaptive else "white"
                    axes.plot(*zip(*points, strict=True), "o-", color=f"C{index}", mfc=face, ms=5, lw=0.8, label=label)
        axes.set(title=attack.split(",")[0], xlabel="MSE", xscale="log")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy (%)")
    panels[-1].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{title}: hollow = plain attacker, filled = attacker who knows the defence")
    return figure


# --- Figure 7: convergence --------------------------------------------------------------------------------------------


PERTURBATION = 50
"""The paper's epsilon: the number of features that the defence zeroes."""


def figure_7(lab: Lab) -> Result:
    """Train softmax regression by FedAvg under the defence, and compare its loss with Theorem 2's bound."""
    rounds, mu = lab.pick(3, 100, 200), 1e-4
    rows: list[dict[str, Any]] = []
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for epochs in lab.pick((5,), (5, 10), (5, 10)):
        for sampled in lab.pick((5,), (5, 10), (5, 10)):
            for defence in ("none", f"soteria:count={PERTURBATION}"):
                lab.progress(len(rows) / lab.pick(2, 8, 8), f"E = {epochs}, K = {sampled}, {defence}")
                found = _converge(lab, epochs, sampled, rounds, mu, defence)
                rows.append(
                    {"defence": defence, "epochs": epochs, "sampled": sampled,
                     "loss_first_round": rounded(found.losses[0]), "loss_last_round": rounded(found.losses[-1]),
                     "optimum": rounded(found.optimum), "gap": rounded(found.losses[-1] - found.optimum),
                     "bound_on_gap": rounded(found.bound)}
                )  # fmt: skip
                label = f"E = {epochs}, K = {sampled}, {defence.split(':')[0]}"
                style = ":" if defence == "none" else "-"
                axes.plot(range(1, rounds + 1), found.losses, style, lw=1.2, label=label)
    axes.set(xlabel="round", ylabel="training loss F", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=7)
    notes = [
        f"Softmax regression with an L2 penalty of {mu:g} / 2 on MNIST, 100 clients of 2 digits, batch 32, "
        f"{rounds} rounds, epsilon = {PERTURBATION} entries of each input, the learning rate of Theorem 2.",
        "The paper's Figure 7 has no table; it claims that the loss converges. The bound is that of Theorem 2 with "
        "measured constants: G and sigma are the largest values found at the initial and at the optimal weights.",
    ]
    return Result(rows, notes, {"convergence": figure})


def _converge(lab: Lab, epochs: int, sampled: int, rounds: int, mu: float, defence: str) -> Convergence:
    per_class = lab.pick(10, 20, 100)
    settings = TrainSettings(
        dataset=lab.pick("mnist-5k", "mnist-5k", "mnist"), model="logistic", defence=defence, clients=100,
        rounds=rounds, sampled=sampled, sampling="size-replace", weighting="uniform", epochs=epochs, batch_size=32,
        momentum=0.0, weight_decay=mu, partition=f"by-class:classes=2,per_class={per_class}", normalise="none",
        seed=lab.seed,
    )  # fmt: skip

    def work() -> Convergence:
        with Simulation(settings, data_root=lab.data_root, workers=0) as simulation:
            return converge(simulation, perturbation=0 if defence == "none" else PERTURBATION)

    return Convergence(*lab.once(("convergence", settings), work))


PAPER = Paper(
    "soteria",
    "Sun et al. 2021, Soteria: Provable Defense against Privacy Leakage in Federated Learning from Representation "
    "Perspective, CVPR",
    {
        "1": Experiment("Correlation between inferred and true representations", table_1),
        "fig3": Experiment("DLG from parts of the gradient", figure_3),
        "fig5": Experiment("MSE against accuracy", figure_5),
        "fig6": Experiment("Soteria and pruning at the same rates", figure_6),
        "fig7": Experiment("Convergence of softmax regression", figure_7),
    },
)
