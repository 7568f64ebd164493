import dataclasses
import math

import pytest
import torch

from gradveil.attacks.gs import Gs
from gradveil.attacks.idlg import Idlg
from gradveil.attacks.parts.adaptive import ROUGHNESS
from gradveil.attacks.parts.countermoves import countermoves
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.search import Priors, Search
from gradveil.attacks.parts.search_step import SearchStep
from gradveil.defences import Countermove, Defence, build_defence
from gradveil.errors import UnknownNameError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.models import Normalisation
from tests.attacks.scene import adapted, psnr, run, scene

KNOWS = ("num-examples", "labels", "defence")
GS = Gs(iterations=250, sign="none", schedule="cosine", lr=0.1, tv=1e-6)


@dataclasses.dataclass(frozen=True)
class Doubling(Defence):
    """A defence that sends twice the update, to which it has a countermove."""

    noise: float = 0.0
    distance: str = "l2"

    def on_update(self, update, client):
        return update * 2.0

    def adaptive(self, arrived):
        noise = dict.fromkeys(arrived.gradients, self.noise) if self.noise else {}
        double = Countermove(lambda guess, _: {k: 2 * v for k, v in guess.items()}, self.distance, noise)
        return {"double": double, "plain": Countermove(distance="l1")}


def mean_psnr(truth, result):
    return psnr(truth.flatten(0, 1), result.images.flatten(0, 1)).mean()


def test_without_knowledge_of_the_defence_nothing_changes():
    _, _, seen = scene(defence=Doubling(), grants=("num-examples", "labels"))
    search = Search(Objective("cosine"))
    assert countermoves(seen) == {}
    assert adapted(search, seen) is search


def test_the_first_countermove_is_played_unless_another_or_none_is_asked_for():
    _, _, seen = scene(defence=Doubling(), grants=KNOWS)
    search = Search(Objective("cosine"))
    assert adapted(search, seen).objective.kind == "l2"
    assert adapted(search, seen).move.sent is not None
    assert adapted(search, seen, "plain").objective.kind == "l1"
    assert adapted(search, seen, "none") is search
    with pytest.raises(UnknownNameError, match=r"countermove.*'dubble'.*double"):
        adapted(search, seen, "dubble")


@pytest.mark.parametrize(("distance", "factor"), [("l2", 0.5 / 0.1**2), ("l1", math.sqrt(2) / 0.1)])
def test_noise_weighs_the_distance_against_the_prior(distance, factor):
    defence, normalisation = Doubling(noise=0.1, distance=distance), Normalisation((0.3,), (0.5,))
    _, _, seen = scene(size=2, defence=defence, grants=KNOWS, normalisation=normalisation)
    found = adapted(Search(Objective("cosine"), Priors(tv=1e-4)), seen)
    pixels = 2 * 8 * 8
    assert found.objective.kind == distance
    assert found.objective.weights == pytest.approx(dict.fromkeys(seen.updates, factor / pixels))
    assert found.priors.tv == pytest.approx(0.5 / ROUGHNESS)


def test_steps_reach_the_defence_at_their_true_length():
    heard = []

    class Listening(Doubling):
        def adaptive(self, arrived):
            heard.append((next(iter(arrived.gradients.values())).shape[0], list(arrived.steps)))
            return {}

    how = LocalSettings(epochs=2, batch_size=2, momentum=0.5)
    grants = (*KNOWS, "local-steps")
    _, _, seen = scene(targets=3, size=2, defence=Listening(), grants=grants, protocol=Protocol(how, 0.1))
    countermoves(seen)
    assert heard == [(3, pytest.approx([0.15, 0.1]))]


def test_an_attacker_who_knows_the_doubling_reconstructs_again():
    truth, _, seen = scene(defence=Doubling(), grants=KNOWS)
    knowing, plain = (run(Idlg(iterations=40, adapt=adapt), seen) for adapt in ("", "none"))
    assert mean_psnr(truth, knowing) > mean_psnr(truth, plain) + 10
    assert not any(knowing.why)
    assert all("times as large" in why for why in plain.why)


@pytest.mark.parametrize(
    ("spec", "gain"),
    [
        ("prune:fraction=0.5", 1.0),
        ("gaussian:std=0.05", 1.0),
        ("laplace:scale=0.05", 1.0),
        ("quantise:bits=3", 0.0),
        ("quantise:bits=3,stochastic=true", 0.0),
        ("prune:fraction=0.5+gaussian:std=0.02", 1.0),
        ("gaussian:std=0.05+clip:norm=0.1", -0.5),
    ],
)
def test_knowledge_of_a_defence_helps(spec, gain):
    """With the same starts, the mean PSNR of four targets rises by at least the stated dB."""
    truth, _, seen = scene(targets=4, defence=build_defence(spec), grants=KNOWS)
    knowing, plain = (run(dataclasses.replace(GS, adapt=adapt), seen) for adapt in ("", "none"))
    assert mean_psnr(truth, knowing) > mean_psnr(truth, plain) + gain


def test_the_compiled_step_plays_the_countermove_too():
    _, _, seen = scene(defence=build_defence("prune:fraction=0.5"), grants=KNOWS)
    found = [run(Gs(iterations=3, compile=way), seen) for way in ("off", "on")]
    torch.testing.assert_close(found[0].loss, found[1].loss, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found[0].loss, run(Gs(iterations=3, adapt="none"), seen).loss, rtol=1e-3)


def test_under_noise_the_likelihood_phase_starts_at_the_result_of_the_first_phase(monkeypatch):
    """The phases share the steps, and the result is that of the likelihood."""
    _, _, seen = scene(defence=build_defence("gaussian:std=0.1"), grants=KNOWS)
    kinds, evaluate = [], SearchStep.evaluate

    def watched(step, flat, task):
        kinds.append(step.search.objective.kind)
        return evaluate(step, flat, task)

    monkeypatch.setattr(SearchStep, "evaluate", watched)
    result = run(Gs(iterations=7, keep=7, compile="off"), seen)
    assert kinds == ["cosine"] * 4 + ["l2"] * 5  # 3 and 4 steps, and a final evaluation in each phase
    assert result.steps == (0, 1, 2, 3, 4, 5, 6, 7)
    assert len(result.iterates) == len(result.steps)
    phases = adapted(Search(Objective("cosine")), seen).phases
    assert [phase.objective.kind for phase in phases] == ["cosine", "l2"]


def test_a_tensor_can_be_left_out_of_the_match():
    @dataclasses.dataclass(frozen=True)
    class Spoilt(Defence):
        """A defence that replaces one tensor by noise."""

        def on_update(self, update, client):
            name = next(iter(update.tensors))
            spoilt = client.rng.normal(update.tensors[name].shape)
            return dataclasses.replace(update, tensors={**update.tensors, name: spoilt})

        def adaptive(self, arrived):
            return {"others": Countermove(weights={next(iter(arrived.gradients)): 0.0})}

    truth, _, seen = scene(defence=Spoilt(), grants=KNOWS)
    knowing, plain = (run(dataclasses.replace(GS, adapt=adapt), seen) for adapt in ("", "none"))
    assert mean_psnr(truth, knowing) > mean_psnr(truth, plain) + 3
