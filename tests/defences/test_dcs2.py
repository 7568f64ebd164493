import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn

from gradveil.attacks import build_attack
from gradveil.attacks.parts.adaptive import answers, turned
from gradveil.attacks.parts.local_training import replay_of
from gradveil.attacks.parts.objectives import Objective
from gradveil.attacks.parts.search import Search
from gradveil.attacks.parts.search_step import SearchStep
from gradveil.attacks.parts.search_task import SearchTask
from gradveil.defences import Arrived, Client, Countermove, Defence, build_defence
from gradveil.defences.dcs2 import Dcs2, projected
from gradveil.errors import ConfigError, DefenceError
from gradveil.models import create_model
from gradveil.models.base import Normalisation
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch
from tests.attacks.scene import psnr, run, scene

QUICK = Dcs2(steps=20, far=0.0, start="noise")


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(48, 3)).double()


def make_batch(count=4, seed=0, sensitive=None):
    rng = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 6, 6, generator=rng, dtype=torch.float64)
    marks = torch.ones(count, dtype=torch.bool) if sensitive is None else torch.tensor(sensitive)
    return Batch(images, torch.randint(0, 3, (count,), generator=rng), marks)


def make_client(batch, model=None, seed=0, data=None, aux=None):
    rng = SecretStream(seed)
    return Client(0, 1, model or make_model(), {}, batch if data is None else data, {}, {}, rng, aux)


def gradient_of(model, images, labels, reduction="mean"):
    loss = F.cross_entropy(model(images), labels, reduction=reduction)
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def flat(gradient):
    return torch.cat([tensor.flatten() for tensor in gradient.values()])


def naive_concealed(defence, model, image, label, begun, target):
    """Minimise Eq. 9 for one image, with torch's own Adam and schedule."""
    wanted = flat(gradient_of(model, image[None], label[None])).detach()
    logits = model(image[None])[0].detach()
    concealed = begun.clone().requires_grad_()
    optimiser = torch.optim.Adam([concealed], lr=defence.lr)
    for step in range(defence.steps):
        for group in optimiser.param_groups:
            group["lr"] = defence.lr * 0.1 ** sum(step + 1 > share * defence.steps for share in (3 / 8, 5 / 8, 7 / 8))
        output = model(concealed[None])
        loss = F.cross_entropy(output, target[None])
        ours = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), create_graph=True)])
        away = (concealed - image).norm()
        total = (
            1
            - ours @ wanted / ours.norm() / wanted.norm()
            + torch.exp(-defence.lambda_x * away)
            + defence.lambda_z * ((output[0] - logits).norm() / logits.norm() - defence.epsilon)
        )
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
    return concealed.detach()


