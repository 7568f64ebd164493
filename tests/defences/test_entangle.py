import math
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.attacks import build_attack
from gradveil.config import TrainSettings
from gradveil.data import Dataset
from gradveil.data.datasets import Split
from gradveil.defences import Arrived, Client, Defence, Server, build_defence
from gradveil.defences.entangle import Entangle, foreign_entries, relative_change, repeated, replacement_rate
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError, DefenceError
from gradveil.federated.server import Sent, play_round, sample_clients
from gradveil.secret_stream import SecretStream
from gradveil.threat import Knowledge, ThreatModel
from gradveil.threat.observe import Federation, observe
from gradveil.types import Batch, Update
from tests.attacks.scene import psnr, run, scene

EXACT = Entangle(probes=0, images=5)


def make_model():
    torch.manual_seed(1)
    layers = OrderedDict(
        conv=nn.Conv2d(1, 3, 3), act=nn.Sigmoid(), second=nn.Conv2d(3, 4, 3), more=nn.Sigmoid(), flatten=nn.Flatten(),
        hidden=nn.Linear(16, 10), tanh=nn.Tanh(), last=nn.Linear(10, 3),
    )  # fmt: skip
    return nn.Sequential(layers).double()


def make_batch(count=5, seed=0):
    rng = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 6, 6, generator=rng, dtype=torch.float64)
    return Batch(images, torch.randint(0, 3, (count,), generator=rng), torch.zeros(count) > 0)


def floats(batch):
    return replace(batch, images=batch.images.float())


def changes(model, seed):
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=rng, dtype=torch.float64) * 0.1 for name, p in model.named_parameters()
    }


def make_client(defence=EXACT, model=None, number=1, public=None, seed=0):
    model = model or make_model()
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}
    early = {guard: Update(changes(model, 10 + guard), 4) for guard in defence.guards}
    if public is None:
        public = defence.public(early, Server(1, model, {}, {}, torch.Generator()))
    rng = SecretStream(seed)
    return Client(number, 1, model, start, make_batch(), public, {}, rng)


def protect(defence, seed=0):
    """Return the client's own update, the guard's update, and the update that is sent."""
    client = make_client(defence, seed=seed, number=max(defence.guards) + 1)
    own = changes(client.model, 2)
    return own, changes(client.model, 10), defence.on_update(Update(own, 5), client).tensors


def naive_scores(model, images, upto):
    """Return the mean over images of each feature's magnitude over its gradient norm, by one backward pass each."""
    total = 0
    for image in images:
        leaf = image.unsqueeze(0).requires_grad_()
        r = model[:upto](leaf)[0]
        slopes = torch.stack([torch.autograd.grad(feature, leaf, retain_graph=True)[0].norm() for feature in r])
        total = total + r.detach().abs() / slopes
    return total / len(images)


def columns(sent, own, name):
    """Return the columns of a weight that differ from the client's own."""
    return {i for i in range(own[name].shape[1]) if not torch.equal(sent[name][:, i], own[name][:, i])}


