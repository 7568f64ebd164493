import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from torch import nn

from gradveil.config import TrainSettings
from gradveil.defences import Arrived, Budget, Chain, Client, Releases, build_defence
from gradveil.defences.dp_sgd import DpSgd
from gradveil.defences.parts import clipped
from gradveil.defences.parts.accounting import epsilon
from gradveil.defences.prune import Prune
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError, DefenceError
from gradveil.federated.client import train_locally
from gradveil.federated.flat import FlatModel
from gradveil.federated.protocol import LocalSettings
from gradveil.secret_stream import SecretStream
from gradveil.storage import save_tensors
from gradveil.types import Batch, Update

SHUFFLE = DpSgd(noise=0.0, sampling="shuffle")


def make_data(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 6, 6, generator=rng, dtype=torch.float64)
    return Batch(images, torch.randint(0, 3, (count,), generator=rng), torch.zeros(count) > 0)


def make_model(*extra):
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 3, 3), *extra, nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(*layers).double()


def make_client(model, data, seed=0):
    return Client(0, 1, model, {}, data, {}, {}, SecretStream(seed))


def plain_gradient(model, batch):
    loss = F.cross_entropy(model(batch.images), batch.labels)
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def naive(model, batch, clip, size):
    """Run Algorithm 1 without noise, by a loop over examples."""
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for index in range(len(batch)):
        gradient = plain_gradient(model, batch[slice(index, index + 1)])
        norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in gradient.values()))
        for name, tensor in gradient.items():
            total[name] += tensor * min(1.0, clip / norm)
    return {name: tensor / size for name, tensor in total.items()}


def close(one, other, atol=1e-12):
    return one.keys() == other.keys() and all(torch.allclose(one[k], other[k], atol=atol, rtol=1e-9) for k in one)


def train(defence, model, data, how, lr=0.1):
    net = FlatModel(copy.deepcopy(model))
    received = net.values[net.shared].clone()
    client = make_client(net.module, data)
    update = train_locally(net, received, client, defence, how, lr, SecretStream(5))
    return update, client


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 9), st.floats(1e-2, 10), st.integers(1, 4))
def test_the_gradient_is_the_naive_loops(count, clip, chunk):
    model, batch = make_model(), make_data(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipped, "_MOST_EXAMPLES", chunk)
        found = replace(SHUFFLE, clip=clip).on_gradient(plain_gradient(model, batch), batch, make_client(model, batch))
    assert close(found, naive(model, batch, clip, count))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # opacus's, on the first layer
def test_it_is_the_clipping_of_opacus():
    model, batch = make_model(), make_data(7)
    theirs = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    F.cross_entropy(theirs(batch.images), batch.labels, reduction="sum").backward()
    samples = {name.removeprefix("_module."): p.grad_sample for name, p in theirs.named_parameters()}
    norms = torch.stack([sample.flatten(1).norm(dim=1) for sample in samples.values()], 1).norm(dim=1)
    factors = (1.8 / (norms + 1e-6)).clamp(max=1.0)  # opacus.optimizers.DPOptimizer.clip_and_accumulate
    assert (factors < 1).any()
    assert (factors == 1).any()
    expected = {name: torch.einsum("i,i...->...", factors, sample) / 7 for name, sample in samples.items()}
    found = replace(SHUFFLE, clip=1.8).on_gradient(plain_gradient(model, batch), batch, make_client(model, batch))
    assert close(found, expected, atol=1e-5)


def test_it_reports_the_share_of_clipped_examples():
    model, data = make_model(), make_data(9)
    norms = []
    for index in range(len(data)):
        one = plain_gradient(model, data[slice(index, index + 1)])
        norms.append(math.sqrt(sum(float(tensor.square().sum()) for tensor in one.values())))
    clip = sorted(norms)[5] + 1e-9  # three are longer
    client = make_client(model, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipped, "_MOST_EXAMPLES", 4)
        replace(SHUFFLE, clip=clip).on_gradient(plain_gradient(model, data), data, client)
    assert client.reports.means() == {"dp_sgd_clipped": pytest.approx(3 / 9)}


def test_one_step_of_training_sends_minus_lr_times_it():
    model, data = make_model(), make_data(6)
    update, _ = train(replace(SHUFFLE, clip=0.1), model, data, LocalSettings("fedsgd", batch_size=0), lr=0.5)
    expected = {name: -0.5 * tensor for name, tensor in naive(model, data, 0.1, 6).items()}
    assert close(dict(update.tensors), expected)
    assert update.num_examples == 6