class TestConcealing:
    def test_all_at_once_is_each_by_itself_as_equation_9_says(self):
        model, batch = make_model().eval(), make_batch()
        found = QUICK.conceal(model, batch, make_client(batch, model))
        begun = QUICK._starts(batch, 3, make_client(batch, model))
        for index in range(len(batch)):
            image, label = batch.images[index], batch.labels[index]
            target = begun.labels[index]
            expected = naive_concealed(QUICK, model, image, label, begun.images[index], target)
            assert torch.allclose(found.images[index], expected, atol=1e-7)
            assert torch.equal(found.labels[index], target)

    def test_it_imitates_the_gradient_and_looks_different(self):
        model, batch = make_model().eval(), make_batch()
        defence = replace(QUICK, steps=300)
        found = defence.conceal(model, batch, make_client(batch, model))
        begun = defence._starts(batch, 3, make_client(batch, model))

        def alike(images, labels, index):
            pair = [gradient_of(model, images[index : index + 1], labels[index : index + 1])]
            pair.append(gradient_of(model, batch.images[index : index + 1], batch.labels[index : index + 1]))
            return F.cosine_similarity(*map(flat, pair), dim=0)

        others = (begun.labels.argmax(1) != batch.labels).tolist()
        assert any(others)
        for index, other in enumerate(others):
            first, last = (alike(some.images, some.labels, index) for some in (begun, found))
            assert last > (first + 0.05 if other else 0.85)  # a start of the same class is alike already
            assert (found.images[index] - batch.images[index]).norm() > 2

    def test_it_stops_when_far_enough_each_by_itself(self):
        model, batch = make_model().eval(), make_batch()
        found = replace(QUICK, steps=400, far=9.0).conceal(model, batch, make_client(batch, model))
        whole = replace(QUICK, steps=400).conceal(model, batch, make_client(batch, model))
        distance = (found.images - batch.images).flatten(1).norm(dim=1)
        beyond = (whole.images - batch.images).flatten(1).norm(dim=1) > 10
        assert bool(beyond.any())
        assert bool((distance[beyond] > 9).all())
        assert bool((distance < 10.0).all())

    def test_a_box_holds_the_pixels(self):
        model, batch = make_model().eval(), make_batch()
        inside = replace(QUICK, box=True, steps=60).conceal(model, batch, make_client(batch, model)).images
        outside = replace(QUICK, steps=60).conceal(model, batch, make_client(batch, model)).images
        assert inside.min() >= 0
        assert inside.max() <= 1
        assert outside.min() < 0

    def test_where_it_starts(self):
        batch, others, aux = make_batch(2), make_batch(3, seed=5, sensitive=[False] * 3), make_batch(4, seed=6)
        data = Batch(*(torch.cat([getattr(b, k) for b in (batch, others)]) for k in ("images", "labels", "sensitive")))

        def begins(start, data=data, aux=aux):
            return replace(QUICK, start=start)._starts(batch, 3, make_client(batch, data=data, aux=aux))

        def among(images, pool):
            return all(any(torch.equal(image, other) for other in pool.images) for image in images)

        assert among(begins("other").images, others)
        assert among(begins("other", data=batch).images, aux)
        assert among(begins("aux").images, aux)
        other = begins("other")
        assert torch.allclose(begins("mixup").images, 0.7 * other.images + 0.3 * batch.images)
        alone = begins("other", data=batch, aux=None)
        assert torch.equal(alone.images, begins("noise").images)
        assert torch.allclose(alone.labels.sum(1), torch.ones(2, dtype=torch.float64))
        with pytest.raises(DefenceError, match=r"needs public images, got none\. Give --aux"):
            begins("aux", aux=None)

    def test_public_images_of_other_classes_have_labels_at_random(self):
        batch = make_batch(8)
        strangers = replace(make_batch(8, seed=3), labels=torch.arange(8) + 1)
        client = make_client(batch, aux=strangers)
        labels = Dcs2(steps=1, start="aux").conceal(client.model, batch, client).labels
        assert labels.shape == (8, 3)
        assert torch.equal(labels.sum(1), torch.ones(8).to(labels))

    def test_normalised_pixels_count(self):
        network = create_model("lenet-dlg", (1, 8, 8), 4, 0, Normalisation((0.5,), (0.25,))).eval()
        batch = Batch(torch.linspace(0, 1, 128).view(2, 1, 8, 8), torch.tensor([1, 2]), torch.ones(2) > 0)
        near = replace(QUICK, far=1e-6, steps=8).conceal(network, batch, make_client(batch, network))
        begun = QUICK._starts(batch, 4, make_client(batch, network))
        assert torch.allclose((near.images - begun.images).abs(), torch.tensor(0.1 * 0.25), atol=1e-3)