class TestReplacement:
    def test_it_reports_the_relative_change_and_the_rate(self):
        client = make_client(EXACT)
        own = changes(client.model, 2)
        EXACT.on_update(Update(own, 5), client)
        change = relative_change(own, client.start)
        weights = torch.cat([client.start[name].flatten() for name in own])
        moved = torch.cat([tensor.flatten() for tensor in own.values()])
        assert change == pytest.approx(float((moved / weights)[weights != 0].abs().mean()))
        assert client.reports.means() == {
            "entangle_change": change,
            "entangle_replaced": replacement_rate(change, EXACT.beta),
        }

    def test_a_guard_reports_nothing(self):
        client = make_client(EXACT, number=0)
        EXACT.on_update(Update(changes(client.model, 2), 5), client)
        assert client.reports.means() == {}

    def test_it_is_the_guards_at_the_most_revealing_columns_and_nowhere_else(self):
        own, guard, sent = protect(EXACT)
        model = make_model()
        rate = replacement_rate(relative_change(own, {k: p.detach() for k, p in model.named_parameters()}), 0.7)
        for name, upto in (("hidden", 5), ("last", 7)):
            scores = naive_scores(model, make_batch().images, upto)
            expected = set(scores.argsort(descending=True)[: round(rate * len(scores))].tolist())
            assert expected
            weight = f"{name}.weight"
            assert columns(sent, own, weight) == expected
            for i in expected:
                assert torch.equal(sent[weight][:, i], guard[weight][:, i])
        assert {k for k in own if torch.equal(sent[k], own[k])} == set(own) - {"hidden.weight", "last.weight"}

    def test_rows_add_those_of_the_producing_linear(self):
        own, guard, sent = protect(replace(EXACT, reach="rows"))
        chosen = columns(sent, own, "last.weight")
        for i in range(10):
            whose = guard if i in chosen else own
            assert sent["hidden.bias"][i] == whose["hidden.bias"][i]
            if i in chosen:
                assert torch.equal(sent["hidden.weight"][i], guard["hidden.weight"][i])
        assert torch.equal(sent["second.weight"], own["second.weight"])

    def test_channels_reach_convolutions_but_not_the_images_own(self):
        own, guard, sent = protect(replace(EXACT, reach="channels", beta=0.5))
        chosen = sorted(columns(sent, own, "second.weight"))
        others = [c for c in range(3) if c not in chosen]
        assert chosen
        assert others
        assert torch.equal(sent["second.weight"][:, chosen], guard["second.weight"][:, chosen])
        for name in ("conv.weight", "conv.bias"):
            assert torch.equal(sent[name][chosen], guard[name][chosen])
            assert torch.equal(sent[name][others], own[name][others])

    def test_named_layers_only(self):
        own, _, sent = protect(replace(EXACT, layers=("last",)))
        assert columns(sent, own, "last.weight")
        assert not columns(sent, own, "hidden.weight")

    def test_probes_choose_nearly_the_same(self):
        own, _, exact = protect(EXACT)
        _, _, estimated = protect(replace(EXACT, probes=2000))
        both = [columns(sent, own, "hidden.weight") for sent in (exact, estimated)]
        assert len(both[0] & both[1]) >= len(both[0]) - 1

    def test_a_smaller_beta_replaces_more(self):
        counts = [
            len(columns(protect(replace(EXACT, beta=b))[2], protect(EXACT)[0], "hidden.weight")) for b in (0.8, 0.3)
        ]
        assert counts[0] < counts[1]

    def test_noise_is_relative_to_the_guard_and_on_replaced_entries_only(self):
        own, guard, sent = protect(replace(EXACT, noise=0.5))
        chosen = sorted(columns(sent, own, "hidden.weight"))
        assert set(chosen) == columns(protect(EXACT)[2], own, "hidden.weight")
        off = (sent["hidden.weight"] - guard["hidden.weight"])[:, chosen]
        assert 0.25 < off.std() / guard["hidden.weight"].square().mean().sqrt() < 1

    def test_several_guards_are_mixed_by_secret_shares(self):
        two = replace(EXACT, guards=(0, 1))
        own, _, sent = protect(two)
        model = make_model()
        guards = [changes(model, 10 + g)["last.weight"] for g in (0, 1)]
        i = min(columns(sent, own, "last.weight"))
        basis = torch.stack([guard[:, i] for guard in guards], 1)
        shares = torch.linalg.lstsq(basis, sent["last.weight"][:, i]).solution
        assert torch.allclose(basis @ shares, sent["last.weight"][:, i])
        assert torch.allclose(shares.sum(), torch.ones((), dtype=torch.float64))
        assert (shares > 0).all()
        again = protect(two, seed=5)[2]
        assert not torch.equal(again["last.weight"], sent["last.weight"])

    def test_the_guard_sends_its_own(self):
        client = make_client(number=0, public={})
        update = Update(changes(client.model, 3), 5)
        assert EXACT.on_update(update, client) is update


class TestRate:
    @given(st.floats(0, 50), st.sampled_from([0.11, 0.3, 0.7, 0.89]))
    @settings(max_examples=50, deadline=None)
    def test_it_is_equation_10(self, size, beta):
        weights = torch.tensor([2.0, -4.0, 0.0], dtype=torch.float64)
        change = torch.tensor([2 * size, -4 * size, 7.0], dtype=torch.float64)  # weight zero does not count
        sigmoid = 1 / (1 + math.exp(-size))
        expected = min(max(0.4 * sigmoid - 0.3 + 1 - beta, 0), 1)  # the paper's other form of Eq. 10
        found = replacement_rate(relative_change({"w": change}, {"w": weights}), beta)
        assert found == pytest.approx(expected, abs=1e-9)

    def test_the_adaptive_part_is_between_minus_and_plus_a_tenth(self):
        rates = [replacement_rate(a, 0.7) for a in (0.0, 1.0, 1e6)]
        assert rates[0] == pytest.approx(0.2)
        assert rates == sorted(rates)
        assert rates[-1] == pytest.approx(0.4)

    def test_without_any_weight_there_is_nothing_new(self):
        assert replacement_rate(relative_change({"w": torch.ones(2)}, {"w": torch.zeros(2)}), 0.7) == pytest.approx(0.2)