def test_a_large_batch_passes_the_network_in_pieces_that_fit_the_memory():
    """The network never sees more than 64 images at once, and the plain gradient of the batch is not computed."""
    model, data, seen = make_model(), make_data(150), []
    how = LocalSettings("fedsgd", batch_size=0)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    update, _ = train(replace(SHUFFLE, clip=0.1), model, data, how, lr=1.0)
    assert max(seen) == 64
    whole = naive(model, data, 0.1, 150)
    assert close(dict(update.tensors), {name: -tensor for name, tensor in whole.items()})


def test_soft_labels():
    model, batch = make_model(), make_data(4)
    soft = replace(batch, labels=F.one_hot(batch.labels, 3).double() * 0.7 + 0.1)
    found = replace(SHUFFLE, clip=0.3).on_gradient(plain_gradient(model, soft), soft, make_client(model, soft))
    assert close(found, naive(model, soft, 0.3, 4))


@pytest.mark.parametrize("count", [0, 3])
def test_noise_has_its_moments(count):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3000)).double()
    batch = make_data(count)
    client = make_client(model, batch)
    client.state["batch_size"] = torch.tensor(4)  # as on_batch leaves it
    gradient = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    found = DpSgd(clip=0.5, noise=3.0).on_gradient(gradient, batch, client)
    mean = naive(model, batch, 0.5, 4) if count else gradient
    noise = torch.cat([(found[name] - mean[name]).flatten() for name in mean]) / (0.5 * 3.0 / 4)
    assert abs(noise.mean()) < 5 / math.sqrt(len(noise))
    assert abs(noise.square().mean() - 1) < 5 * math.sqrt(2 / len(noise))
    assert abs(noise.pow(4).mean() - 3) < 5 * math.sqrt(96 / len(noise))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_poisson_samples_each_image_at_its_rate(count, size, seed):
    data, size, draws = make_data(count), min(size, count), 400
    data = replace(data, images=torch.arange(count).view(-1, 1, 1, 1))
    client = make_client(nn.Identity(), data, seed)
    batches = [DpSgd().on_batch(data[slice(0, size)], client) for _ in range(draws)]
    chosen = torch.cat([batch.images.flatten() for batch in batches])
    rate, hits = size / count, torch.bincount(chosen, minlength=count) / draws
    assert bool(((hits - rate).abs() <= 6 * math.sqrt(rate * (1 - rate) / draws)).all())
    sizes = torch.tensor([len(batch) for batch in batches]).double()
    assert abs(sizes.mean() - size) <= 6 * math.sqrt(size * (1 - rate) / draws) + 1e-9
    assert abs(sizes.var() - size * (1 - rate)) <= 0.6 * size * (1 - rate) + 1e-9  # independent draws
    assert all(len(set(batch.images.flatten().tolist())) == len(batch) for batch in batches)
    assert client.state["batch_size"] == size


def test_shuffled_batches_stay():
    data = make_data(4)
    batch = data[slice(0, 2)]
    assert SHUFFLE.on_batch(batch, make_client(nn.Identity(), data)) is batch


def test_training_on_poisson_samples_is_the_naive_loop_with_the_expected_size():
    model, data, how = make_model(), make_data(10), LocalSettings(batch_size=3)
    update, client = train(DpSgd(noise=0.0, clip=0.2), model, data, how)
    local, rng, sizes = copy.deepcopy(model), SecretStream(0), []
    for expected in (3, 3, 3, 1):
        drawn = rng.uniform((10,), torch.float64) < expected / 10
        gradient = naive(local, data[drawn], 0.2, expected)
        with torch.no_grad():
            for name, parameter in local.named_parameters():
                parameter -= 0.1 * gradient[name]
        sizes.append(int(drawn.sum()))
    assert sizes != [3, 3, 3, 1]
    before = dict(model.named_parameters())
    assert close(dict(update.tensors), {k: (v - before[k]).detach() for k, v in local.named_parameters()})
    assert update.num_examples == 10
    assert not client.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_sample_gives_pure_noise(dtype):
    model, data = make_model(nn.GroupNorm(1, 3)).to(dtype), make_data(200)
    data = replace(data, images=data.images.to(dtype))
    client = make_client(model, data)
    empty = next(b for b in (DpSgd().on_batch(data[slice(0, 1)], client) for _ in range(100)) if len(b) == 0)
    gradient = {name: torch.full_like(parameter, math.nan) for name, parameter in model.named_parameters()}
    found = DpSgd(noise=0.5).on_gradient(gradient, empty, client)
    assert all(bool(tensor.isfinite().all()) and bool(tensor.any()) for tensor in found.values())
    how = LocalSettings(batch_size=1, momentum=0.9, weight_decay=0.01)  # of 200 steps about 74 are empty
    update, _ = train(DpSgd(), model, data, how, lr=0.01)
    assert all(bool(tensor.isfinite().all()) for tensor in update.tensors.values())
    assert update.num_examples == 200


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), nn.InstanceNorm2d(3, affine=True, track_running_stats=True)])
def test_layers_that_mix_or_track_images_are_refused_unless_frozen(layer):
    model, data = make_model(layer), make_data(4)
    with pytest.raises(DefenceError, match=r"'1' \(\w+Norm2d\) mixes.*--batch-norm freeze"):
        train(DpSgd(), model, data, LocalSettings(batch_size=2))
    model.eval()
    found = replace(SHUFFLE, clip=0.1).on_gradient(plain_gradient(model, data), data, make_client(model, data))
    assert close(found, naive(model, data, 0.1, 4))


