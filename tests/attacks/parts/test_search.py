import pytest

from gradveil.attacks.parts import search
from gradveil.attacks.parts.objectives import Objective
from gradveil.errors import ConfigError
from tests.attacks.scene import scene


def test_a_restricted_search_keeps_weights_in_every_phase_and_leaves_out_what_was_left_out():
    _, _, seen = scene(targets=1)
    weighted = search.Search(Objective("l2", weights={"fc.weight": 0.0, "fc.bias": 2.0}), first=search.Search())
    found = search.restricted(weighted, "linear", seen.network, seen.updates)
    assert {name: w for name, w in found.objective.weights.items() if w} == {"fc.bias": 2.0}
    assert {name for name, w in found.phases[0].objective.weights.items() if w} == {"fc.weight", "fc.bias"}
    assert search.restricted(weighted, "all", seen.network, seen.updates) is weighted
    nothing = search.Search(Objective("l2", weights={"fc.weight": 0.0, "fc.bias": 0.0}))
    with pytest.raises(ConfigError, match="parts=linear"):
        search.restricted(nothing, "linear", seen.network, seen.updates)


def test_parts_leave_what_is_beside_the_tensors_out():
    _, _, seen = scene()
    whole = search.Search(Objective("cosine", weights={"keep/fc.weight": 0.0, "fc.bias": 2.0}))
    weights = search.restricted(whole, "linear", seen.network, seen.updates).objective.weights
    assert weights["keep/fc.weight"] == 0
    assert (weights["fc.weight"], weights["fc.bias"], weights["conv1.weight"]) == (1, 2, 0)
