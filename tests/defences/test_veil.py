"""Veil: exact sums, noise of the stated strength, and a guarantee that a training keeps."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.config import TrainSettings
from gradveil.data import load_dataset
from gradveil.data.datasets import Split
from gradveil.defences import Arrived, Client, Releases, Server, build_defence, planned_defence
from gradveil.defences.parts.accounting import epsilon, poisson_noise
from gradveil.defences.parts.clipped import head_sum
from gradveil.defences.parts.gaussian_dp import epsilon_of
from gradveil.defences.veil import Veil
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError, DefenceError, MessageError
from gradveil.federated.server import Missing, play_round
from gradveil.models import Normalisation, create_model
from gradveil.models.trunk import learn_features
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch, Update

SMALL = "patches:filters=3"
QUIET = Veil(mu=1e9, rounds=1)
"""Noise far below the rounding of float32."""


def make_head(seed=0):
    network = create_model(SMALL, (1, 12, 12), 4, 0)
    rng = torch.Generator().manual_seed(seed)
    network.head.weight.data = torch.randn(network.head.weight.shape, generator=rng)
    return network.train()


def make_data(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 12, 12, generator=rng)
    return Batch(images, torch.randint(0, 4, (count,), generator=rng), torch.zeros(count) > 0)


def make_client(model, data, number=1, seed=0):
    return Client(0, number, model, {}, data, {}, {}, SecretStream(seed))


def gradient_of(model, batch):
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = F.cross_entropy(model(batch.images), batch.labels)
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


def naive(model, batch, clip):
    """Return the sum of clipped gradients by a loop over images."""
    total = {}
    for index in range(len(batch)):
        one = gradient_of(model, batch[slice(index, index + 1)])
        norm = math.sqrt(sum(float(t.double().square().sum()) for t in one.values()))
        for name, tensor in one.items():
            total[name] = total.get(name, 0) + tensor.double() * min(1.0, clip / norm)
    return total


def frozen_head():
    """A head on a network that normalises its images."""
    network = create_model("frozen:network=mlp:hidden=8/6", (1, 12, 12), 4, 0, Normalisation((0.3,), (0.1,)))
    network.head.weight.data = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    return network.train()


def plain_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 5), nn.Sigmoid(), nn.Linear(5, 4))


@pytest.mark.parametrize("make", [make_head, frozen_head, plain_network])
@settings(deadline=None, max_examples=10)
@given(count=st.integers(1, 9), clip=st.floats(0.05, 2))
def test_the_gradient_is_the_naive_loops(make, count, clip):
    model, data = make(), make_data(count)
    found = replace(QUIET, clip=clip).on_gradient(gradient_of(model, data), data, make_client(model, data))
    for name, tensor in naive(model, data, clip).items():
        assert torch.allclose(found[name].double(), tensor / count, atol=2e-5 * clip)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 8), st.floats(0.02, 1), st.integers(8, 24))
def test_one_image_never_moves_the_sum_by_more_than_the_bound(place, clip, bits):
    """The law that the guarantee rests on, with the grid's rounding included."""
    model, data, grid = make_head(), make_data(9), 2.0 ** -(bits + 6)
    rest = torch.arange(9) != place
    one, other = (head_sum(model, some, clip, grid)[0] * grid for some in (data, data[rest]))
    assert float((one - other).norm()) <= clip
    assert torch.equal(one / grid, (one / grid).round())


