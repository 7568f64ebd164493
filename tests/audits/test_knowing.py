"""An attacker who knows the defence may play the plain attack too, and keeps the better guess by what it can check."""

from dataclasses import dataclass, replace

import pytest
import torch

from gradveil.attacks import Attack, build_attack
from gradveil.attacks.matching import shared_out
from gradveil.attacks.parts.combined import ignorant, mixed
from gradveil.audits import audit
from gradveil.audits.knowing import PLAIN, played, rehearsed
from gradveil.defences import build_defence
from gradveil.errors import ThreatModelError
from gradveil.progress import listening
from gradveil.randomness import stream
from gradveil.threat import Knowledge, PublicKnowledge, Reconstruction, ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.audits.test_one_world import privacy


@dataclass(frozen=True)
class Canned(Attack):
    """Guess one grey knowing the defence, another not knowing it; say which targets converged."""

    known: float = 0.2
    plain: float = 0.8
    known_converges: tuple[bool, ...] = (False, False)
    plain_converges: tuple[bool, ...] = (True, False)

    def run(self, seen, rng):
        knows = seen.knows(Knowledge.DEFENCE)
        images = torch.full((seen.num_targets, 1, *seen.shape), self.known if knows else self.plain)
        converged = torch.tensor((self.known_converges if knows else self.plain_converges)[: seen.num_targets])
        blank = ("",) * seen.num_targets
        labels, loss = torch.zeros(seen.num_targets, 1).long(), torch.full((seen.num_targets,), 1.0 + knows)
        return Reconstruction(images, labels, loss, converged, why=blank, answers=("its own" * knows,) * len(blank))


def observed(*knows, grey=0.8, count=2):
    batches = [Batch(torch.full((1, 1, 4, 4), grey), torch.tensor([n]), torch.tensor([False])) for n in range(count)]
    seen = observe(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)), batches, num_classes=3,
        threat=ThreatModel.of("labels", "num-examples", *knows), defence=build_defence("gaussian"),
        public=PublicKnowledge(batches[0]),
    )  # fmt: skip
    return seen, batches


def rng():
    return stream(0, "attack")


def test_the_plain_guess_is_kept_where_only_the_plain_search_explained_the_update():
    seen, _ = observed("defence")
    result = played(Canned(), seen, rng)
    assert result.images[:, 0, 0, 0, 0].tolist() == pytest.approx([0.8, 0.2])
    assert result.answers == (PLAIN, "its own")
    assert result.converged.tolist() == [True, False]
    assert result.loss.tolist() == [1.0, 2.0]
    assert "only the plain search explained the update" in result.why[0]
    assert not result.why[1]


def test_a_search_that_explained_the_update_is_kept():
    seen, _ = observed("defence")
    result = played(Canned(known_converges=(True, True)), seen, rng)
    assert result.answers == ("its own", "its own")


@pytest.mark.parametrize(("grey", "chosen"), [(0.8, 0.8), (0.2, 0.2)])
def test_a_rehearsal_on_public_images_decides_for_all_targets(grey, chosen):
    seen, _ = observed("defence", "public-data")
    spare = observed("defence", grey=grey)[1]
    result = played(Canned(known_converges=(True, True)), seen, rng, spare)
    assert result.images[:, 0, 0, 0, 0].tolist() == pytest.approx([chosen] * 2)
    assert (result.answers[0] == PLAIN) == (chosen == 0.8)
    assert all("on public images" in why for why in result.why)


@pytest.mark.parametrize("granted", [("defence",), ("defence", "public-data")])
def test_progress_of_several_searches_never_goes_back(granted):
    seen, spare = observed(*granted)
    heard = []
    with listening(heard.append):
        played(build_attack("gs:iterations=6"), seen, rng, spare)
    assert heard == sorted(heard)
    assert 0.5 < heard[-1] <= 1


def test_without_public_data_nothing_is_rehearsed():
    seen, spare = observed("defence")
    result = played(Canned(known_converges=(True, True)), seen, rng, spare)
    assert not any(result.why)


def test_an_attacker_who_does_not_know_the_defence_plays_once():
    seen, _ = observed()
    assert played(Canned(), seen, rng).images[:, 0, 0, 0, 0].tolist() == pytest.approx([0.8, 0.8])


def test_a_kept_plain_guess_is_that_of_the_plain_attack_bit_for_bit():
    attack = build_attack("gs:iterations=5")
    seen, _ = observed("defence", "public-data")
    worse = replace(attack, adapt="likelihood")
    plain = attack(ignorant(seen), rng())
    spare = observed("defence")[1]
    known_db, plain_db = rehearsed(worse, seen, spare, rng)
    result = played(worse, seen, rng, spare)
    expected = plain if plain_db > known_db else worse(seen, rng())
    assert torch.equal(result.images, expected.images)


def test_ignorant_attackers_have_no_secret_either():
    seen, _ = observed("defence", "private-state")
    with pytest.raises(ThreatModelError, match="does not grant"):
        _ = ignorant(seen).defence
    assert ignorant(seen).threat.names == ["labels", "num-examples"]


def test_mixing_takes_whole_targets():
    seen, _ = observed("defence")
    one, other = Canned()(seen, rng()), Canned()(ignorant(seen), rng())
    assert torch.equal(mixed(one, other, torch.tensor([True, True])).images, other.images)
    assert torch.equal(mixed(one, other, torch.tensor([False, False])).images, one.images)


def test_phases_share_the_steps():
    for iterations in range(2, 30):
        for phases in (1, 2, 3):
            shares = shared_out(iterations, phases)
            assert sum(shares) == max(iterations, phases)
            assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("aggregation", ["none", "secure"])
def test_an_audit_rehearses_with_public_images_that_no_attack_learns_from(small, tmp_path, aggregation):
    settings = small(
        defences="gaussian:std=0.01,entangle", adaptive=True, knows="labels,num-examples,public-data", tap="2",
        dataset="mnist-5k", model="lenet-dlg", attacks="gs:iterations=4", aggregation=aggregation, clients=4,
    )  # fmt: skip
    result = audit(settings, tmp_path / "run", workers=0)
    assert not result.failed
    known = [row for row in privacy(result) if row["adaptive"]]
    assert all("on public images" in row["why"] for row in known)
    steps = {row["attack_steps"] for row in privacy(result)}
    assert steps == {4}  # equal effort
