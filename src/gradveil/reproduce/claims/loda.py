"""The claims of LODA (Wan et al. 2022), which considers attackers who know the defence itself."""

from collections.abc import Callable, Iterator, Mapping

from gradveil.reproduce.claims import KNOWING, PLAIN, Claim, Rows, TooLittle, learned, mean_of, works
from gradveil.reproduce.loda import CIFAR10, SVHN, TABLE_5, TABLE_6

LEARNED = 0.6
"""Accuracy on CIFAR-10 from which a training without defence counts as having learned; the paper's is 0.95."""


INVERTED = 15.0
"""PSNR without defence from which an attack counts as working; the paper's is 16.6 dB on CIFAR-10."""


def _psnr(name: str) -> Callable[[Rows], float]:
    return lambda rows: _figure(rows, "psnr", name)


def _figure(rows: Rows, column: str, name: str) -> float:
    works(mean_of(rows, "psnr", defence="no defence"), INVERTED, "dB")
    return mean_of(rows, column, defence=name)


def _entries(table: str, told: Mapping[str, tuple[float, str, str]], attacker: str, dataset: str) -> Iterator[Claim]:
    """Yield a claim for the privacy and one for the accuracy of each line of a table."""
    plain = attacker == PLAIN
    for name, (accuracy, *figures) in told.items():
        text = figures[0 if plain else 1]
        paper = float(text.partition(", ")[2].partition(" /")[0])
        yield Claim(
            f"{table}-{name}", f"Table {table}", f"Mean PSNR under {name} ({dataset})", f"{paper:g} dB", table,
            _apart(name, paper), "dB of difference", at_most=3, attacker=attacker,
        )  # fmt: skip
        if plain and name != "no defence":
            lost = 100 * (told["no defence"][0] - accuracy)
            yield Claim(
                f"{table}-{name}-accuracy", f"Table {table}", f"Accuracy lost under {name} ({dataset})",
                f"{lost:.2f} points", table, _lost(name), "points lost", at_most=lost + 2, seeds=3,
            )  # fmt: skip


def _apart(name: str, paper: float) -> Callable[[Rows], float]:
    return lambda rows: abs(_psnr(name)(rows) - paper)


def _lost(name: str) -> Callable[[Rows], float]:
    def measure(rows: Rows) -> float:
        best = learned(rows, LEARNED, defence="no defence")
        return 100 * (best - mean_of(rows, "accuracy", defence=name))

    return measure


def _less(name: str, other: str, column: str = "psnr") -> Callable[[Rows], float]:
    """Return by how much the figure of one defence is below that of another."""
    return lambda rows: _figure(rows, column, other) - _figure(rows, column, name)


def _weights(table: str, name: str, told: Mapping[int, tuple[float, float]]) -> Iterator[Claim]:
    accuracies = " / ".join(f"{100 * accuracy:.1f}" for accuracy, _ in told.values())
    yield Claim(
        f"{table}-accuracy", f"Table {table}", f"Accuracy of {name} falls as c grows", f"{accuracies} %", table,
        _falls("accuracy"), "accuracy at the smallest c less that at the largest", at_least=0.02, seeds=3,
    )  # fmt: skip
    yield Claim(
        f"{table}-psnr", f"Table {table}", f"Images of {name} are less alike as c grows",
        " / ".join(f"{psnr:g}" for _, psnr in told.values()) + " dB", table,
        _falls("psnr"), "dB at the smallest c less those at the largest", at_least=0,
    )  # fmt: skip


def _falls(column: str) -> Callable[[Rows], float]:
    def measure(rows: Rows) -> float:
        ordered = sorted((row for row in rows if row[column] is not None), key=lambda row: float(row["c"]))
        if len(ordered) < 2:
            raise TooLittle("one value of c only")
        if column == "accuracy" and float(ordered[0][column]) < LEARNED:
            raise TooLittle(f"the training reaches {float(ordered[0][column]):.3g} only at the smallest c")
        return float(ordered[0][column]) - float(ordered[-1][column])

    return measure


