from dataclasses import dataclass, replace
from typing import ClassVar, get_origin, get_type_hints

import pytest
import torch
from torch import nn

from gradveil.config import TrainSettings
from gradveil.defences import HOOKS, Arrived, Chain, Client, Defence, Server, build_defence
from gradveil.defences.base import Releases
from gradveil.defences.chain import FACTS
from gradveil.errors import ConfigError, DefenceError, UnknownNameError
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update


@dataclass(frozen=True)
class Affine(Defence):
    """Every hook is x -> factor * x + shift on what it gets; two of them do not commute."""

    factor: float = 2.0
    shift: float = 0.0

    def _apply(self, tensor):
        return tensor * self.factor + self.shift

    def _note(self, side):
        side.state["seen"] = side.state.get("seen", torch.zeros(())) + self.factor

    def on_model(self, model, rng):
        return nn.Sequential(model, nn.Threshold(self.factor, self.shift))

    def private(self, name):
        return name == f"secret{self.factor:g}"

    def on_data(self, data, client):
        self._note(client)
        return replace(data, images=self._apply(data.images))

    def on_batch(self, batch, client):
        return replace(batch, images=self._apply(batch.images) + client.public["x"])

    def on_gradient(self, gradient, batch, client):
        return {name: self._apply(tensor) for name, tensor in gradient.items()}

    def on_update(self, update, client):
        return update.map(self._apply)

    def on_server(self, update, server):
        self._note(server)
        return update.map(self._apply)

    def on_aggregate(self, total, server):
        return total.map(self._apply)

    def early_clients(self, num_clients):
        return (0, int(self.factor))

    def public(self, early, server):
        return {"x": torch.tensor(self.factor * 100)}


FIRST, SECOND = Affine(2.0, 1.0), Affine(3.0, 5.0)
CHAIN = Chain((FIRST, SECOND))
ONE = torch.ones(1)
BATCH = Batch(ONE.view(1, 1, 1, 1), torch.zeros(1).long(), torch.zeros(1) > 0)


def sides():
    public = {"0.x": torch.tensor(10.0), "1.x": torch.tensor(1000.0)}
    client = Client(1, 1, nn.Identity(), {}, BATCH, public, {}, SecretStream(0))
    return client, Server(1, nn.Identity(), public, {}, torch.Generator())


def test_hooks_on_the_device_run_in_order():
    client, _ = sides()
    assert CHAIN.on_data(BATCH, client).images.item() == (1 * 2 + 1) * 3 + 5
    assert CHAIN.on_gradient({"w": ONE}, BATCH, client)["w"].item() == 14
    assert CHAIN.on_update(Update({"w": ONE}, 1), client).tensors["w"].item() == 14


def test_the_server_undoes_the_last_first():
    _, server = sides()
    for hook in (CHAIN.on_server, CHAIN.on_aggregate):
        assert hook(Update({"w": ONE}, 1), server).tensors["w"].item() == (1 * 3 + 5) * 2 + 1


def test_members_change_and_learn_the_settings_of_a_training():
    chain = build_defence("veil:mu=2+none")
    asked = chain.training(TrainSettings(rounds=7, clients=3))
    assert (asked.algorithm, asked.batch_size) == ("fedsgd", 0)
    assert chain.planned(asked).defences[0].rounds == 7
    secure = replace(asked, aggregation="secure")
    assert build_defence("none+veil:at=sum").planned(secure).fewest_clients == 3


def test_each_member_sees_its_own_broadcast():
    client, server = sides()
    assert CHAIN.on_batch(BATCH, client).images.item() == ((1 * 2 + 1) + 10) * 3 + 5 + 1000
    assert CHAIN.public({}, server) == {"0.x": torch.tensor(200.0), "1.x": torch.tensor(300.0)}


def test_each_member_has_its_own_state():
    client, server = sides()
    for _ in range(2):
        CHAIN.on_data(BATCH, client)
        CHAIN.on_server(Update({"w": ONE}, 1), server)
    assert client.state == server.state == {"0.seen": torch.tensor(4.0), "1.seen": torch.tensor(6.0)}


def test_models_nest_and_private_names_and_early_clients_join():
    model = CHAIN.on_model(nn.Identity(), SecretStream(0))
    assert [layer.threshold for layer in model.modules() if isinstance(layer, nn.Threshold)] == [2.0, 3.0]
    assert model[1].threshold == 3.0
    assert [CHAIN.private(name) for name in ("secret2", "secret3", "other")] == [True, True, False]
    assert CHAIN.early_clients(9) == (0, 2, 3)