class TestRounds:
    TINY = TrainSettings(
        model="mlp:hidden=8", clients=4, rounds=2, partition="label-parts", defence="entangle", lr=0.1, seed=3
    )

    def test_the_guard_trains_first_and_its_update_is_broadcast(self):
        said = []

        class Engine:
            fewest = 0

            def train(self, number, clients, model, public, lr):
                said.append((list(clients), sorted(public)))
                for client in clients:
                    yield Sent(client, Update({"w": torch.full((2,), 1.0 + client)}, 4))

        model = {"w": torch.zeros(2)}
        for aggregate, expected in ((True, 1.5), (False, 2.0)):
            defence, settings = Entangle(guards=(0,), aggregate=aggregate), TrainSettings(clients=2)
            played = play_round(1, settings, defence, Engine(), [4, 4], nn.Linear(1, 1), model, {})
            assert said[-2:] == [([0], []), ([1], ["0.w"])]
            assert played.model["w"][0] == expected

    def test_a_missing_guard_ends_the_round_and_nothing_is_sent(self):
        with pytest.raises(DefenceError, match="sends nothing without its guards' updates, got 0 of 1"):
            EXACT.on_update(Update(changes(make_model(), 1), 4), make_client(public={}))
        with pytest.raises(DefenceError, match="needs the update of guard 0 first"):
            EXACT.public({}, Server(1, make_model(), {}, {}, torch.Generator()))

    @pytest.mark.parametrize("weighting", ["size", "uniform", "unbiased"])
    def test_a_round_in_which_only_a_guard_is_drawn_that_does_not_count_moves_nothing(self, weighting):
        settings = replace(
            self.TINY, clients=2, sampled=1, defence="entangle:aggregate=false", rounds=1, weighting=weighting
        )
        seed = next(s for s in range(99) if sample_clients(replace(settings, seed=s), [1, 1], 1) == [0])
        with Simulation(replace(settings, seed=seed), workers=0) as simulation:
            before = {name: tensor.clone() for name, tensor in simulation.model.items()}
            list(simulation.run())
            assert all(torch.equal(tensor, before[name]) for name, tensor in simulation.model.items())

    def test_a_guards_part_must_hold_no_image_of_a_private_client(self):
        data = self.dataset()
        twice = Split(np.concatenate([data.train.images] * 2), np.concatenate([data.train.labels] * 2))
        settings = replace(self.TINY, model="logistic", partition="iid")
        with pytest.raises(ConfigError, match=r"must not be private clients' images, got \d+ that are"):
            Simulation(settings, workers=0, dataset=replace(data, train=twice))
        with Simulation(replace(settings, defence="none"), workers=0, dataset=replace(data, train=twice)):
            pass

    @pytest.mark.parametrize(
        ("defence", "network", "text"),
        [
            (Entangle(), lambda: nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()), "trains no nn.Linear"),
            (Entangle(layers=("fc9",)), lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "got 'fc9'"),
        ],
    )
    def test_networks_that_it_can_not_protect_are_refused_before_training(self, defence, network, text):
        with pytest.raises(ConfigError, match=text):
            Simulation(self.TINY, workers=0, dataset=self.dataset(), defence=defence, network=network)

    def test_a_guard_of_any_number_can_be_looked_at(self):
        seen = observe(
            make_model().float(), [floats(make_batch())],
            threat=ThreatModel.of("num-examples"), num_classes=3, defence=Entangle(guards=(7,)),
            federation=Federation(guards=[floats(make_batch(seed=1))], num_clients=10),
        )  # fmt: skip
        assert "7.last.weight" in seen.public

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_an_update_that_is_not_finite_is_not_sent(self, value):
        update = Update(changes(make_model(), 1), 4)
        update.tensors["last.weight"][0, 0] = value
        with pytest.raises(DefenceError, match="needs a finite update"):
            EXACT.on_update(update, make_client())

    def test_a_client_without_images_sends_nothing(self):
        with pytest.raises(DefenceError, match="a client with none"):
            EXACT.on_update(Update(changes(make_model(), 1), 4), replace(make_client(), data=make_batch()[:0]))

    def test_it_trains_alike_with_and_without_workers(self):
        rows = []
        for workers in (0, 2):
            with Simulation(self.TINY, workers=workers) as simulation:
                rows.append([row["loss"] for row in simulation.run()])
        assert rows[0] == rows[1]

    def test_the_model_learns(self):
        settings = replace(self.TINY, partition="iid:images=400", rounds=4, model="mlp:hidden=32")
        with Simulation(settings, workers=0) as simulation:
            accuracy = [row["accuracy"] for row in simulation.run()]
        assert accuracy[-1] > 0.7

    def dataset(self, name="own", classes=10, images=40, side=8, seed=0):
        rng = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (images, 1, side, side), generator=rng, dtype=torch.uint8).numpy()
        split = Split(pixels, torch.arange(images).remainder(classes).numpy())
        return Dataset(name, split, split, classes, (0.5,), (0.5,))

    def test_the_guard_can_have_another_data_set(self, monkeypatch):
        others = {"other": self.dataset("other", images=12, seed=1)}
        monkeypatch.setattr("gradveil.engines.simulation.load_dataset", lambda name, root: others[name])
        settings = replace(self.TINY, model="logistic", partition="iid", aux="other", sensitive="0.5")
        with Simulation(settings, workers=0, dataset=self.dataset()) as simulation:
            assert simulation.sizes == [12, 14, 13, 13]
            guard = simulation.data.client(0)
            assert not guard.sensitive.any()
            assert torch.equal((guard.images * 255).byte(), torch.from_numpy(others["other"].train.images))
            assert all(row["loss"] > 0 for row in simulation.run())

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"seed": 0}, "must not be private clients' images, got 40 that are"),
            ({"side": 9, "seed": 1}, r"must have the shape \(1, 8, 8\) of 'own', got \(1, 9, 9\)"),
            ({"classes": 11, "seed": 1}, "at most the 10 classes of 'own', got 11"),
        ],
    )
    def test_unfit_public_data_are_refused(self, monkeypatch, other, message):
        monkeypatch.setattr("gradveil.engines.simulation.load_dataset", lambda *_: self.dataset("other", **other))
        settings = replace(self.TINY, model="logistic", partition="iid", aux="other")
        with pytest.raises(ConfigError, match=message):
            Simulation(settings, workers=0, dataset=self.dataset())

    def test_a_guards_data_set_without_a_guard_is_refused(self):
        with pytest.raises(ConfigError, match="aux is for defences and models that use public images"):
            Simulation(replace(self.TINY, defence="none", aux="mnist-5k"), workers=0)


