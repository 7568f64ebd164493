"""FedKL: which layers are locked, which tensors leave the device, and which attacks succeed anyway."""

import base64
import math
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradveil.attacks import build_attack
from gradveil.attacks.parts.local_training import replay_of
from gradveil.config import TrainSettings
from gradveil.defences import Arrived, build_defence
from gradveil.defences.fedkl import KeyLock, recovered_key
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError, RunFolderError
from gradveil.federated.protocol import ONE_GRADIENT, LocalSettings, Protocol
from gradveil.models import create_model
from gradveil.networks.grads import example_gradients
from gradveil.registry import components
from gradveil.runs.attack import attack_files
from gradveil.runs.train import train
from gradveil.runs.update_spec import UpdateSpec
from gradveil.secret_stream import SecretStream
from gradveil.storage import PrivateFolder, load_tensors
from gradveil.threat import Knowledge, ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch

PLAIN = ("logistic", "mlp")
"""Models of the zoo without convolutions."""


def locked(spec="fedkl:length=8", model="lenet-dlg", seed=0, shape=(1, 12, 12)):
    network = create_model(model, shape, 3, 0).eval()
    return build_defence(spec).on_model(network, SecretStream(seed))


def key_locks(network):
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, KeyLock)}


def some_images(count=2, shape=(1, 12, 12)):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(1))