def test_sums_do_not_depend_on_the_order_of_images():
    model, data = make_head(), make_data(50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(head_sum(model, data, 0.3, 2**-20)[0], head_sum(model, data[order], 0.3, 2**-20)[0])


def test_an_image_that_overflows_counts_as_zero_and_an_empty_sample_is_zero():
    model, data = make_head(), make_data(3)
    with torch.no_grad():
        model.head.weight[0] = math.inf
    found, _ = head_sum(model, data, 0.3, 2**-20)
    assert not found.any()
    assert not head_sum(make_head(), data[slice(0, 0)], 0.3, 2**-20)[0].any()


def test_a_sum_leaves_the_remembered_features_as_they_are():
    model, data = make_head().double(), make_data(5)
    data = replace(data, images=data.images.double())
    model.trunk.memo = learn_features(model, model.trunk, data.images)
    before = model.trunk.memo.features.clone()
    assert before.dtype == torch.float64, "no copy by conversion"
    head_sum(model, data, 0.3, 2**-20)
    assert torch.equal(model.trunk.memo.features, before)


@pytest.mark.parametrize(("unit", "needed"), [("image", False), ("client", True)])
def test_only_whole_clients_need_the_plain_gradient(unit, needed):
    assert Veil(unit=unit).needs_gradient is needed
    assert build_defence(f"veil:unit={unit}+quantise").needs_gradient is needed


def noise_of(defence, count=4):
    model, data = make_head(), make_data(count)
    model.head.weight.data = torch.zeros(4, 55)
    gradient = gradient_of(model, data)
    rounds = [defence.on_gradient(gradient, data, make_client(model, data, seed=s))["head.weight"] for s in range(40)]
    quiet = replace(QUIET, clip=defence.clip).on_gradient(gradient, data, make_client(model, data))["head.weight"]
    return torch.stack(rounds) - quiet


def test_the_noise_has_the_stated_strength():
    veil = Veil(mu=2, clip=0.5, rounds=16)  # sigma = 4 / 2
    assert float(noise_of(veil).std()) * 4 == pytest.approx(2 * 0.5, rel=0.05)
    shared = replace(veil, at="sum", clients=25)
    assert float(noise_of(shared).std()) * 4 == pytest.approx(2 * 0.5 / 5, rel=0.05)


def test_the_unit_client_clips_the_whole_gradient():
    model, data = make_head(), make_data(6)
    gradient = gradient_of(model, data)
    client = make_client(model, data)
    found = replace(QUIET, unit="client", clip=0.01).on_gradient(gradient, data, client)["head.weight"]
    norm = gradient["head.weight"].norm()
    assert norm > 0.01
    assert torch.allclose(found, gradient["head.weight"] * 0.01 / norm, atol=1e-6)
    assert client.reports.means() == {"veil_clipped": 1.0}
    bad = {"head.weight": torch.full_like(gradient["head.weight"], math.nan)}
    assert not (replace(QUIET, unit="client").on_gradient(bad, data, client)["head.weight"].abs() > 1e-6).any()


def test_accounting_is_exact_over_all_rounds():
    veil = planned_defence(TrainSettings(rounds=60, defence="veil:mu=2"))
    whole, one = (veil.budget(Releases(400, 400, count, count, count)) for count in (60, 1))
    assert whole.mu == pytest.approx(2)
    assert whole.epsilon == pytest.approx(epsilon_of(2, 1e-5))
    assert one.mu == pytest.approx(2 / math.sqrt(60))
    assert veil.budget(Releases(400, 400, 240, 240, 240)).mu == pytest.approx(4), "more than planned costs more"


def test_poisson_batches_have_the_epsilon_of_the_same_mu():
    veil = planned_defence(TrainSettings(rounds=20, defence="veil:mu=1,share=0.1"))
    found = veil.budget(Releases(400, 40, 20, 20, 20))
    assert 0.98 * epsilon_of(1, 1e-5) < found.epsilon <= epsilon_of(1, 1e-5)
    assert found.mu is None
    assert veil.noise_multiplier < math.sqrt(20), "sampling amplifies"
    assert epsilon(poisson_noise(2.0, 0.1, 20, 1e-5), 0.1, 20, 1e-5) <= 2
    data = make_data(2000)
    counts = [len(veil.on_batch(data, make_client(None, data, seed=s))) for s in range(30)]
    assert sum(counts) / 30 == pytest.approx(200, rel=0.05)


def test_all_images_take_part_in_their_own_order():
    data = make_data(5)
    assert Veil().on_batch(data[slice(0, 2)], make_client(None, data)) is data


def test_after_the_planned_rounds_nothing_is_sent():
    model, data = make_head(), make_data(3)
    with pytest.raises(DefenceError, match="covers 5 rounds, got round 6: the privacy budget is spent"):
        Veil(rounds=5).on_gradient(gradient_of(model, data), data, make_client(model, data, number=6))


def test_the_update_states_all_images():
    model, data = make_head(), make_data(7)
    assert Veil().on_update(Update({}, 3), make_client(model, data)).num_examples == 7


def test_clients_play_one_step_of_all_images():
    asked = TrainSettings(weighting="uniform")
    found = Veil().training(asked)
    assert (found.algorithm, found.batch_size, found.weighting) == ("fedsgd", 0, "size")
    assert Veil().training(found) == found
    assert Veil(unit="client").training(asked).weighting == "uniform"
    lab = TrainSettings(algorithm="fedsgd", batch_size=1)
    assert Veil().training(lab) == lab


def test_the_server_takes_steps_with_momentum_and_ends_with_the_mean_of_the_second_half():
    model, state = make_head(), {}
    model.head.weight.data = torch.zeros(4, 55)
    veil, weights, seen = Veil(rounds=4, rate=2.0), torch.zeros(4, 55).double(), []
    velocity = torch.zeros_like(weights)
    for number in range(1, 5):
        change = torch.full((4, 55), float(number), dtype=torch.float64)
        server = Server(number, model, {}, state, torch.Generator(), lr=0.5)
        moved = veil.on_aggregate(Update({"head.weight": change}, 9), server).tensors["head.weight"]
        velocity = 0.9 * velocity + change / 0.5
        weights = weights + 2 * velocity
        seen.append(weights)
        now = model.head.weight.data.double() + moved
        model.head.weight.data = now.float()
    assert torch.allclose(now, (seen[2] + seen[3]) / 2, rtol=1e-6)


def test_other_networks_take_plain_steps():
    total = Update({"1.weight": torch.ones(5, 144)}, 9)
    server = Server(1, plain_network(), {}, {}, torch.Generator())
    assert Veil(rounds=4).on_aggregate(total, server) is total


def test_the_rate_falls_with_the_noise():
    veil = Veil(mu=2, rounds=60, clients=10)
    assert veil.rule(4000, 27010) == pytest.approx(
        80 / (0.3 * math.sqrt(60 * (0.04 + 27010 * 10 * 60 / 4 / 4000**2))), rel=1e-9
    )
    assert replace(veil, mu=1).rule(4000, 27010) < veil.rule(4000, 27010) < veil.rule(40_000, 27010)
    assert veil.rule(4000, 27010) < veil.rule(4000, 270)


def test_the_attacker_knows_the_noise():
    seen = {"head.weight": torch.ones(1, 4, 55)}
    veil = Veil(mu=2, clip=0.5, rounds=16)
    alone = veil.adaptive(Arrived(seen, [1.0], batch_size=20))["likelihood"]
    assert alone.noise["head.weight"] == pytest.approx(2 * 0.5 / 20)
    shared = replace(veil, at="sum", clients=4).adaptive(Arrived(seen, [1.0], batch_size=20, clients=4))
    assert shared["likelihood"].noise["head.weight"] == pytest.approx(2 * 0.5 / 20 / 2)  # of one client's update


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e30, -1e4])
def test_no_altered_head_gets_more_of_an_image_than_the_bound(number):
    network, data, veil = make_head(), make_data(5), Veil(mu=1, rounds=9)
    network.head.weight.data.fill_(number)
    network.head.weight.data[0] = 0.0
    for place in range(5):
        assert float(veil.contributions(network, data[slice(place, place + 1)])["head.weight"].norm()) <= veil.clip
    sent = veil.on_gradient(gradient_of(network, data), data, make_client(network, data))["head.weight"] * len(data)
    noise = sent - veil.contributions(network, data)["head.weight"]
    assert float(noise.std()) == pytest.approx(3 * veil.clip, rel=0.25)  # all of it, also for a head of NaN