class TestGradient:
    def expected(self, defence, model, batch, rows):
        client = make_client(batch, model)
        concealed = defence.conceal(copy.deepcopy(model).eval(), batch[rows], client)
        own = F.one_hot(batch.labels[rows], 3).double()
        total = flat(gradient_of(model, batch.images, batch.labels))
        for index in range(len(rows)):
            image = concealed.images[index : index + 1]
            for share, label in ((0.7, concealed.labels), (0.3, own)):
                total = total + share * flat(gradient_of(model, image, label[index : index + 1])) / len(batch)
        return total / defence.divisor

    @pytest.mark.parametrize("divisor", [1.0, 3.0])
    @pytest.mark.parametrize("sensitive", [[True] * 4, [False, True, False, True]])
    def test_it_is_equation_10(self, divisor, sensitive):
        defence, model = replace(QUICK, divisor=divisor), make_model()
        batch = make_batch(sensitive=sensitive)
        plain = gradient_of(model, batch.images, batch.labels)
        sent = flat(defence.on_gradient(plain, batch, make_client(batch, model)))
        expected = self.expected(defence, model, batch, batch.sensitive.nonzero()[:, 0])
        assert expected @ flat(plain) > 0  # nothing to project here
        assert torch.allclose(sent, expected, atol=1e-9)

    def test_a_ratio_conceals_one_of_so_many_beginning_at_random(self, monkeypatch):
        defence, model, batch = replace(QUICK, ratio=3), make_model(), make_batch()
        conceal, concealed = Dcs2.conceal, []

        def watched(self, network, sensitive, client):
            same = (batch.images[:, None] == sensitive.images).flatten(2).all(2)
            concealed.append(tuple(same.nonzero()[:, 0].tolist()))
            return conceal(self, network, sensitive, client)

        monkeypatch.setattr(Dcs2, "conceal", watched)
        plain = gradient_of(model, batch.images, batch.labels)
        for seed in range(12):
            client = replace(make_client(batch, model), rng=SecretStream(seed))
            defence.on_gradient(plain, batch, client)
        assert set(concealed) == {(0, 3), (1,), (2,)}

    def test_without_sensitive_images_nothing_happens(self):
        model, batch = make_model(), make_batch(sensitive=[False] * 4)
        plain = gradient_of(model, batch.images, batch.labels)
        assert QUICK.on_gradient(plain, batch, make_client(batch, model)) is plain

    def test_soft_labels(self):
        model, batch = make_model(), make_batch()
        soft = replace(batch, labels=F.one_hot(batch.labels, 3).double())
        sent = [
            flat(QUICK.on_gradient(gradient_of(model, b.images, b.labels), b, make_client(b, model)))
            for b in (batch, soft)
        ]
        assert torch.allclose(*sent)

    @given(st.integers(0, 10_000))
    @settings(max_examples=25, deadline=None)
    def test_the_projection_is_the_quadratic_programmes(self, seed):
        rng = np.random.default_rng(seed)
        reference, gradient = rng.normal(size=5), rng.normal(size=5)
        solved = minimize(
            lambda g: 0.5 * ((g - gradient) ** 2).sum(), gradient + reference, jac=lambda g: g - gradient,
            constraints={"type": "ineq", "fun": lambda g: g @ reference, "jac": lambda g: reference},
            method="SLSQP", options={"ftol": 1e-14, "maxiter": 300},
        )  # fmt: skip
        ours = projected({"w": torch.from_numpy(gradient)}, {"w": torch.from_numpy(reference)})["w"]
        assert np.allclose(ours.numpy(), solved.x, atol=1e-5)

    def test_a_margin_adds_more(self):
        reference, against = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([-0.1, 1.0])}
        assert projected(against, reference, 0.5)["w"].tolist() == pytest.approx([0.4, 1.0])
        assert projected(reference, reference, 0.5)["w"].tolist() == [1.0, 0.0]
        assert projected(against, {"w": torch.zeros(2)})["w"].tolist() == pytest.approx([-0.1, 1.0])

    def test_what_is_sent_never_points_backwards(self):
        batch = make_batch(1)
        for seed in range(8):
            model = make_model()
            plain = gradient_of(model, batch.images, batch.labels)
            sent = QUICK.on_gradient(plain, batch, make_client(batch, model, seed=seed))
            assert flat(sent) @ flat(plain) >= -1e-9

    def test_a_chain_with_pruning(self):
        model, batch = make_model(), make_batch()
        chain = build_defence("dcs2:steps=5,start=noise+prune:fraction=0.5,where=gradient")
        sent = chain.on_gradient(gradient_of(model, batch.images, batch.labels), batch, make_client(batch, model))
        assert 0.3 < (flat(sent) == 0).double().mean() < 0.7


