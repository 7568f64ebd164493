"""What a site's answers cost over all runs: exact for Gaussian guarantees, added for others, infinite without one."""

import math

import pytest

from gradveil.defences import Budget, build_defence
from gradveil.defences.parts.gaussian_dp import epsilon_of
from gradveil.engines.site_budget import cost_of, epsilon_in_all, require_affordable, spent
from gradveil.engines.site_ledger import Ledger, RunRecord
from gradveil.engines.site_policy import SitePolicy
from gradveil.errors import RefusedError
from gradveil.federated.protocol import LocalSettings

FEDSGD = LocalSettings(algorithm="fedsgd", batch_size=0)


def of_veil(mu, rounds, updates):
    return cost_of(build_defence(f"veil:mu={mu},rounds={rounds}"), FEDSGD, 100, updates, 10)


def test_gaussian_runs_compose_exactly():
    one, other = of_veil(3, 9, 9), of_veil(4, 16, 16)
    assert one.mu == pytest.approx(3)
    assert epsilon_in_all([one, other], 1e-4) == pytest.approx(epsilon_of(5, 1e-4))
    assert of_veil(3, 9, 1).mu == pytest.approx(1)  # one of nine rounds is a ninth of mu squared


def test_what_others_use_of_delta_is_missing_for_the_rest():
    mixed = [Budget(2.0, 4e-5), Budget(1.0, 5e-5), Budget(0, 0, 1.0)]
    assert epsilon_in_all(mixed, 1e-4) == pytest.approx(3.0 + epsilon_of(1.0, 1e-5), rel=1e-6)
    assert epsilon_in_all([Budget(1.0, 5e-5), Budget(1.0, 5e-5)], 1e-4) == 2.0
    assert epsilon_in_all([Budget(1.0, 5e-5), Budget(1.0, 6e-5)], 1e-4) == math.inf
    assert epsilon_in_all([Budget(1.0, 1e-4), Budget(0, 0, 1.0)], 1e-4) == math.inf
    assert epsilon_in_all([], 1e-4, scores=0.5) == 0.5


def test_without_a_guarantee_nothing_is_bounded():
    assert cost_of(build_defence("prune"), FEDSGD, 100, 1, 10) is None
    assert cost_of(build_defence("dp-sgd:noise=0"), FEDSGD, 100, 1, 10) is None
    assert cost_of(build_defence("ca-fl:per=number"), FEDSGD, 100, 1, 0) is None
    ledger = Ledger().with_run("a", RunRecord(begun=1, cost=Budget(1.0, 0.0))).with_run("b", RunRecord(begun=1))
    assert spent(ledger, 1e-4) == math.inf
    require_affordable(SitePolicy(), ledger)  # no limit was set
    with pytest.raises(RefusedError, match=r"max-epsilon = 9 .* got inf"):
        require_affordable(SitePolicy(max_epsilon=9.0), ledger)


def test_the_limit_holds_over_runs_and_scores():
    policy = SitePolicy(max_epsilon=3.0)
    ledger = Ledger(epsilon=1.0).with_run("a", RunRecord(begun=1, cost=Budget(2.0, 0.0)))
    require_affordable(policy, ledger)
    with pytest.raises(RefusedError) as caught:
        require_affordable(policy, ledger.with_run("b", RunRecord(begun=1, cost=Budget(0.1, 0.0))))
    assert caught.value.code == "epsilon"