class TestLockedBlock:
    @pytest.mark.parametrize("activation", ["none", "relu", "sigmoid"])
    def test_is_the_equation(self, activation):
        network = locked(f"fedkl:length=8,activation={activation}")
        block = network.conv1
        block.locked.norm.running_mean.normal_()
        block.locked.norm.running_var.uniform_(0.5, 2)
        lock, images = block.locked.key_lock, some_images()
        act = {"none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}[activation]
        u = block.conv(images)
        expected = torch.empty_like(u)
        for channel in range(12):
            gamma = act(sum(lock.weight[channel, j] * lock.key[j] for j in range(8)) + lock.bias[channel])
            beta = act(sum(lock.weight[12 + channel, j] * lock.key[j] for j in range(8)) + lock.bias[12 + channel])
            norm = block.locked.norm
            normal = (u[:, channel] - norm.running_mean[channel]) / (norm.running_var[channel] + norm.eps).sqrt()
            expected[:, channel] = gamma * normal + beta
        assert torch.allclose(block(images), expected, atol=1e-5)

    def test_tiles_of_a_spatial_key_have_scales_of_their_own(self):
        network = locked("fedkl:length=8,grid=2,norm=none")
        block = network.conv1
        gamma, beta = block.locked.key_lock().view(2, 12, 2, 2)
        u, s = block.conv(some_images()), block(some_images())
        assert u.shape[2:] == (6, 6)
        for i, rows in enumerate((slice(0, 3), slice(3, 6))):
            for j, columns in enumerate((slice(0, 3), slice(3, 6))):
                tile = gamma[:, i, j, None, None] * u[..., rows, columns] + beta[:, i, j, None, None]
                assert torch.allclose(s[..., rows, columns], tile, atol=1e-6)

    def test_the_papers_key_has_1024_numbers_in_0_to_1_and_the_lock_pytorchs_first_values(self):
        (lock,) = key_locks(locked("fedkl:scale=paper")).values()
        assert lock.key.shape == (1024,)
        assert 0 <= lock.key.min() < 0.02 < 0.98 < lock.key.max() < 1
        assert 0.031 < lock.weight.abs().max() <= 1 / math.sqrt(1024)
        (wide,) = key_locks(locked("fedkl:init=uniform,scale=paper")).values()
        assert 0.49 < wide.weight.abs().max() <= 0.5

    @pytest.mark.parametrize("rest", ["", ",init=uniform", ",lock=common", ",grid=2"])
    def test_both_scales_start_with_the_same_outputs(self, rest):
        unit, paper = (next(iter(key_locks(locked(f"fedkl:scale={s}{rest}")).values())) for s in ("unit", "paper"))
        assert torch.allclose(unit(), paper(), rtol=1e-4, atol=1e-5)
        assert torch.allclose(unit.key * math.sqrt(1024 / 3), paper.key)

    @pytest.mark.parametrize(
        ("spec", "low", "high"),
        [("length=1024", 1.9, 2.1), ("length=64", 1.5, 2.5), ("length=1024,scale=paper", 320, 370)],
    )
    def test_a_step_moves_scales_about_as_far_as_weights_and_the_papers_hundreds_of_times_as_far(self, spec, low, high):
        (lock,) = key_locks(locked(f"fedkl:{spec}")).values()
        before = lock()
        slopes = torch.autograd.grad(before.sum(), [lock.weight, lock.bias])  # 1 for each scale and shift
        with torch.no_grad():
            for tensor, slope in zip((lock.weight, lock.bias), slopes, strict=True):
                tensor -= 0.01 * slope
            moved = (before - lock()) / 0.01
        assert low < moved.min() <= moved.max() < high

    def test_trains_at_the_learning_rate_of_fedavg(self):
        run = {"model": "lenet5", "clients": 2, "rounds": 8, "partition": "iid:images=300", "batch_size": 16}
        with Simulation(TrainSettings(defence="fedkl", eval_every=8, **run), workers=0) as simulation:
            assert list(simulation.run())[-1]["accuracy"] > 0.6  # 0.79; 0.30 with scale=paper, 0.85 undefended

    @pytest.mark.parametrize("source", ["seed", "system"])
    def test_clients_differ_and_only_a_seed_repeats(self, source):
        one, again, other = (
            next(iter(key_locks(locked(f"fedkl:source={source}", seed=s)).values())) for s in (1, 1, 2)
        )
        assert torch.equal(one.key, again.key) == torch.equal(one.weight, again.weight) == (source == "seed")
        assert not torch.equal(one.key, other.key)
        assert not torch.equal(one.weight, other.weight)

    def test_a_common_lock_is_the_same_for_all_and_the_keys_differ(self):
        one, other = (next(iter(key_locks(locked("fedkl:lock=common", seed=seed)).values())) for seed in (1, 2))
        assert torch.equal(one.weight, other.weight)
        assert not torch.equal(one.key, other.key)

    def test_leaves_the_given_network_and_the_global_generator_alone(self):
        network = create_model("resnet20:width=4", (3, 16, 16), 3, 0)
        names, before = list(network.state_dict()), torch.get_rng_state()
        build_defence("fedkl").on_model(network, SecretStream(0))
        assert list(network.state_dict()) == names
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ([nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)], nn.BatchNorm2d),
        ([nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)], nn.GroupNorm),
        ([nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True)], nn.InstanceNorm2d),
        ([nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)], nn.BatchNorm2d),
        ([nn.Conv2d(1, 4, 3)], nn.BatchNorm2d),
    ],
)
def test_a_users_network_keeps_its_normalisation_but_for_scale_and_shift(layers, kind):
    network = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3)).eval()
    network(some_images())
    result = build_defence("fedkl:length=8").on_model(network, SecretStream(0))
    (lock,) = key_locks(result)
    norm = result.get_submodule(lock.removesuffix("key_lock") + "norm")
    assert type(norm) is kind
    assert norm.weight is None
    assert norm.bias is None
    assert result(some_images()).shape == (2, 3)
    assert lock.startswith("1" if len(layers) == 2 else "0")


class Own(nn.Module):
    """A user's network; with ``traced=False`` it branches on the data, so torch.fx cannot trace it."""

    def __init__(self, *, traced=True):
        super().__init__()
        self.traced = traced
        self.define()

    def forward(self, images):
        if not self.traced and images.sum() > 1e9:
            return images
        return self.way(images).flatten(1)


class Apart(Own):
    """A network that defines all convolutions before all normalisations."""

    def define(self):
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def way(self, images):
        return self.norm2(self.conv2(self.norm1(self.conv1(images)).relu()))


