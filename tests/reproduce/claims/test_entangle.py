"""Claims of Model Entanglement, judged on rows made by hand."""

import pytest

from gradveil.reproduce.claims import TooLittle, claims_of, judge

CLAIMS = {claim.id: claim for claim in claims_of("entangle")}


def training(defence, accuracy, mu=None):
    return {
        "dataset": "mnist-5k",
        "partition": "dirichlet:alpha=0.5",
        "defence": defence,
        "accuracy": accuracy,
        "mu": mu,
    }


def test_points_are_lost_against_fedavg_on_the_main_partition():
    rows = [training("none", 0.95), training("entangle:beta=0.7", 0.94, 0.35),
            training("entangle:beta=0.3", 0.5, 0.7),
            {**training("none", 0.2), "partition": "label-parts"},
            training("entangle:beta=0.89", 0.9, 0.1)]  # fmt: skip
    assert CLAIMS["4-lost"].measure(rows) == pytest.approx(1)
    assert CLAIMS["4-beta"].measure(rows) == pytest.approx(0.4)
    assert CLAIMS["mu"].measure(rows) == 0.35
    with pytest.raises(TooLittle, match=r"reaches 0\.5 only"):
        CLAIMS["4-lost"].measure([training("none", 0.5), *rows[1:2]])


def attack(defence, attacker, mse, model="lenet5"):
    return {"dataset": "mnist", "model": model, "defence": defence, "attacker": attacker, "mse": mse,
            "mse_normalised": 10 * mse, "mse_normalised_oracle_of_5": mse}  # fmt: skip


def test_the_weakest_network_and_the_strongest_rival_decide():
    rows = [attack("none", "plain", 0.001), attack("none", "plain", 0.001, "lenet-dlg"),
            attack("entangle:beta=0.7", "plain", 0.1),
            attack("entangle:beta=0.7", "plain", 0.3, "lenet-dlg"), attack("pogz:alpha=1.0", "plain", 0.05),
            attack("ca-fl:epsilon=5", "plain", 0.2), attack("entangle:beta=0.7", "knows it", 0.001)]  # fmt: skip
    runs = [{"scale": "small", "seed": 0, "rows": rows}]
    assert CLAIMS["6-mnist"].measure(rows) == pytest.approx(0.5)
    assert judge("entangle", CLAIMS["6-hidden"], runs).verdict == "holds"
    assert judge("entangle", CLAIMS["6-hidden-known"], runs).verdict == "fails"
    assert judge("entangle", CLAIMS["6-undefended"], runs).verdict == "holds"


def test_networks_on_which_the_attack_fails_without_defence_do_not_count():
    rows = [attack("none", "plain", 0.2), attack("entangle:beta=0.7", "plain", 0.2), attack("pogz:a=1", "plain", 0.1)]
    for name in ("6-hidden", "6-mnist"):
        with pytest.raises(TooLittle, match="GS fails without defence"):
            CLAIMS[name].measure(rows)


def test_differences_of_membership_are_in_standard_errors():
    rows = [{"defence": name, "auc": auc, "auc_standard_error": 0.01}
            for name, auc in (("none", 0.55), ("entangle:beta=0.7", 0.52))]  # fmt: skip
    assert CLAIMS["5b-me"].measure(rows) == pytest.approx(3)
