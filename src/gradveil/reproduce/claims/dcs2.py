"""The claims of DCS2 (Wu et al. 2024)."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gradveil.reproduce.claims import Claim, Rows, TooLittle, against_both, learned, mean_of, where, works
from gradveil.reproduce.dcs2 import CELEBA, CIFAR10, INFORMED, MNIST, NON_IID, PLAIN, TINY, Told
from gradveil.reproduce.dcs2_training import TASKS

BASELINES = ("DP-Gaussian", "Prune", "Soteria")
LEARNED = {"mnist": 0.8, "cifar10": 0.5, "faces": 0.5, "tiny": 0.3}
"""Accuracy from which a training without defence counts as having learned; the paper's are 0.87, 0.80, 0.94, 0.66."""
INVERTED = 15.0
"""PSNR without defence from which an attack counts as working; the paper's are 59, 20 and 20 dB."""
LFW = "LFW faces in place of CelebA"


def _knows(row: Mapping[str, Any]) -> bool:
    return bool(row["attacker"] != PLAIN)


def _on(task: str, rows: Rows) -> Rows:
    return where(rows, dataset=TASKS[task].title)


def _leak(rows: Rows, name: str, column: str) -> float:
    """Return the figure of the most successful attacker against a defence."""
    plain = [float(row["psnr"]) for row in where(rows, paper_name="None") if row.get("psnr") is not None]
    if plain and name != "None":
        works(max(plain), INVERTED, "dB")
    found = [float(row[column]) for row in where(rows, paper_name=name) if row.get(column) is not None]
    if not found:
        raise TooLittle(f"no {column} of {name}")
    return min(found) if column.startswith("lpips") else max(found)


def _near(task: str, name: str, column: str, paper: float) -> Callable[[Rows], float]:
    return lambda rows: abs(_leak(_on(task, rows), name, column) - paper)


def _entries(table: str, task: str, told: Told, column: str) -> Iterator[Claim]:
    """Yield a claim for each entry of a column, by the authors' own metric."""
    title = LFW if task == "faces" else TASKS[task].title
    for name, figures in told.items():
        if column in figures:
            yield Claim(
                f"{table}-{task}-{name}-{column}", f"Table {table}", f"{column.upper()} under {name} ({title})",
                f"{figures[column]:g}", table, _near(task, name, f"{column}_authors", figures[column]),
                "difference, by the authors' metric", at_most=0.1, attacker=PLAIN,
            )  # fmt: skip


def _best(task: str, column: str = "psnr") -> Callable[[Rows], float]:
    """Return by how much DCS2 leaks less than the best baseline."""

    def measure(rows: Rows) -> float:
        own = _on(task, rows)
        less, sign = min(_signed(own, name, column) for name in BASELINES), _signed(own, "DCS2", column)
        return less - sign

    return measure


def _signed(rows: Rows, name: str, column: str) -> float:
    return (-1 if column.startswith("lpips") else 1) * _leak(rows, name, column)


def _lost(task: str, column: str, name: str = "DCS2") -> Callable[[Rows], float]:
    def measure(rows: Rows) -> float:
        own = _on(task, rows)
        learned(own, LEARNED[task])
        return 100 * (mean_of(own, column, paper_name="None") - mean_of(own, column, paper_name=name))

    return measure


def _steps(column: str, *names: str) -> Callable[[Rows], float]:
    """Return the smallest fall of a column from one line to the next."""

    def measure(rows: Rows) -> float:
        values = [_leak(rows, name, column) for name in names]
        return min(a - b for a, b in itertools.pairwise(values))

    return measure


def _three(name: str, task: str, table: str, paper: tuple[str, str, str]) -> Iterator[Claim]:
    """Yield the claims that DCS2 hides best and keeps both accuracies."""
    yield from against_both(
        Claim(
            f"{table}-{task}-best", f"Table {table}", f"DCS2 leaks least of all defences ({name})", paper[0], table,
            _best(task), "dB below the best baseline", at_least=0,
        ),
        _knows,
    )  # fmt: skip
    for column, what, told in (
        ("accuracy_sensitive", "sensitive images", paper[1]), ("accuracy", "test images", paper[2]),
    ):  # fmt: skip
        yield Claim(
            f"{table}-{task}-{column}", f"Table {table}", f"DCS2 keeps the accuracy on {what} ({name})", told, table,
            _lost(task, column), "points lost", at_most=1, seeds=3,
        )  # fmt: skip


def _range_of(column: str) -> Callable[[Rows], float]:
    def measure(rows: Rows) -> float:
        values = [float(row[column]) for row in where(rows, attacker=PLAIN)]
        return max(values) - min(values)

    return measure


def _combined(rows: Rows) -> float:
    return min(_leak(rows, name, "psnr") for name in ("Prune", "DCS2")) - _leak(rows, "Prune & DCS2", "psnr")


def _above_pruning(rows: Rows) -> float:
    both, one = (mean_of(rows, "accuracy", paper_name=name) for name in ("Prune & DCS2", "Prune"))
    if one < LEARNED["mnist"]:
        raise TooLittle(f"the training under pruning reaches {one:.3g} only")
    return 100 * (both - one)