class TestBadInput:
    @pytest.mark.parametrize("beta", [0.1, 0.9, -1, math.nan])
    def test_beta(self, beta):
        with pytest.raises(ConfigError, match="beta"):
            Entangle(beta=beta)

    @pytest.mark.parametrize("guards", [(), (1, 1), (-1,)])
    def test_guards(self, guards):
        with pytest.raises(ConfigError, match="guards"):
            Entangle(guards=guards)

    @pytest.mark.parametrize(("guards", "clients"), [((3,), 3), ((0, 1), 2)])
    def test_guards_among_clients(self, guards, clients):
        with pytest.raises(ConfigError, match=f"some of the {clients} clients"):
            Entangle(guards=guards).early_clients(clients)

    def test_no_linear_layer(self):
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()).double()
        with pytest.raises(DefenceError, match=r"trains no nn\.Linear"):
            EXACT.on_update(Update(changes(model, 2), 5), make_client(model=model))

    def test_an_unknown_layer(self):
        with pytest.raises(DefenceError, match=r"got 'conv'\. Set layers to some of: hidden, last"):
            protect(replace(EXACT, layers=("conv",)))

    def test_a_guard_with_nan(self):
        client = make_client()
        public = {key: tensor * math.nan for key, tensor in client.public.items()}
        with pytest.raises(DefenceError, match="finite update of its guard"):
            EXACT.on_update(Update(changes(client.model, 2), 5), make_client(public=public))

    def test_a_guard_of_another_model(self):
        public = {key: tensor[:1] for key, tensor in make_client().public.items()}
        with pytest.raises(DefenceError, match="same model"):
            EXACT.on_update(Update(changes(make_model(), 2), 5), make_client(public=public))