class TestJointAttack:
    def test_its_countermoves(self):
        arrived = Arrived({"w": torch.ones(1, 2)}, [1.0])
        assert Dcs2().adaptive(arrived) == {
            "separate": Countermove(decoys=1, own_label=1 - 0.7, separate=True),
            "joint": Countermove(decoys=1, own_label=1 - 0.7),
        }
        moves = Dcs2(divisor=3.0).adaptive(arrived)
        assert torch.equal(moves["joint"].sent({"w": torch.ones(1, 2)}, {})["w"], torch.full((1, 2), 1 / 3))
        assert torch.equal(moves["separate"].look({"w": torch.ones(1, 2)})["w"], torch.full((1, 2), 3.0))

    def test_searching_the_hidden_image_too_finds_the_private_one(self):
        truth, labels, seen = scene(targets=3, defence=Hiding(), grants=("num-examples", "labels", "defence"))
        attack = build_attack("gs:iterations=600,sign=none,schedule=cosine,lr=0.1,tv=1e-6")
        knowing, plain = (run(replace(attack, adapt=adapt), seen) for adapt in ("", "none"))
        found = [psnr(truth[:, 0], result.images[:, 0]).mean() for result in (plain, knowing)]
        assert found[1] > found[0] + 5
        assert torch.equal(knowing.labels, labels)
        assert knowing.images.shape == truth.shape

    @pytest.mark.parametrize("attack", ["dlg:iterations=3", "gs:iterations=3,restarts=2"])
    def test_every_kind_of_search_takes_decoys(self, attack):
        _, _, seen = scene(targets=2, size=2, defence=Hiding(), grants=("num-examples", "labels", "defence"))
        result = run(build_attack(attack), seen)
        assert result.images.shape == (2, 2, 1, 8, 8)
        assert bool(result.images.isfinite().all())