CLAIMS = (
    *_entries("1", "mnist", MNIST, "ssim"),
    *_three("MNIST", "mnist", "1", ("7.84 against 9.67 dB", "0 points lost", "0.18 points lost")),
    *_entries("1", "cifar10", CIFAR10, "ssim"),
    *_three("CIFAR-10", "cifar10", "1", ("8.04 against 11.26 dB", "9.96 points lost", "0.62 points lost")),
    *_entries("2", "faces", CELEBA, "ssim"),
    *_three(LFW, "faces", "2", ("8.24 against 8.89 dB", "0 points lost", "0.52 points won")),
    *_entries("2", "tiny", TINY, "ssim"),
    *_entries("2", "tiny", TINY, "lpips"),
    Claim(
        "2-tiny-soteria", "Section 4.2", "Soteria does not withstand the imprint attack", "SSIM 1.00", "2",
        lambda rows: _leak(_on("tiny", rows), "Soteria", "ssim"), "SSIM", at_least=0.95, attacker=PLAIN,
    ),
    *against_both(
        Claim(
            "2-tiny-dcs2", "Section 4.2", "DCS2 alone hides something from the imprint attack", "LPIPS 0.22", "2",
            lambda rows: _leak(_on("tiny", rows), "DCS2", "lpips_authors"), "LPIPS of the authors", at_least=0.1,
        ),
        _knows,
    ),
    Claim(
        "3-ssim", "Table 3", "A larger lambda_g protects better", "SSIM 0.80, 0.79, 0.78", "3",
        _steps("ssim_authors", "lambda_g = 0.5", "lambda_g = 0.7", "lambda_g = 1.0"), "smallest fall of SSIM",
        at_least=0, attacker=PLAIN,
    ),
    Claim(
        "3-accuracy", "Table 3", "A larger lambda_g costs accuracy", "65.76, 65.68, 65.24 %",
        why="the 1,600 images of Tiny-ImageNet at hand are too few to learn 200 classes",
    ),
    *_entries("4", "mnist", {name: INFORMED[name] for name in ("None", "DCS2")}, "ssim"),
    Claim(
        "5-starts", "Table 5", "Any start of the concealed sample protects alike", "7.40 to 7.97 dB", "5",
        _range_of("psnr"), "dB between the starts", at_most=2, attacker=PLAIN,
    ),
    Claim(
        "6-hidden", "Table 6", f"Faces are hidden behind CIFAR-10 images ({LFW})", "8.68 dB", "6",
        lambda rows: _leak(rows, "DCS2 from CIFAR10", "psnr"), "dB", at_most=11.7, attacker=PLAIN,
    ),
    Claim(
        "6-accuracy", "Table 6", f"That costs no accuracy ({LFW})", "0.34 points won", "6",
        _lost("faces", "accuracy", "DCS2 from CIFAR10"), "points lost", at_most=1, seeds=3,
    ),
    *against_both(
        Claim(
            "7-combined", "Table 7", "DCS2 with pruning hides more than either", "6.08 against 7.84 dB", "7",
            _combined, "dB below the better of the two", at_least=0,
        ),
        _knows,
    ),
    Claim(
        "7-accuracy", "Table 7", "Combined, the accuracy is above that of pruning alone", "0.01 points", "7",
        _above_pruning, "points above pruning", at_least=0, seeds=3,
    ),
    *against_both(
        Claim(
            "9-ats", "Table 9", "DCS2 hides more than ATS (CIFAR-10)", "8.04 against 19.68 dB", "9",
            lambda rows: _leak(rows, "ATS", "psnr") - _leak(rows, "DCS2", "psnr"), "dB below ATS", at_least=3,
        ),
        _knows,
    ),
    Claim(
        "9-accuracy", "Table 9", "DCS2 costs less accuracy than ATS (CIFAR-10)", "4.09 points", "9",
        lambda rows: _lost("cifar10", "accuracy", "ATS")(rows) - _lost("cifar10", "accuracy")(rows),
        "points that ATS loses more", at_least=0, seeds=3,
    ),
    *_entries("10", "mnist", NON_IID, "ssim"),
    *_three("MNIST, non-IID", "mnist", "10", ("7.27 against 7.28 dB", "0.52 points lost", "1.41 points lost")),
    *_entries("11", "mnist", INFORMED, "ssim"),
    Claim("ratio-10", "Appendix 8.3", "One concealed sample for 10 sensitive ones", "SSIM 0.92, 87 %",
          why="the defence makes one concealed sample for each sensitive one"),
    Claim("ratio-5", "Appendix 8.3", "One concealed sample for 5 sensitive ones", "SSIM 0.86, 86.91 %",
          why="the defence makes one concealed sample for each sensitive one"),
    Claim("fig-4", "Figure 4", "Trainings under all defences converge, except Soteria on Tiny-ImageNet",
          why="curves of trainings are not kept by the experiments; tables 1 and 2 have the last rounds"),
    Claim("fig-6", "Figure 6", "Pictures by lambda_g", why="no experiment draws them; Table 3 has the figures"),
    Claim("fig-7", "Figure 7", "Training with more local epochs", why="no experiment varies the local epochs"),
    Claim("fig-8a", "Figure 8a", "DCS2 on FACET", "77.21 and 76.62 %", why="the FACET images are not at hand"),
    Claim("fig-8b", "Figure 8b", "In a batch with four equal digits, GS loses some",
          why="no experiment of this paper attacks batches; `gradveil audit --batch-size 4` does"),
    Claim("time", "Appendix 8.2", "The cost of a step is at most six times a forward pass more",
          why="docs/performance.md has the time of DCS2 beside one image at a time"),
)  # fmt: skip