def test_contributions_are_what_is_sent_without_noise():
    network, data = make_head(), make_data(7)
    sent = QUIET.on_gradient(gradient_of(network, data), data, make_client(network, data))["head.weight"]
    assert torch.allclose(QUIET.contributions(network, data)["head.weight"].float() / 7, sent, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("veil:mu=0", "mu must be more than 0"),
        ("veil:mu=-1", "mu must be more than 0"),
        ("veil:clip=0", "clip must be"),
        ("veil:at=server", "at"),
        ("veil:unit=person", "unit"),
        ("veil:share=0", "share must be"),
        ("veil:unit=client,share=0.5", "share must be 1 with unit=client"),
        ("veil:delta=1", "delta must be"),
    ],
)
def test_bad_settings(spec, message):
    with pytest.raises(ConfigError, match=message):
        build_defence(spec)


@pytest.mark.parametrize(
    ("defence", "more", "message"),
    [
        ("veil:at=sum", {}, "at=sum must run under secure aggregation"),
        ("veil:at=sum,clients=5", {"aggregation": "secure"}, r"noise adds up \(5 or more\) in every round, got 4"),
        ("veil:at=sum", {"aggregation": "secure", "sampling": "size-replace"}, "count once in a sum"),
        ("veil:rounds=1", {}, r"at least those of the training \(2\)"),
        ("veil", {"model": "resnet20:width=2"}, "mixes"),
        ("veil", {"defended": (0,)}, "defended must be empty"),
    ],
)
def test_trainings_in_which_it_would_not_hold_are_refused(tiny, defence, more, message):
    with pytest.raises(ConfigError, match=message):
        Simulation(replace(tiny, defence=defence, **more), workers=0)