def _networks(rows: Rows) -> float:
    """Return the largest accuracy lost by a network on the images of LODA_2."""
    plain, obscured = (next(row for row in rows if row["data"] == name) for name in ("CIFAR10", "LODA_2"))
    names = [key for key in plain if key not in ("data", "paper")]
    if min(float(plain[name]) for name in names) < LEARNED:
        raise TooLittle("networks on plain images learned too little")
    return 100 * max(float(plain[name]) - float(obscured[name]) for name in names)


CLAIMS = (
    *_entries("1", CIFAR10, PLAIN, "CIFAR-10"),
    Claim(
        "1-pruning", "Section 5.2", "Pruning 90 % protects badly", "11.48 dB", "1",
        _less("LODA_1", "GradPruning p=0.9"), "dB above LODA_1", at_least=3, attacker=PLAIN,
    ),
    Claim(
        "1-pruning-more", "Section 5.2", "Pruning 99 % protects better than 90 %", "5.44 against 11.48 dB", "1",
        _less("GradPruning p=0.99", "GradPruning p=0.9"), "dB below", at_least=1, attacker=PLAIN,
    ),
    Claim(
        "1-mixup", "Section 5.2", "Mixup protects well without decoding", "LPIPS 0.377", "1",
        lambda rows: _figure(rows, "lpips", "Mixup k=4"), "LPIPS", at_least=0.3, attacker=PLAIN,
    ),
    Claim(
        "1-instahide", "Section 5.2", "InstaHide protects better than Mixup without decoding", "9.51 against 15.01 dB",
        "1", _less("InstaHide k=4", "Mixup k=4"), "dB below Mixup", at_least=1, attacker=PLAIN,
    ),
    Claim(
        "1-loda", "Section 5.2", "LODA_1 protects about as well as InstaHide without decoding", "5.77 against 9.51 dB",
        "1", _less("LODA_1", "InstaHide k=4"), "dB below InstaHide", at_least=-1, attacker=PLAIN,
    ),
    *_entries("2", CIFAR10, KNOWING, "CIFAR-10"),
    Claim(
        "2-mixup", "Section 5.2", "Mixup loses almost all privacy to decoding", "29.23 dB", "2",
        _psnr("Mixup k=4"), "dB", at_least=25, attacker=KNOWING,
    ),
    Claim(
        "2-instahide", "Section 5.2", "InstaHide is decoded too, though worse than Mixup", "LPIPS 0.395 against 0.039",
        "2", _less("Mixup k=4", "InstaHide k=4", "lpips"), "LPIPS above Mixup", at_least=0.05, attacker=KNOWING,
    ),
    Claim(
        "2-loda", "Section 5.2", "LODA_1 protects far better than InstaHide against decoding",
        "LPIPS 0.537 against 0.395", "2", _less("InstaHide k=4", "LODA_1", "lpips"), "LPIPS above InstaHide",
        at_least=0.05, attacker=KNOWING,
    ),
    *_entries("3", SVHN, PLAIN, "SVHN"),
    *_entries("4", SVHN, KNOWING, "SVHN"),
    Claim(
        "4-loda", "Section 5.2", "On SVHN, LODA_3 remains the most effective defence against decoding", "13.35 dB", "4",
        lambda rows: min(_less("LODA_3", other)(rows) for other in SVHN if other not in ("LODA_3", "no defence")),
        "smallest margin to another defence in dB", at_least=0, attacker=KNOWING,
    ),
    Claim(
        "fig2", "Figure 2", "Mixup, decoded, is close to the private images; LODA_1 is not", "", "fig2",
        lambda rows: mean_of([row for row in rows if row["decoded"]], "psnr", defence="Mixup k=6")
        - mean_of([row for row in rows if row["decoded"]], "psnr", defence="LODA_1"),
        "dB of Mixup k=6 above LODA_1", at_least=6, attacker=KNOWING,
    ),
    *_weights("5", "LODA_1", TABLE_5),
    *_weights("6", "LODA_2", TABLE_6),
    Claim(
        "7", "Table 7", "Other networks learn from obscured images about as well (LODA_2)", "3.4 to 4.6 points lost",
        "7", _networks, "most points lost", at_most=6, seeds=3,
    ),
)  # fmt: skip
