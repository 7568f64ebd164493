"""The claims of Model Entanglement (ICLR 2025 submission)."""

from collections.abc import Callable, Mapping
from typing import Any

from gradveil.reproduce.claims import Claim, Rows, TooLittle, against_both, learned, mean_of, where

ME, RIVALS = "entangle:beta=0.7", ("pogz", "ca-fl")
DIRICHLET = "dirichlet:alpha=0.5"
LEARNED = 0.85
"""Accuracy on MNIST from which a training without defence counts as having learned."""
INVERTED = 0.3
"""Normalised MSE without defence below which an attack counts as working; the paper's is below 0.05."""
NOT_THE_PUBLISHED = "the rival is a stand-in by this paper's description, not the published method"


def _trained(rows: Rows) -> Rows:
    return [row for row in where(rows, partition=DIRICHLET) if row["dataset"].startswith("mnist")]


def _lost(rows: Rows) -> float:
    rows = _trained(rows)
    return 100 * (learned(rows, LEARNED) - mean_of(rows, "accuracy", defence=ME))


def _more_replaced_is_worse(rows: Rows) -> float:
    rows = _trained(rows)
    learned(rows, LEARNED)
    return mean_of(rows, "accuracy", defence="entangle:beta=0.89") - mean_of(
        rows, "accuracy", defence="entangle:beta=0.3"
    )


def _mu(rows: Rows) -> float:
    return mean_of(_trained(rows), "mu", defence=ME)


def _cifar(rows: Rows) -> float:
    rows = [row for row in where(rows, partition=DIRICHLET) if row["dataset"].startswith("cifar")]
    return 100 * (learned(rows, 0.4) - mean_of(rows, "accuracy", defence=ME))


def _against(column: str, rival: str, least: float) -> Callable[[Rows], float]:
    def measure(rows: Rows) -> float:
        learned(rows, least)
        return mean_of(rows, column, defence=rival) - mean_of(rows, column, defence=ME)

    return measure


def _slower(rows: Rows) -> float:
    learned(rows, LEARNED)
    return mean_of(rows, "early_accuracy", defence="none") - mean_of(rows, "early_accuracy", defence=ME)


def _mse(dataset: str, column: str, combine: Callable[[list[float]], float], defence: str) -> Callable[[Rows], float]:
    def measure(rows: Rows) -> float:
        mine = [row for row in rows if row["dataset"].startswith(dataset)]
        own = [row for row in where(mine, defence=defence) if defence == "none" or _inverts(mine, row["model"])]
        if not own:
            raise TooLittle(f"no row of {defence} on {dataset}, or GS fails without defence on every network")
        return combine([float(row[column]) for row in own])

    return measure


def _inverts(rows: Rows, model: str) -> bool:
    """Return whether GS reconstructs images without defence on a network: else nothing shows that a defence hides."""
    return mean_of(rows, "mse_normalised", defence="none", model=model) < INVERTED


def _higher(dataset: str) -> Callable[[Rows], float]:
    """Return the smallest ratio of ME's MSE to that of a rival, over networks and rivals."""

    def measure(rows: Rows) -> float:
        mine = [row for row in rows if row["dataset"].startswith(dataset)]
        ratios = [
            float(ours["mse"]) / float(theirs["mse"])
            for ours in where(mine, defence=ME)
            if _inverts(mine, ours["model"])
            for rival in RIVALS
            for theirs in where(mine, defence=rival, model=ours["model"])
        ]
        if not ratios:
            raise TooLittle(f"no rows on {dataset}, or GS fails without defence on every network")
        return min(ratios)

    return measure


def _auc(*defences: str) -> Callable[[Rows], float]:
    """Return the AUC of the first defence less that of the second, in standard errors of guessing."""

    def measure(rows: Rows) -> float:
        error = mean_of(rows, "auc_standard_error", defence=defences[0])
        return (mean_of(rows, "auc", defence=defences[0]) - mean_of(rows, "auc", defence=defences[1])) / error

    return measure


def _knows(row: Mapping[str, Any]) -> bool:
    return bool(row["attacker"] == "knows it")