def test_frozen_batch_norm_trains():
    update, _ = train(DpSgd(), make_model(nn.BatchNorm2d(3)), make_data(4), LocalSettings(batch_norm="freeze"))
    assert not any(bool(buffer.any()) for buffer in update.buffers.values())
    assert all(bool(tensor.any()) for tensor in update.tensors.values())


def test_buffers_that_moved_are_not_sent():
    client = make_client(nn.Identity(), make_data(4))
    update = Update({"w": torch.ones(1)}, 4, {"mean": torch.zeros(2), "counter": torch.ones(1)})
    with pytest.raises(DefenceError, match="changed counter, which would be sent"):
        DpSgd().on_update(update, client)
    still = replace(update, buffers={"mean": torch.zeros(2)})
    assert DpSgd().on_update(still, client) is still


def test_the_number_of_images_sent_is_the_expected_one():
    data = make_data(10)
    for seed in range(5):
        client = make_client(nn.Identity(), data, seed)
        DpSgd().on_batch(data[slice(0, 4)], client)
        assert DpSgd().on_update(Update({}, 9), client).num_examples == 4


class OwnNoise(nn.Module):
    """A layer that draws random numbers in training mode, like a variational bottleneck or a user's own layer."""

    def forward(self, features):
        return features + torch.randn_like(features) if self.training else features


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), OwnNoise()])
def test_layers_draw_for_each_image(layer):
    torch.manual_seed(0)
    model, batch = make_model(layer), make_data(3)
    gradient = plain_gradient(model, batch)
    torch.manual_seed(7)
    found = replace(SHUFFLE, clip=0.3).on_gradient(gradient, batch, make_client(model, batch))
    torch.manual_seed(7)
    assert close(found, naive(model, batch, 0.3, 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_counts_as_zero(bad):
    model, batch = make_model(), make_data(3)
    broken = replace(batch, images=batch.images.index_fill(0, torch.tensor(1), bad))
    plain = plain_gradient(model, batch)
    found = replace(SHUFFLE, clip=0.3).on_gradient(plain, broken, make_client(model, broken))
    others = naive(model, batch[torch.tensor([0, 2])], 0.3, 3)
    assert close(found, others)
    noisy = DpSgd().on_gradient(plain, broken, make_client(model, broken))
    assert all(bool(tensor.isfinite().all()) and bool(tensor.any()) for tensor in noisy.values())


def test_the_budget_of_poisson_samples():
    releases = Releases(num_examples=600, batch_size=6, steps=1000, uses=10)
    assert DpSgd().budget(releases) == Budget(epsilon(1.0, 0.01, 1000, 1e-5), 1e-5)
    assert DpSgd(delta=1e-3, noise=2.0).budget(releases) == Budget(epsilon(2.0, 0.01, 1000, 1e-3), 1e-3)
    assert DpSgd(accountant="prv").budget(releases).epsilon < DpSgd().budget(releases).epsilon
    assert DpSgd().budget(Releases(5, 8, 3, 3)).epsilon == epsilon(1.0, 1.0, 3, 1e-5)
    assert DpSgd(noise=0.0).budget(releases) is None


def test_the_budget_of_shuffled_batches_claims_no_amplification():
    shuffle = DpSgd(sampling="shuffle")
    assert shuffle.budget(Releases(600, 6, 1000, uses=10)).epsilon == epsilon(1.0, 1.0, 10, 1e-5)
    assert shuffle.budget(Releases(600, 6, 1000, uses=1000)).epsilon == epsilon(1.0, 1.0, 1000, 1e-5)


def test_in_a_chain_pruning_keeps_the_budget():
    releases = Releases(600, 6, 1000, 10)
    assert Chain((DpSgd(), Prune())).budget(releases) == DpSgd().budget(releases)


def test_the_attacker_clips_its_guess_and_knows_the_noise():
    seen = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    moves = DpSgd(clip=2.0, noise=0.5).adaptive(Arrived(seen, [0.3, 0.4]))
    assert list(moves) == ["likelihood", "direction"]
    assert [move.distance for move in moves.values()] == ["l2", "cosine"]
    assert moves["likelihood"].noise == pytest.approx(dict.fromkeys(seen, 2.0 * 0.5 * 0.5 / 0.7))
    assert not moves["direction"].noise
    guess = {"w": torch.tensor([[4.0, 4.0], [0.1, 0.1]]), "b": torch.tensor([2.0, 0.1])}  # norms 6 and 0.17
    for move in moves.values():
        sent = move.sent(guess, seen)
        assert torch.allclose(sent["w"], torch.tensor([[4 / 3, 4 / 3], [0.1, 0.1]]))
        assert torch.allclose(sent["b"], torch.tensor([2 / 3, 0.1]))
    assert list(DpSgd(noise=0.0).adaptive(Arrived(seen, [1.0]))) == ["again"]
    of_four = DpSgd(clip=2.0, noise=0.5).adaptive(Arrived(seen, [0.3, 0.4], batch_size=4))["likelihood"]
    assert of_four.noise == pytest.approx(dict.fromkeys(seen, 2.0 * 0.5 * 0.5 / 0.7 / 4))


@pytest.mark.parametrize("wrong", ["clip=0", "noise=-1", "delta=0", "delta=1", "sampling=uniform", "accountant=gdp"])
def test_bad_settings(wrong):
    with pytest.raises(ConfigError, match=wrong.split("=")[0]):
        build_defence(f"dp-sgd:{wrong}")


@pytest.mark.parametrize("defence", ["dp-sgd", "clip+dp-sgd"])
def test_a_training_that_mixes_images_is_refused_before_any_work(defence):
    settings = TrainSettings(model="resnet20", clients=2, partition="iid:images=8", rounds=1, defence=defence)
    with pytest.raises(ConfigError, match=r"BatchNorm2d\) mixes images.*Train with --batch-norm freeze"):
        Simulation(settings, workers=0)
    for usable in (replace(settings, batch_norm="freeze"), replace(settings, rounds=0)):  # the latter only evaluates
        with Simulation(usable, workers=0):
            pass


class TestAugmentation:
    def test_copies_are_shifted_and_mirrored_images(self):
        data = make_data(3)
        one = Batch(torch.arange(64.0).view(1, 1, 8, 8), data.labels[:1], data.sensitive[:1])
        many = clipped.augmented(one, 40, True, SecretStream(0))
        assert many.images.shape == (40, 1, 8, 8)
        padded = F.pad(one.images, (1, 1, 1, 1), mode="reflect")[0, 0]
        allowed = {
            tuple(part.flatten().tolist())
            for y in range(3)
            for x in range(3)
            for part in (padded[y : y + 8, x : x + 8], padded[y : y + 8, x : x + 8].flip(1))
        }
        seen = {tuple(image.flatten().tolist()) for image in many.images}
        assert seen <= allowed
        assert len(seen) > 12
        assert clipped.augmented(data, 2, False, SecretStream(0)).labels.tolist() == [
            label for label in data.labels.tolist() for _ in range(2)
        ]

    def test_the_mean_over_copies_is_clipped(self):
        model, data = make_model(), make_data(4)
        client = make_client(model, data)
        defence = replace(SHUFFLE, clip=0.3, augment=3)
        found = defence.on_gradient(plain_gradient(model, data), data, client)
        many = clipped.augmented(data, 3, False, client.rng.fork("augment", 1))
        total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        for index in range(4):
            one = plain_gradient(model, many[slice(3 * index, 3 * index + 3)])
            norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in one.values()))
            total = {name: tensor + one[name] * min(1.0, 0.3 / norm) / 4 for name, tensor in total.items()}
        assert close(found, total)

    def test_bad_settings(self):
        with pytest.raises(ConfigError, match="augment must be"):
            DpSgd(augment=0)
        with pytest.raises(ConfigError, match="flip mirrors copies"):
            DpSgd(flip=True)


def test_group_norm_makes_a_residual_network_trainable(tiny):
    how = replace(tiny, model="resnet20:width=2,norm=group", defence="dp-sgd", rounds=1)
    with Simulation(how, workers=0) as simulation:
        assert len(list(simulation.run())) == 1
    with pytest.raises(ConfigError, match="resnet20:norm=group"):
        Simulation(replace(how, model="resnet20:width=2"), workers=0)


def test_a_start_from_public_weights_costs_no_privacy(tiny, tmp_path):
    how = replace(tiny, defence="dp-sgd:noise=2", rounds=1)
    with Simulation(how, workers=0) as cold:
        weights = {name: torch.full_like(tensor, 0.25) for name, tensor in cold.model.items()}
        spent = list(cold.run())[-1]["epsilon"]
    save_tensors(tmp_path / "public.safetensors", weights)
    with Simulation(replace(how, weights=str(tmp_path / "public.safetensors")), workers=0) as warm:
        assert all(bool((tensor == 0.25).all()) for tensor in warm.model.values())
        assert list(warm.run())[-1]["epsilon"] == spent