def test_a_chain_asks_for_the_hooks_of_its_members():
    assert all(CHAIN.overrides(hook) for hook in HOOKS)
    assert not any(Chain().overrides(hook) for hook in HOOKS)
    assert not any(build_defence("none+none").overrides(hook) for hook in HOOKS)


def forgotten(base):
    """Return the facts and methods of a base class of defences that a chain does not derive from its members."""
    own = {name for name in vars(base) if not name.startswith("_")} - {"kind", "name"}
    facts = {name for name, hint in get_type_hints(base).items() if get_origin(hint) is ClassVar} - {"kind", "name"}
    same_for_all = {"check_images", "require_pixels"}  # they read nothing but facts and their arguments
    return (facts - FACTS.keys()) | (own - facts - vars(Chain).keys() - same_for_all)


def test_no_fact_of_its_members_is_forgotten():
    assert not forgotten(Defence)
    assert all(hasattr(Defence, fact) for fact in FACTS)


def test_a_fact_without_a_rule_is_found():
    class Later(Defence):
        new_fact: ClassVar[bool] = False
        fewest_images: ClassVar[int] = 2

        def new_hook(self, update):
            return update

    assert forgotten(Later) == {"new_fact", "new_hook"}


@pytest.mark.parametrize(
    ("fact", "one", "other", "chained"),
    [
        ("post_processing", True, False, False),
        ("post_processing", True, True, True),
        ("takes_own_gradient", True, False, True),
        ("uses_aux", True, False, True),
        ("needs_aux", True, False, True),
        ("fewest_images", 2, 5, 5),
        ("hides_images", True, False, True),
        ("marked_only", True, False, True),
    ],
)
def test_facts_follow_from_the_members(fact, one, other, chained):
    first, second = (type("Some", (Defence,), {fact: value})() for value in (one, other))
    assert getattr(Chain((first, second)), fact) == getattr(Chain((second, Chain((first,)))), fact) == chained


def test_labels_of_public_images_are_read_if_a_member_that_uses_these_reads_them():
    def some(*, uses, labels):
        return type("Some", (Defence,), {"uses_aux": uses, "aux_labels": labels})()

    assert not Chain((some(uses=True, labels=False), some(uses=False, labels=True))).aux_labels
    assert Chain((some(uses=True, labels=False), some(uses=True, labels=True))).aux_labels


def test_a_chain_inside_a_chain_keeps_the_budget_and_the_early_clients():
    inner = Chain((build_defence("clip"), build_defence("none")))
    releases = Releases(num_examples=100, batch_size=10, steps=10, uses=1)
    budget = build_defence("dp-sgd").budget(releases)
    assert budget is not None
    assert Chain((build_defence("dp-sgd"), inner)).budget(releases) == budget
    quiet = type("Quiet", (Defence,), {"counts_early": property(lambda self: False)})()
    assert not Chain((inner, quiet)).counts_early
    assert inner.counts_early


def test_a_state_part_behaves_as_a_mapping():
    client, _ = sides()
    seen = {}

    class Probe(Defence):
        def on_update(self, update, client):
            client.state["a"], client.state["b"] = ONE, ONE
            del client.state["a"]
            seen["keys"], seen["length"] = list(client.state), len(client.state)
            return update

    Chain((Probe(), Probe())).on_update(Update({}, 1), client)
    assert seen == {"keys": ["b"], "length": 1}
    assert set(client.state) == {"0.b", "1.b"}


def test_text_round_trip_and_bad_names():
    assert build_defence("none+none") == Chain((build_defence("none"),) * 2)
    assert build_defence("none+none").spec == "none+none"
    with pytest.raises(UnknownNameError, match="nonne"):
        build_defence("none+nonne")


def test_what_takes_the_gradient_anew_must_not_follow_what_changed_it():
    with pytest.raises(ConfigError, match=r"'dp-sgd' must come before 'gaussian'.*Swap them"):
        build_defence("gaussian:where=gradient+dp-sgd")
    with pytest.raises(ConfigError, match=r"'dp-sgd' must come before 'precode'.*Swap them, though .* no guarantee"):
        build_defence("precode+none+dp-sgd")
    assert build_defence("dp-sgd+gaussian:where=gradient").spec == "dp-sgd+gaussian:where=gradient"
    assert build_defence("gaussian+dp-sgd").spec == "gaussian+dp-sgd"  # one after the other, in a round