class Backward(Own):
    """A network that defines the layer last that it calls first."""

    def define(self):
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
        self.stem = nn.Conv2d(1, 4, 3)

    def way(self, images):
        return self.body(self.stem(images).relu())


class Aside(Own):
    """A network that defines the second convolution's normalisation after the first convolution."""

    def define(self):
        self.conv1, self.norm, self.conv2 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)

    def way(self, images):
        return self.norm(self.conv2(self.conv1(images).relu()))


class Skipped(Own):
    """A network that uses the convolution's output with and without the normalisation."""

    def define(self):
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)

    def way(self, images):
        given = self.conv(images)
        return given + self.norm(given)


class InPlace(Skipped):
    """A network that changes the convolution's output in place before the normalisation."""

    def way(self, images):
        return self.norm(self.conv(images).relu_())


class Twice(Own):
    """A network that calls one convolution twice, each time before a different normalisation."""

    def define(self):
        self.conv, self.norm1, self.norm2 = nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.BatchNorm2d(1)

    def way(self, images):
        return self.norm2(self.conv(self.norm1(self.conv(images)).relu()))


class Tied(Own):
    """A network with one convolution under two names."""

    def define(self):
        self.conv1 = self.conv2 = nn.Conv2d(1, 1, 3)

    def way(self, images):
        return self.conv2(self.conv1(images).relu())


class Standardised(nn.Conv2d):
    """A user's own subclass of nn.Conv2d."""

    def forward(self, images):
        return self._conv_forward(images, self.weight / self.weight.std(), self.bias)


class OwnKind(Apart):
    """A network that calls a subclass of nn.Conv2d first."""

    def define(self):
        super().define()
        self.conv1 = Standardised(1, 4, 3)


def locked_and_checked(network, blocks):
    defence = build_defence(f"fedkl:length=8,blocks={blocks}")
    result = defence.on_model(network, SecretStream(0))
    before = list(result.state_dict()), result.training, torch.get_rng_state()
    defence.check(result, (1, 12, 12))
    assert (list(result.state_dict()), result.training) == before[:2]
    assert torch.equal(before[2], torch.get_rng_state())
    return [name.removesuffix(".key_lock") for name in key_locks(result)]


@pytest.mark.parametrize(
    ("network", "blocks", "locked"),
    [
        (Apart(), "all", ["norm1", "norm2"]),
        (Apart(), "conv2", ["norm2"]),
        (OwnKind(), "first", ["norm1"]),
        (Backward(), "first", ["stem.locked"]),
        (Backward(traced=False), "all", ["body.1", "stem.locked"]),
        (Backward(traced=False), "stem", ["stem.locked"]),
        (Aside(), "all", ["conv1.locked", "norm"]),
        (Skipped(), "first", ["conv.locked"]),
        (InPlace(), "first", ["conv.locked"]),
    ],
)
def test_what_a_users_convolution_gives_is_locked_wherever_it_is_defined(network, blocks, locked):
    assert locked_and_checked(network, blocks) == locked


@pytest.mark.parametrize(
    ("network", "blocks", "found"),
    [
        (Apart(traced=False), "all", "a call of 'conv2' whose output is used unlocked"),
        (Apart(traced=False), "conv1", "'norm1' right after 'conv1.locked', which undoes the scales"),
        (Backward(traced=False), "first", "a call of 'stem' whose output is used unlocked"),
        (Aside(traced=False), "conv1", "a call of 'conv1' whose output is used unlocked"),
        (Skipped(traced=False), "first", "a call of 'conv' whose output is used unlocked"),
        (InPlace(traced=False), "first", "a call of 'conv' whose output is used unlocked"),
        (Twice(), "all", "'norm1' right after 'conv.locked', which undoes the scales"),
        (Twice(traced=False), "all", "a call of 'conv' whose output is used unlocked"),
        (Tied(), "all", "a call of 'conv1.conv' whose output is used unlocked"),
    ],
)
def test_a_network_that_would_be_locked_elsewhere_is_refused_before_any_work(network, blocks, found):
    with pytest.raises(ConfigError, match=f"got {found}.*blocks=NAME"):
        locked_and_checked(network, blocks)