CLAIMS = (
    Claim(
        "1b", "Figure 1b", "Representations of ones and fives are clearly told apart", "clearly differentiated",
        "fig1b", lambda rows: min(float(row["digits_told_apart"]) for row in rows if "lenet5 at" in row["space"]),
        "share of points on the side of their digit, trained network", at_least=0.95,
    ),
    Claim(
        "1b-pixels", "Figure 1b", "It is the representations that tell them apart (our control: raw pixels do worse)",
        "", "fig1b",
        lambda rows: mean_of([row for row in rows if "lenet5 at" in row["space"]], "digits_told_apart")
        - mean_of(rows, "digits_told_apart", space="pixels, no network"),
        "share told apart, trained network less pixels", at_least=0.01,
    ),
    Claim(
        "mu", "Equation 10", "Of the representations, 0.3 to 0.4 are replaced at beta = 0.7 on MNIST", "0.3 to 0.4",
        "fig4", _mu, "mean share over the rounds", at_least=0.3, at_most=0.4,
    ),
    Claim(
        "4-lost", "Abstract, Figure 4", "At beta = 0.7 on MNIST, accuracy falls by less than 0.7 points", "below 0.7",
        "fig4", _lost, "points lost", at_most=0.7, seeds=3,
    ),
    Claim(
        "4-slower", "Section 5.2.1", "It converges slightly more slowly than FedAvg", "slightly reduced", "fig5a",
        _slower, "accuracy lost in the first third of the rounds", at_least=0, at_most=0.1, seeds=3,
    ),
    Claim(
        "4-beta", "Section 5.2.1", "Beyond a threshold, accuracy falls as beta falls", "", "fig4",
        _more_replaced_is_worse, "accuracy at beta = 0.89 less that at 0.3", at_least=0, seeds=3,
    ),
    Claim(
        "4-cifar", "Section 5.2.1", "It is also effective on CIFAR-10", "no figure", "fig4",
        _cifar, "points lost", at_most=2, seeds=3,
    ),
    Claim(
        "5a-pogz", "Figure 5a", f"POGZ-FL learns faster at first ({NOT_THE_PUBLISHED})", "", "fig5a",
        _against("early_accuracy", "pogz", LEARNED), "accuracy in the first third, POGZ-FL less ME", at_least=0,
        seeds=3,
    ),
    Claim(
        "5a-pogz-swing", "Figure 5a", f"POGZ-FL does not settle ({NOT_THE_PUBLISHED})", "", "fig5a",
        _against("swing_points", "pogz", LEARNED), "points of swing at the end, POGZ-FL less ME", at_least=0, seeds=3,
    ),
    Claim(
        "5a-ca-fl", "Figure 5a", f"CA-FL learns far more slowly ({NOT_THE_PUBLISHED})", "", "fig5a",
        _against("early_accuracy", "ca-fl", LEARNED), "accuracy in the first third, CA-FL less ME", at_most=-0.1,
        seeds=3,
    ),
    Claim(
        "6-undefended", "Section 5.3.1", "Without defence, GS reconstructs MNIST nearly completely", "MSE below 0.05",
        "fig6", _mse("mnist", "mse_normalised_oracle_of_5", max, "none"),
        "largest normalised MSE of both networks, best of five by the truth as in the paper", at_most=0.05,
        attacker="plain",
    ),
    *against_both(
        Claim(
            "6-hidden", "Section 5.3.1", "Under ME, the MNIST image is not recognisable", "MSE 0.9835", "fig6",
            _mse("mnist", "mse_normalised", min, ME), "smallest normalised MSE of both networks", at_least=0.8,
        ),
        _knows,
    ),
    *against_both(
        Claim(
            "6-mnist", "Section 5.3.1", f"On MNIST, ME has a higher MSE than both rivals ({NOT_THE_PUBLISHED})", "",
            "fig6", _higher("mnist"), "smallest ratio to a rival", at_least=1,
        ),
        _knows,
    ),
    *against_both(
        Claim(
            "6-cifar", "Section 5.3.1", f"On CIFAR-10, ME has a higher MSE than both rivals ({NOT_THE_PUBLISHED})", "",
            "fig6", _higher("cifar"), "smallest ratio to a rival", at_least=1,
        ),
        _knows,
    ),
    Claim(
        "5b-fedavg", "Figure 5b", "The boundary attack tells members of FedAvg's clients", "AUC 0.5453", "fig5b",
        lambda rows: mean_of(rows, "auc", defence="none"), "AUC", at_least=0.525, at_most=0.565, attacker="plain",
    ),
    Claim(
        "5b-me", "Figure 5b", "Under ME, the AUC is lower by two standard errors or more", "0.5245", "fig5b",
        _auc("none", ME), "difference in standard errors of guessing", at_least=2, attacker="plain",
    ),
    Claim(
        "5b-ca-fl", "Figure 5b", f"It is lower than under CA-FL ({NOT_THE_PUBLISHED})", "0.5357", "fig5b",
        _auc("ca-fl", ME), "difference in standard errors of guessing", at_least=2, attacker="plain",
    ),
    Claim(
        "5c", "Figure 5c", "A round takes 6.8 % longer than without defence", "1.068 times", "fig5c",
        lambda rows: mean_of(rows, "times_fedavg", defence=ME), "times FedAvg", at_most=1.1,
    ),
    Claim(
        "5c-pogz", "Figure 5c", f"POGZ-FL takes longer than ME ({NOT_THE_PUBLISHED})", "1.494 times", "fig5c",
        lambda rows: mean_of(rows, "times_fedavg", defence="pogz") / mean_of(rows, "times_fedavg", defence=ME),
        "times ME", at_least=1,
    ),
    Claim(
        "5c-ca-fl", "Figure 5c", f"CA-FL takes longest ({NOT_THE_PUBLISHED})", "2.966 times", "fig5c",
        lambda rows: mean_of(rows, "times_fedavg", defence="ca-fl") / mean_of(rows, "times_fedavg", defence="pogz"),
        "times POGZ-FL", at_least=1,
    ),
    Claim(
        "a1", "Appendix A.1", "Analytic inversion fails where representations are replaced",
        why="the attack `r-gap` exists; no experiment of this paper plays it yet",
    ),
)  # fmt: skip