def test_the_attackers_answers_are_played_one_after_the_other():
    seen = {"w": torch.tensor([[3.0, 0.0, 4.0]])}
    move = build_defence("prune:fraction=0.3+clip:norm=1.0").adaptive(Arrived(seen, [1.0]))["all"]
    sent = move.sent({"w": torch.tensor([[3.0, 9.0, 4.0]])}, seen)["w"]
    torch.testing.assert_close(sent, torch.tensor([[0.6, 0.0, 0.8]]))


def test_each_members_other_answers_can_be_chosen():
    arrived = Arrived({"w": torch.tensor([[3.0, 0.0, 4.0]])}, [1.0])
    moves = build_defence("loda:start=noise+prune:fraction=0.3").adaptive(arrived)
    assert list(moves) == ["all", "stationarity", "features", "again"]
    assert [move.decode for move in moves.values()] == [
        ("stationarity:way=learned,search=24",), ("stationarity",), ("stationarity:way=features",),
        ("stationarity:way=learned,search=24",),
    ]  # fmt: skip
    guess = {"w": torch.tensor([[3.0, 9.0, 4.0]])}
    assert [move.sent(guess, arrived.gradients)["w"].tolist() for move in moves.values()] == [[[3.0, 0.0, 4.0]]] * 3 + [
        [[0.0, 9.0, 4.0]]
    ]


@pytest.mark.parametrize("spec", ["mixup:k=2+loda:start=noise", "loda:start=noise+mixup:k=2"])
def test_batches_are_decoded_before_what_was_made_of_all_images(spec):
    first = next(iter(build_defence(spec).adaptive(Arrived({}, [1.0])).values()))
    assert first.decode == ("unmix", "stationarity:way=learned,search=24")


def test_what_one_member_hid_does_not_come_back_in_through_another():
    rng = torch.Generator().manual_seed(0)
    data = Batch(torch.rand(6, 3, 8, 8, generator=rng), torch.arange(6) % 3, torch.zeros(6) > 0)
    batch = data[slice(3)]
    public = {"0.x": torch.zeros(())}
    client = Client(0, 1, nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), {}, data, public, {}, SecretStream(0))
    black = Affine(factor=0.0, shift=0.0)  # hides all
    for pool in ("batch", "data"):
        chain = Chain((black, build_defence(f"mixup:k=3,pool={pool}")))
        assert chain.on_batch(batch, client).images.eq(0).all()
    with pytest.raises(DefenceError, match="larger batches"):
        Chain((black, build_defence("mixup:k=4"))).on_batch(batch, client)


def test_noises_add_up_and_are_of_no_known_strength_after_scaling():
    seen = {"w": torch.ones(1, 3)}
    both = build_defence("gaussian:std=3.0+gaussian:std=4.0").adaptive(Arrived(seen, [1.0]))["all"]
    assert (both.distance, both.noise) == ("l2", {"w": 5.0})
    scaled = build_defence("gaussian:std=3.0+clip").adaptive(Arrived(seen, [1.0]))["all"]
    assert (scaled.distance, scaled.noise) == ("", {})
    pruned = build_defence("gaussian:std=3.0+prune:fraction=0.3").adaptive(
        Arrived({"w": torch.tensor([[1.0, 0, 1]])}, [1.0])
    )
    assert (pruned["all"].distance, pruned["all"].noise) == ("l2", {"w": 3.0})


def test_pruning_before_noise_is_answered_by_its_fraction():
    seen = {"w": torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])}  # noise left no zero
    move = build_defence("prune:fraction=0.5+gaussian:std=0.1").adaptive(Arrived(seen, [1.0]))["all"]
    sent = move.sent({"w": torch.tensor([[1.0, 5.0, 2.0, 4.0, 3.0]])}, seen)["w"]
    assert sent.tolist() == [[0, 5, 0, 4, 3]]


def test_decoys_are_told_apart_only_where_the_other_leaves_the_gradient():
    def separates(spec):
        arrived = Arrived({"weight": torch.ones(1, 2, 2)}, [1.0])
        return next(iter(build_defence(spec).adaptive(arrived).values())).separate

    assert separates("dcs2")
    assert separates("mixup:k=2+dcs2")
    assert not separates("dcs2+clip:norm=1")


def test_there_is_no_certificate_of_images_that_were_hidden():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 6 * 6, 3))
    batch = Batch(torch.rand(2, 1, 8, 8), torch.tensor([0, 1]), torch.zeros(2) > 0)
    bounds = [
        build_defence(spec).certificate(network, batch, SecretStream(0)) for spec in ("soteria+prune", "ats+soteria")
    ]
    assert bounds[0] is not None
    assert bounds[1] is None