def test_a_lock_of_something_else_or_none_at_all_is_refused():
    defence = build_defence("fedkl:length=8,blocks=conv1")
    lock = defence.on_model(Apart(), SecretStream(0)).norm1
    astray = Apart()
    astray.norm2 = nn.Sequential(nn.ReLU(), lock)
    for network, found in (
        (astray, "'norm2.1' locked, whose input is not the output of a convolution"),
        (Apart(), "none of them"),
    ):
        with pytest.raises(ConfigError, match=found):
            replace(defence, blocks=("other",)).check(network, (1, 12, 12))


@pytest.mark.parametrize("model", ["patches", "frozen"])
def test_a_network_with_a_frozen_trunk_has_nothing_to_lock(model):
    with pytest.raises(ConfigError, match=r"trains no nn\.Conv2d"):
        build_defence("fedkl:length=8").on_model(create_model(model, (3, 32, 32), 3, 0), SecretStream(0))


@pytest.mark.parametrize("model", [name for name in components("models") if name not in (*PLAIN, "patches", "frozen")])
def test_every_convolutional_model_of_the_zoo(model):
    small = {"vgg16": "vgg16:width=4", "densenet121": "densenet121:growth=4", "convnet": "convnet:width=4"}
    spec = small.get(model, f"{model}:width=4" if "resnet" in model else model)
    shape = (3, 32, 32)
    plain = create_model(spec, shape, 3, 0)
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in plain.modules())
    for blocks, count in (("first", 1), ("all", convolutions)):
        defence = build_defence(f"fedkl:length=8,blocks={blocks}")
        network = defence.on_model(plain, SecretStream(0)).eval()
        assert len(key_locks(network)) == count
        assert network(some_images(2, shape)).shape == (2, 3)
        defence.check(network, shape)
        hidden = {name for name in network.state_dict() if defence.private(name)}
        assert hidden == {f"{name}.{part}" for name in key_locks(network) for part in ("key", "weight", "bias")}


def test_blocks_are_chosen_by_name():
    assert [name.split(".")[0] for name in key_locks(locked("fedkl:length=8,blocks=conv1/conv3"))] == ["conv1", "conv3"]


@pytest.mark.parametrize("trained", [True, False])
def test_gradients_by_example_are_autograds(trained):
    network = locked("fedkl:length=8,blocks=all")
    for lock in key_locks(network).values():
        lock.requires_grad_(trained)
    images, labels = some_images(3), torch.tensor([0, 2, 1])
    found = example_gradients(network, images, labels)
    wanted = {name: p for name, p in network.named_parameters() if p.requires_grad}
    for row in range(3):
        loss = nn.functional.cross_entropy(network(images[row : row + 1]), labels[row : row + 1])
        for name, slope in zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True):
            assert torch.allclose(found[name][row], slope, atol=1e-5), name


# --- tensors that leave the device ------------------------------------------------------------------------------------

RUN = TrainSettings(
    model="lenet-dlg", defence="fedkl:length=64", clients=3, rounds=2, partition="iid:images=8", batch_size=8, lr=0.01,
    momentum=0.0, save_rounds=(1, 2),
)  # fmt: skip