class TestSeparatingAttack:
    @pytest.mark.parametrize("settings", ["", ",divisor=3,lambda_g=0.5"])
    def test_the_private_image_comes_back_as_if_undefended(self, settings):
        truth, _, seen = scene(
            targets=3, defence=build_defence(f"dcs2:steps=30{settings}"), marked=True,
            grants=("num-examples", "labels", "defence"),
        )  # fmt: skip
        attack = build_attack("dlg:iterations=15")
        found = {adapt: run(replace(attack, adapt=adapt), seen).images[:, 0] for adapt in ("separate", "none")}
        assert psnr(truth[:, 0], found["separate"]).median() > 50
        assert psnr(truth[:, 0], found["none"]).median() < 20

    def test_images_without_a_concealed_sample_are_known_as_such(self):
        truth, _, seen = scene(
            targets=6, defence=build_defence("dcs2:steps=30,ratio=3"), marked=True,
            grants=("num-examples", "labels", "defence"),
        )  # fmt: skip
        knowing, plain = (run(build_attack(f"dlg:iterations=15{adapt}"), seen) for adapt in ("", ",adapt=none"))
        found = [psnr(truth[:, 0], result.images[:, 0]) for result in (knowing, plain)]
        spared = found[1] > 40
        assert 0 < int(spared.sum()) < 6  # some are concealed, some are not
        assert knowing.answers == ("separate",) * 6
        assert found[0].median() > 50
        assert found[0][spared].min() > 40

    def test_what_is_played_against_a_target_does_not_depend_on_the_others(self):
        truth, _, seen = scene(
            targets=3, defence=build_defence("dcs2:steps=30"), marked=True, grants=("num-examples", "labels", "defence")
        )
        noise = {
            name: torch.randn(t[1].shape, generator=torch.Generator().manual_seed(0))
            for name, t in seen.updates.items()
        }
        mixed = {name: torch.stack([tensor[0], noise[name], tensor[2]]) for name, tensor in seen.updates.items()}
        seen = replace(seen, updates=mixed)
        result = run(build_attack("dlg:iterations=15,keep=3"), seen)
        assert result.answers == ("separate", "joint", "separate")
        assert [answers(seen.only([target]))[0].name for target in range(3)] == list(result.answers)
        assert psnr(truth[:, 0], result.images[:, 0])[2] > 40  # dlg may fail on a target, as on the first
        assert torch.allclose(result.iterates[-1], result.images)
        assert result.labels[[0, 2]].tolist() == seen.labels[[0, 2]].tolist()

    def test_batches_have_fewer_decoys_than_images_where_some_have_none(self):
        how = {"targets": 1, "size": 4, "marked": True, "grants": ("num-examples", "labels", "defence")}
        sizes = []
        for ratio in (1, 2, 4):
            _, _, seen = scene(**how, defence=Dcs2(steps=1, ratio=ratio))
            (play,) = answers(seen)
            step = SearchStep(
                turned(Search(Objective("l2")), seen, play.move), 1, seen, replay_of(seen, "unroll", torch.Generator())
            )
            task = SearchTask(seen.mean_gradients, {}, seen.labels, {})
            sizes.append(step.begin("normal", task, torch.Generator()).shape[1])
        assert sizes == [4 * 64 + decoys * (64 + 4) for decoys in (4, 2, 1)]

    def test_in_a_chain_a_divisor_comes_before_what_follows(self):
        gradients = {"w": torch.tensor([[3.0, 6.0]])}
        move = build_defence("dcs2:divisor=3+clip:norm=1").adaptive(Arrived(gradients, [1.0]))["all"]
        assert not move.separate
        assert move.look is None
        assert torch.allclose(move.sent(gradients, gradients)["w"], torch.tensor([[1.0, 2.0]]) / 5**0.5)
        noisy = build_defence("dcs2:divisor=3+gaussian:std=0.01").adaptive(Arrived(gradients, [1.0]))["all"]
        assert (noisy.noise, noisy.look) == ({"w": 0.01}, None)


class Hiding(Defence):
    """A defence that adds the gradient of one fixed, unseen image for each private image."""

    def on_gradient(self, gradient, batch, client):
        rng = torch.Generator().manual_seed(9)
        image = torch.rand(len(batch), 1, 8, 8, generator=rng)
        loss = F.cross_entropy(client.model(image), torch.zeros(len(batch), dtype=torch.long))
        names = dict(client.model.named_parameters())
        added = torch.autograd.grad(loss, list(names.values()))
        return {name: gradient[name] + g for name, g in zip(names, added, strict=True)}

    def adaptive(self, arrived):
        return {"joint": Countermove(decoys=1)}


@pytest.mark.parametrize(
    "wrong",
    [{"start": "x"}, {"steps": 0}, {"lr": 0}, {"lambda_g": 1.5}, {"ratio": 0}, {"divisor": 0}, {"lambda_x": -1}],
)
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Dcs2(**wrong)


def test_it_reports_the_distance_of_its_concealed_samples():
    model, batch = make_model(), make_batch(4, sensitive=[True, False, True, False])
    client = make_client(batch, model)
    QUICK.on_gradient(gradient_of(model, batch.images, batch.labels), batch, client)
    found = QUICK.conceal(model, batch[batch.sensitive], make_client(batch, model))
    away = (found.images - batch.images[batch.sensitive]).flatten(1).norm(dim=1).mean()
    assert client.reports.means() == {"dcs2_distance": pytest.approx(float(away))}