class TestCountermoves:
    @pytest.mark.parametrize("guards", [(0,), (0, 1)])
    @pytest.mark.parametrize("reach", ["columns", "rows", "channels"])
    def test_the_guards_entries_are_told_apart(self, guards, reach):
        defence = replace(EXACT, guards=guards, reach=reach, beta=0.5)
        own, _, sent = protect(defence)
        seen = {name: tensor[None] for name, tensor in sent.items()}
        theirs = [changes(make_model(), 10 + guard) for guard in guards]
        found = foreign_entries(seen, theirs)
        for name in own:
            if own[name].dim() > 1 or len(guards) == 1:  # a single number is a mixture of anything
                assert torch.equal(found[name][0], sent[name] != own[name]), name

    def test_noise_hides_few_of_the_guards_columns(self):
        rng = torch.Generator().manual_seed(0)
        guard, own = (torch.randn(10, 40, generator=rng) for _ in range(2))
        sent = 4 * own
        sent[:, :12] = guard[:, :12] + 0.5 * torch.randn(10, 12, generator=rng)
        found = foreign_entries({"w": sent[None]}, [{"w": guard}], noise=0.5)["w"][0].all(0)
        assert found[:12].sum() >= 11
        assert found[12:].sum() <= 1

    def test_repeated_entries_are_found_without_the_guard(self):
        own = torch.randn(3, 4, 6)
        own[0, :, 2] = own[2, :, 2] = torch.arange(1.0, 5.0)
        assert torch.equal(repeated({"w": own})["w"].nonzero()[:, [0, 2]].unique(dim=0), torch.tensor([[0, 2], [2, 2]]))

    def test_which_come_first(self):
        seen = {"c": torch.ones(2, 3, 1, 3, 3), "w": torch.ones(2, 3, 4)}
        public = {f"0.{name}": tensor[0] for name, tensor in seen.items()}
        assert list(EXACT.adaptive(Arrived(seen, [1.0], 1, public))) == ["guard", "repeated", "layers", "outliers"]
        assert next(iter(EXACT.adaptive(Arrived(seen, [1.0])))) == "repeated"
        noisy = replace(EXACT, noise=1.0).adaptive(Arrived(seen, [1.0], 1, public))
        assert list(noisy) == ["layers", "outliers", "guard"]
        assert noisy["layers"].weights == {"w": 0.0}
        assert list(replace(EXACT, reach="channels", noise=1.0).adaptive(Arrived(seen, [1.0]))) == ["outliers"]

    @pytest.mark.parametrize("spec", ["entangle:beta=0.5", "entangle:beta=0.5+none"])
    def test_an_attacker_who_looks_at_the_guard_undoes_it(self, spec):
        defence, grants = build_defence(spec), ("num-examples", "labels", "defence")
        guard = Batch(
            torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(7)), torch.tensor([3]), torch.ones(1) > 0
        )
        truth, _, seen = scene(targets=3, defence=defence, grants=grants, federation=Federation(guards=[guard]))
        attack = build_attack("gs:iterations=250,sign=none,schedule=cosine,lr=0.1,tv=1e-6")
        knowing, plain = (run(replace(attack, adapt=adapt), seen) for adapt in ("", "none"))
        undefended = run(attack, scene(targets=3)[2])
        mean = [psnr(truth[:, 0], result.images[:, 0]).mean() for result in (undefended, plain, knowing)]
        assert mean[1] < mean[0] - 8
        assert mean[2] > mean[1] + 8

    def test_what_was_broadcast_is_seen_and_the_guards_images_are_not(self):
        guard = Batch(torch.rand(2, 1, 8, 8), torch.tensor([3, 1]), torch.ones(2) > 0)
        _, _, seen = scene(defence=Entangle(), federation=Federation(guards=[guard]))
        assert {key.split(".", 1)[0] for key in seen.public} == {"0"}
        assert not seen.knows(Knowledge.PUBLIC_DATA)

    def test_the_guards_batch_must_be_there(self):
        with pytest.raises(ConfigError, match="a batch for each of the defence's 1 guards, got 0"):
            scene(defence=Entangle())
        with pytest.raises(ConfigError, match="0 guards, got 1"):
            scene(defence=Defence(), federation=Federation(guards=[make_batch()]))