def traces(tensors):
    """Return four consecutive numbers of each secret as bytes, as base64 (in its three alignments) and as decimals."""
    for tensor in tensors:
        flat = tensor.flatten()
        for start in range(0, len(flat) - 3, max(1, len(flat) // 64)):
            piece = flat[start : start + 4]
            raw = piece.numpy().tobytes()
            yield raw
            for shift in range(3):
                yield base64.b64encode(b"\0" * shift + raw)[4 : 4 + 16]
            yield f"{piece[0].item()!r}".encode()
            yield f"{piece[0].item():.6f}".encode()


def secrets_of(folder):
    found = {}
    for path in sorted(folder.glob("clients/*/private/state-*.safetensors")):
        found |= {f"{path.parent.parent.name}/{path.name}/{k}": t for k, t in load_tensors(path).items()}
    return found


def test_no_byte_of_key_or_lock_leaves_the_client(tmp_path):
    out = tmp_path / "run"
    train(RUN, out, workers=0)
    secrets = secrets_of(out)
    assert {name.rpartition(".")[2] for name in secrets} == {"key", "weight", "bias"}
    assert len({path.split("/")[0] for path in secrets}) == 3
    files = [path for path in out.rglob("*") if path.is_file() and "private" not in path.parts]
    names = {path.name for path in files}
    assert {"checkpoint.safetensors", "rows.jsonl", "report.html", "model.safetensors", "settings.toml"} <= names
    assert any(path.suffix == ".safetensors" and "round" in str(path) for path in files)
    content = b"\n".join(path.read_bytes() for path in files)
    assert not any(b"key_lock" in path.read_bytes() for path in files)
    leaked = [trace for trace in traces(secrets.values()) if trace in content]
    assert not leaked
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in out.glob("clients/*/private/*"))
    planted = next(t for name, t in secrets.items() if name.endswith(".key"))  # the search must find a planted secret
    for form in (
        planted.numpy().tobytes(),
        base64.b64encode(planted.numpy().tobytes()),
        repr(planted.tolist()).encode(),
    ):
        assert any(trace in form for trace in traces([planted]))


def test_updates_have_the_shared_tensors_alone_and_the_key_never_changes(tmp_path):
    with Simulation(RUN, workers=0, clients_folder=tmp_path) as simulation:
        sent = []
        folders = [PrivateFolder(tmp_path / str(client) / "private") for client in range(3)]
        rounds = simulation.run(on_round=lambda played: sent.extend(played.sent.values()))
        keys = [[folder.load_state(9) for folder in folders] for _ in rounds]
        assert len(sent) == 6
        for update in sent:
            assert set(update.tensors) | set(update.buffers) == set(simulation.model)
            assert not any("key_lock" in name for name in simulation.model)
    name = "model.conv1.locked.key_lock"
    for before, after in zip(*keys, strict=True):
        assert torch.equal(before[f"{name}.key"], after[f"{name}.key"])
        assert not torch.equal(before[f"{name}.weight"], after[f"{name}.weight"])
    assert not torch.equal(keys[0][0][f"{name}.key"], keys[0][1][f"{name}.key"])


def test_the_rows_tell_how_the_model_does_with_own_keys_and_with_a_random_one():
    with Simulation(RUN, workers=0) as simulation:
        rows = list(simulation.run())
        assert all(0 <= row["accuracy_server"] <= 1 for row in rows)
        assert len({row["accuracy_test"] for row in simulation.client_rows(2)}) > 1


# --- attacks that succeed anyway --------------------------------------------------------------------------------------


def seen_by(*grants, defence="fedkl:length=16", targets=2):
    network = create_model("lenet-dlg", (1, 12, 12), 4, 0).eval()
    rng = torch.Generator().manual_seed(3)
    coarse = torch.rand(targets, 1, 4, 4, generator=rng)
    truth = nn.functional.interpolate(coarse, (12, 12), mode="bilinear")
    private = [Batch(truth[t : t + 1], torch.tensor([t % 4]), torch.zeros(1) > 0) for t in range(targets)]
    grants = ("labels", "num-examples", *grants)
    return truth, observe(
        network, private, threat=ThreatModel.of(*grants), num_classes=4, defence=build_defence(defence)
    )


def moves_of(seen):
    secrets = seen.private_state if {"key", "lock", "private-state"} & set(seen.threat.names) else ()
    changes = seen.private_changes if "lock" in seen.threat.names else ()
    arrived = Arrived(seen.mean_gradients, seen.step_lengths, 1, {}, seen.network, secrets, changes)
    return seen.defence.adaptive(arrived)


def true_outputs(seen_all):
    """Compute each client's scales and shifts from all of its private tensors."""
    rows = []
    for own in seen_all.private_state:
        key, weight, bias = (own[f"conv1.locked.key_lock.{part}"] for part in ("key", "weight", "bias"))
        rows.append(weight @ key + bias)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("grants", "exact"),
    [
        (("key", "lock"), True),
        (("lock",), True),
        (("private-state",), True),
        (("key",), False),
    ],
)
def test_what_is_shared_of_key_and_lock_gives_the_scales_away(grants, exact):
    _, everything = seen_by("private-state")
    _, seen = seen_by("defence", *grants)
    moves = moves_of(seen)
    assert list(moves) == (["known", "joint"] if exact else ["joint", "key"])
    found = moves["known" if exact else "key"].outputs["conv1.locked.key_lock"]
    assert torch.allclose(found, true_outputs(everything), atol=1e-4) == exact