def test_a_sum_with_too_few_clients_is_not_opened(tiny):
    how = replace(tiny, aggregation="secure", bad_answers="drop", defence="veil:at=sum,clients=4", model=SMALL)
    with Simulation(how, workers=0) as simulation:

        class Dropping:
            fewest = 0

            def train(self, *args):
                for sent in simulation.engine.train(*args):
                    yield sent if sent.client else Missing(0, MessageError("gone"))

        with pytest.raises(MessageError, match="needs 4 clients or more for its noise, got 3"):
            play_round(
                1, simulation.settings, simulation.defence, Dropping(), simulation.sizes, simulation.net.module,
                simulation.model, {},
            )  # fmt: skip


def test_a_training_learns_states_its_budget_and_resumes_alike(tiny, tmp_path):
    how = replace(tiny, defence="veil:mu=8,at=sum", aggregation="secure", model=SMALL, rounds=6)
    with Simulation(how, workers=0, clients_folder=tmp_path) as simulation:
        rows = list(simulation.run())
        whole = simulation.model["head.weight"]
        assert simulation.settings.algorithm == "fedsgd"
    assert rows[-1]["mu"] == pytest.approx(8)
    assert rows[-1]["epsilon"] == pytest.approx(epsilon_of(8, 1e-5))
    assert rows[-1]["identified_bound"] > 0.99
    assert rows[-1]["accuracy"] > 0.2
    assert (tmp_path / "0" / "private" / "features.safetensors").exists()
    with Simulation(how, workers=0) as first:
        for number in (1, 2, 3, 4):
            first.step(number)
        model, state = first.model, first.checkpoint
    with Simulation(how, workers=0, clients_folder=tmp_path) as second:
        second.resume(model, state, 4)
        for number in (5, 6):
            second.step(number)
        assert torch.equal(second.model["head.weight"], whole)


def test_public_pictures_make_the_trunk_and_must_not_be_private(tiny):
    whole = load_dataset("mnist-5k")
    used = Split(whole.train.images[:200], whole.train.labels[:200])
    others = Split(whole.train.images[200:400], whole.train.labels[200:400])
    private, public = replace(whole, train=used), replace(whole, train=others)
    how = replace(tiny, defence="veil:mu=8", model=SMALL, rounds=1)
    prints = []
    for aux in (None, public):
        with Simulation(how, workers=0, dataset=private, aux=aux) as simulation:
            simulation.step(1)
            prints.append(simulation.net.module.trunk.fingerprint)
    assert prints[0] != prints[1]
    with pytest.raises(ConfigError, match="Public images must not be private clients' images, got"):
        Simulation(how, workers=0, dataset=private, aux=private)


def halves():
    """Return two data sets without a common image: 400 private ones and 200 public ones."""
    whole = load_dataset("mnist-5k")
    parts = slice(0, None, 10), slice(1, None, 20)
    return tuple(replace(whole, train=Split(whole.train.images[part], whole.train.labels[part])) for part in parts)