def test_a_common_lock_and_the_key_give_the_scales_away():
    spec = "fedkl:length=16,lock=common"
    _, everything = seen_by("private-state", defence=spec)
    _, seen = seen_by("defence", "key", defence=spec)
    assert next(iter(moves_of(seen))) == "known"
    assert torch.allclose(moves_of(seen)["known"].outputs["conv1.locked.key_lock"], true_outputs(everything), atol=1e-5)


def test_key_and_lock_are_granted_apart():
    parts = {"key": {"key"}, "lock": {"weight", "bias"}, "private-state": {"key", "weight", "bias"}}
    for grant, names in parts.items():
        _, seen = seen_by(grant)
        assert {name.rpartition(".")[2] for name in seen.private_state[0]} == names
    _, seen = seen_by("key")
    with pytest.raises(ConfigError, match="asks for lock"):
        _ = seen.private_changes
    assert Knowledge.LOCK not in seen._facts


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 10**6))
def test_the_locks_gradient_divided_by_its_biass_is_the_key(length, numbers, seed):
    rng = torch.Generator().manual_seed(seed)
    key = torch.rand(length, generator=rng, dtype=torch.float64)
    weight, bias = torch.randn(numbers, length, dtype=torch.float64), torch.randn(numbers, dtype=torch.float64)
    weight.requires_grad_(), bias.requires_grad_()
    (weight @ key + bias).sin().sum().backward()
    assert torch.allclose(recovered_key(weight.grad, bias.grad), key)


def psnr(truth, guess):
    return -10 * (truth - guess[:, 0]).square().flatten(1).mean(1).log10()


ATTACK = "gs:iterations=250,sign=none,schedule=cosine,lr=0.3,tv=1e-6"


def test_the_lock_misleads_an_attacker_who_does_not_know_it_and_not_one_who_does():
    found = {}
    for name, grants in {"plain": (), "joint": ("defence",), "known": ("defence", "key", "lock")}.items():
        truth, seen = seen_by(*grants)
        result = build_attack(ATTACK)(seen, torch.Generator().manual_seed(0))
        found[name] = float(psnr(truth, result.images).mean())
    assert found["known"] > found["plain"] + 5, found
    assert found["joint"] > found["plain"] + 5, found