class TestTunePublic:
    def test_each_setting_is_chosen_by_its_rehearsals_with_as_much_noise_per_image(self):
        tried = []

        def rehearse(one):
            tried.append(one)
            return -abs(one.boost - 3) - abs(one.clip - 0.1) - abs(one.rounds - 20) / 100, 0.0

        found = Veil(mu=2, tune="public").tuned(rehearse, rounds=40, images=5.0)
        assert (found.boost, found.clip, found.rounds) == (3.0, pytest.approx(0.1), 20)
        assert (found.mu, found.tune) == (2, "chosen")
        assert {one.mu for one in tried} == {10.0}
        assert len(tried) == 7
        assert replace(found, tune="rule") != Veil(mu=2)
        whole = Veil(mu=2, tune="public", unit="client").tuned(rehearse, 40, 5.0)
        assert {one.mu for one in tried[7:]} == {2.0}, "clients count alike, however many images they have"
        assert whole.rounds == 20
        assert Veil(tune="public", rounds=50).tuned(rehearse, 40, 1.0).rounds == 50
        assert Veil().tuned(rehearse, 40, 1.0) == Veil()

    def test_equal_accuracy_is_decided_by_the_loss(self):
        found = Veil(tune="public").tuned(lambda one: (0.5, -abs(one.clip - 0.9)), rounds=8, images=1.0)
        assert (found.boost, found.clip, found.rounds) == (1.0, pytest.approx(0.9), 8)

    def test_a_boost_scales_the_rule(self):
        assert Veil(boost=3, rounds=9).rule(100, 50) == pytest.approx(3 * Veil(rounds=9).rule(100, 50))

    def test_a_training_uses_what_was_chosen_on_public_images_alone(self, tiny):
        private, public = halves()
        how = replace(tiny, defence="veil:mu=50,tune=public+quantise:bits=16", model=SMALL, rounds=4, save_rounds=(4,))
        found = []
        for labels in (private.train.labels, private.train.labels[::-1].copy()):
            other = replace(private, train=Split(private.train.images, labels))
            with Simulation(how, workers=0, dataset=other, aux=public) as simulation:
                list(simulation.run())
                found.append((simulation.settings, simulation.defence.spec))
        assert found[0] == found[1], "private labels do not matter"
        settings, spec = found[0]
        assert "tune=chosen" in settings.defence
        assert spec.startswith("veil:mu=50")
        assert settings.rounds in (1, 2, 4)
        with Simulation(settings, workers=0, dataset=private, aux=public) as again:
            assert again.defence.spec == spec, "saved settings need no rehearsal"

    @pytest.mark.parametrize(
        ("labels", "message"),
        [(None, "public images with labels, got none. Give --aux"), (3, "two classes or more")],
    )
    def test_it_is_refused_without_public_labels(self, tiny, labels, message):
        private, public = halves()
        if labels is not None:
            public = replace(public, train=Split(public.train.images, np.full(len(public.train), labels)))
        how = replace(tiny, defence="veil:tune=public", model=SMALL)
        with pytest.raises(ConfigError, match=message):
            Simulation(how, workers=0, dataset=private, aux=None if labels is None else public)

    def test_private_images_among_the_public_ones_are_refused_before_any_rehearsal(self, tiny):
        private, _ = halves()
        how = replace(tiny, defence="veil:tune=public", model=SMALL)
        with pytest.raises(ConfigError, match="Public images must not be private clients' images"):
            Simulation(how, workers=0, dataset=private, aux=private)

    def test_elsewhere_it_says_where_the_choice_is_made(self):
        with pytest.raises(ConfigError, match=r"settled by a simulation.*settings\.toml"):
            planned_defence(TrainSettings(defence="veil:tune=public"))

    @pytest.mark.parametrize(
        ("spec", "message"),
        [("veil:tune=private", "tune"), ("veil:boost=0", "boost"), ("veil:tune=public,rate=3", "rate must be 0")],
    )
    def test_bad_settings(self, spec, message):
        with pytest.raises(ConfigError, match=message):
            build_defence(spec)