@pytest.mark.parametrize("how", ["batch of two", "local steps", "batch statistics"])
def test_guesses_with_the_true_scales_and_images_explain_the_update(how):
    """At the true images the matching loss is zero, in each way of simulating the client."""
    network = create_model("lenet-dlg", (1, 12, 12), 4, 0).eval()
    images = some_images(4).view(2, 2, 1, 12, 12)
    private = [Batch(own, torch.tensor([1, 3]), torch.zeros(2) > 0) for own in images]
    local = {
        "batch of two": None,
        "local steps": LocalSettings(epochs=2, batch_size=0, batch_norm="freeze"),
        "batch statistics": LocalSettings("fedsgd", batch_size=0, batch_norm="average"),
    }[how]
    threat = ThreatModel.of("labels", "num-examples", "local-steps", "defence", "key", "lock")
    defence = build_defence("fedkl:length=16")
    seen = observe(
        network, private, threat=threat, num_classes=4, defence=defence, protocol=Protocol(local or ONE_GRADIENT, 1e-4)
    )
    outputs = moves_of(seen)["known"].outputs
    replay = replay_of(seen, "unroll", torch.Generator().manual_seed(0))
    wanted = seen.mean_gradients
    labels = torch.tensor([1, 3, 1, 3])
    right = replay(images.flatten(0, 1), labels, wanted, outputs)
    wrong = replay(images.flatten(0, 1), labels, wanted)
    for name, aim in wanted.items():
        assert (right[name] - aim).norm() <= 0.02 * aim.norm() + 1e-6, name
    assert sum((wrong[name] - aim).norm() > 0.2 * aim.norm() for name, aim in wanted.items()) >= 2


def test_a_saved_round_can_be_attacked_with_the_lock_searched(tmp_path):
    out = tmp_path / "run"
    saved = {**vars(RUN), "rounds": 1, "save_rounds": (1,), "algorithm": "fedsgd", "batch_size": 1, "normalise": "none"}
    train(TrainSettings(**saved), out, workers=0)
    folder = out / "rounds" / "000001"
    spec = UpdateSpec(
        "lenet-dlg", (1, 28, 28), 10, "change", lr=0.01, num_examples=1, labels=(3,), defence=RUN.defence,
        algorithm="fedsgd", batch_size=1, batch_norm="freeze",
    )  # fmt: skip
    update = sorted(path for path in folder.iterdir() if "model" not in path.name)[0]
    (row,) = attack_files(folder / "model.safetensors", [update], spec, "gs:iterations=2", tmp_path / "attack")
    assert row["adaptive"]
    other = replace(spec, defence="fedkl:blocks=conv2")
    with pytest.raises(ConfigError, match=r"must have the names and shapes of the network.*conv1"):
        attack_files(folder / "model.safetensors", [update], other, "gs:iterations=2", tmp_path / "other")
    with pytest.raises(ConfigError, match=r'under defence .fedkl:length=64.: put `defence = "fedkl:length=64"` into'):
        attack_files(
            folder / "model.safetensors", [update], replace(spec, defence=""), "gs:iterations=2", tmp_path / "x"
        )


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("blocks=", "blocks must be first, all or names"),
        ("blocks=first/conv2", "blocks must be first, all or names"),
        ("length=0", "length must be at least 1"),
        ("activation=tanh", "Unknown activation 'tanh'"),
        ("norm=layer", "Unknown norm 'layer'"),
        ("init=zero", "Unknown init 'zero'"),
        ("grid=0", "grid must be at least 1"),
        ("lock=none", "Unknown lock 'none'"),
        ("source=dice", "Unknown source 'dice'"),
        ("scale=own", "Unknown scale 'own'"),
    ],
)
def test_bad_settings(setting, message):
    with pytest.raises(ConfigError, match=message):
        build_defence(f"fedkl:{setting}")


def test_a_network_without_convolutions_is_refused():
    with pytest.raises(ConfigError, match=r"trains no nn\.Conv2d.*gradveil list models"):
        locked(model="mlp")


def test_a_block_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"got 'conv9'\. Known: conv1, conv2, conv3"):
        locked("fedkl:blocks=conv1/conv9")


def test_a_network_is_locked_once():
    with pytest.raises(ConfigError, match="once in a chain"):
        locked("fedkl+fedkl")


@pytest.fixture
def begun(tmp_path):
    """Train for one round in a folder of its own."""
    out = tmp_path / "run"
    train(TrainSettings(**{**vars(RUN), "rounds": 1, "save_rounds": ()}), out, workers=0)
    return out


def go_on(out):
    train(TrainSettings(**{**vars(RUN), "save_rounds": ()}), out, resume=True, workers=0)


def test_a_lost_key_stops_the_client_until_it_is_told_to_begin_anew(begun):
    client = begun / "clients" / "1"
    (before,) = (load_tensors(path) for path in (client / "private").glob("state-*"))
    shutil.rmtree(client)  # with everything that shows that there was a key
    with pytest.raises(RunFolderError, match=r"it is lost.*make the empty file .*begin-anew"):
        go_on(begun)
    client.mkdir()
    (client / "begin-anew").touch()
    go_on(begun)
    after = load_tensors(client / "private" / "state-000002.safetensors")
    (key,) = (name for name in after if name.endswith(".key"))
    assert not torch.equal(after[key], before[key])  # the seed of the run would give the old key again
    assert not (client / "begin-anew").exists()


def test_a_lock_that_is_older_than_the_last_round_is_not_gone_on_from(begun):
    go_on(begun)
    (begun / "clients" / "1" / "private" / "state-000002.safetensors").unlink()
    settings = TrainSettings(**{**vars(RUN), "save_rounds": (), "rounds": 3})
    with pytest.raises(RunFolderError, match="after round 2, got none: it is lost"):
        train(settings, begun, resume=True, workers=0)


def test_a_key_that_others_can_read_is_refused(begun):
    (path,) = (begun / "clients" / "2" / "private").glob("state-*")
    path.chmod(0o644)
    with pytest.raises(RunFolderError, match=r"must have mode 0600, got 0644.*chmod 600"):
        go_on(begun)
    path.chmod(0o600)
    go_on(begun)


@pytest.mark.parametrize("other", ["fedkl:length=32", "fedkl:length=64,blocks=all"])
def test_a_key_of_another_length_or_for_other_blocks_is_refused(begun, tmp_path, other):
    settings = TrainSettings(**{**vars(RUN), "save_rounds": (), "defence": other})
    with (
        Simulation(settings, workers=0, clients_folder=begun / "clients") as simulation,
        pytest.raises(RunFolderError, match=r"client \d in .*private tensors must have .*key_lock.*the same settings"),
    ):
        simulation.step(2)


def test_a_global_model_with_other_locked_blocks_is_refused():
    mine = Simulation(RUN, workers=0)
    theirs = Simulation(TrainSettings(**{**vars(RUN), "defence": "fedkl:length=64,blocks=all"}), workers=0)
    with mine, theirs, pytest.raises(ConfigError, match=r"A received model must have conv2\.weight.*got none"):
        mine.net.shared_vector(theirs.model)


@pytest.mark.parametrize("grants", [("defence",), ("defence", "lock")])
def test_a_traced_search_takes_the_same_steps(grants, monkeypatch):
    """Compiling traces a step only once, so secret outputs, searched or known, must be inputs of the trace."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(function, examples):
        with torch.enable_grad():
            graph = make_fx(function)(*examples)
        return torch.no_grad()(lambda *given: tuple(graph(*given)))

    monkeypatch.setattr("gradveil.attacks.parts.search_step.compiled", traced)
    found = []
    for compiled in ("off", "on"):
        _, seen = seen_by(*grants)
        attack = build_attack(f"gs:iterations=6,sign=none,schedule=cosine,lr=0.3,compile={compiled}")
        found.append(attack(seen, torch.Generator().manual_seed(0)).images)
    assert torch.allclose(*found, atol=1e-5)


def test_a_chain_searches_the_scales_and_allows_for_noise():
    defence = build_defence("fedkl:length=8+gaussian:std=0.01")
    network = defence.on_model(create_model("lenet-dlg", (1, 12, 12), 3, 0), SecretStream(0))
    seen = {name: torch.ones(2, *p.shape) for name, p in network.named_parameters() if not defence.private(name)}
    move = defence.adaptive(Arrived(seen, [1.0], network=network))["all"]
    assert set(move.unknowns) == {"conv1.locked.key_lock"}
    assert set(move.noise) == set(seen)
