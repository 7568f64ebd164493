from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gradveil.attacks import build_attack
from gradveil.defences import Arrived, Client, build_defence
from gradveil.defences.loda import Loda
from gradveil.engines.simulation import Simulation
from gradveil.errors import ConfigError, DefenceError, UnknownNameError
from gradveil.models import Normalisation, create_model
from gradveil.secret_stream import SecretStream
from gradveil.storage import PrivateFolder
from gradveil.types import Batch
from tests.defences.mixing import pictures

SHAPE = (3, 8, 8)


def make_client(data=None, aux=True, folder=None, seed=0):
    model = create_model("resnet20:width=4", SHAPE, 5, 0).eval()
    public = pictures(7, seed=9, shape=SHAPE) if aux is True else aux
    data = pictures(5, shape=SHAPE) if data is None else data
    return Client(0, 1, model, {}, data, {}, {}, SecretStream(seed), public, folder)


def objective(defence, client, images, found):
    features = defence.features(client.model, SHAPE)
    far = (found - images).square().flatten(1).mean(1)
    return features.distance(found, features(images), mean=True) - defence.c * far


@pytest.mark.parametrize("mean", [True, False])
def test_one_step_is_the_papers_by_a_plain_loop(mean):
    client, defence = make_client(), Loda(steps=3, c=0.5, lr=0.2, mean_squares=mean)
    data = client.data
    out = defence.on_data(data, client)
    starts = client.aux.images[SecretStream(0).integers(0, 7, (5,))]
    features = defence.features(client.model, SHAPE)
    for number in range(5):
        x = starts[number : number + 1].clone()
        truth = data.images[number : number + 1]
        for _ in range(3):
            x.requires_grad_()
            square = torch.Tensor.mean if mean else torch.Tensor.sum
            feature = sum(square((a - b) ** 2) for a, b in zip(features(x), features(truth), strict=True))
            slope = torch.autograd.grad(feature - 0.5 * square((x - truth) ** 2), x)[0]
            x = (x.detach() - 0.2 * slope / slope.norm()).clamp(0, 1)
        assert torch.allclose(out.images[number], x[0], atol=1e-5)
    assert torch.equal(out.labels, data.labels)
    assert torch.equal(out.sensitive, data.sensitive)


def test_the_objective_falls_and_the_weight_trades_features_for_distance():
    client = make_client()
    images = client.data.images
    found = {}
    for c in (0.0, 50.0):
        defence = Loda(steps=60, c=c)
        features = defence.features(client.model, SHAPE)
        begun = client.aux.images[:5]
        out = defence.obscured(features, images, begun)
        assert (objective(defence, client, images, out) < objective(defence, client, images, begun)).all()
        found[c] = features.distance(out, features(images)).mean(), (out - images).square().mean()
        assert out.min() >= 0
        assert out.max() <= 1
    assert found[50.0][0] > found[0.0][0]
    assert found[50.0][1] > 2 * found[0.0][1]


def test_batches_do_not_mix_images():
    together, alone = (Loda(steps=4, together=size).on_data(make_client().data, make_client()) for size in (5, 1))
    assert torch.allclose(together.images, alone.images, atol=1e-5)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch):
    folder = PrivateFolder(tmp_path / "private")
    whole = Loda(steps=4, together=2).on_data(make_client().data, make_client())
    calls = []
    honest = Loda.obscured

    def failing(self, features, images, begun):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(len(images))
        return honest(self, features, images, begun)

    monkeypatch.setattr(Loda, "obscured", failing)
    with pytest.raises(KeyboardInterrupt):
        Loda(steps=4, together=2).on_data(make_client().data, make_client(folder=folder))
    assert len(list(folder.path.glob("loda-*"))) == 1
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.path.glob("loda-*"))
    done = []

    def counting(self, features, images, begun):
        done.append(len(images))
        return honest(self, features, images, begun)

    monkeypatch.setattr(Loda, "obscured", counting)
    resumed = Loda(steps=4, together=2).on_data(make_client().data, make_client(folder=folder))
    assert done == [2, 1]
    assert torch.equal(resumed.images, whole.images)


@pytest.mark.parametrize("change", ["settings", "images", "weights", "normalisation", "activation"])
def test_what_was_kept_is_not_taken_for_something_else(tmp_path, change):
    folder = PrivateFolder(tmp_path / "private")
    Loda(steps=2).on_data(make_client().data, make_client(folder=folder))
    client, defence = make_client(folder=folder), Loda(steps=2)
    if change == "settings":
        defence = Loda(steps=2, c=1.0)
    elif change == "images":
        client = replace(client, data=pictures(5, seed=4, shape=SHAPE))
    elif change == "weights":
        client.model.conv1.weight.data *= 2
    else:
        spec = "resnet20:width=4" + ",activation=sigmoid" * (change == "activation")
        normalisation = Normalisation((0.5,) * 3, (0.2,) * 3) if change == "normalisation" else None
        client = replace(client, model=create_model(spec, SHAPE, 5, 0, normalisation).eval())
    kept = list(folder.path.glob("loda-*"))
    out = defence.on_data(client.data, client)
    fresh = defence.on_data(client.data, replace(client, folder=None, rng=SecretStream(0)))
    assert torch.equal(out.images, fresh.images)
    assert not kept[0].exists()


def test_weights_and_normalisation_of_an_extractor_of_its_own(tmp_path):
    trained = create_model("resnet20:width=2", SHAPE, 3, seed=5)
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    spec = f"loda:extractor=resnet20:width=2;shortcut=A,weights={tmp_path}/w.safetensors,classes=3"
    defence = build_defence(f"{spec},mean=0.5/0.5/0.5,std=0.2/0.2/0.2,layers=conv1/linear")
    features = defence.features(make_client().model, SHAPE)
    images = torch.rand(2, *SHAPE)
    trained.eval()
    assert torch.allclose(features(images)[1], trained((images - 0.5) / 0.2), atol=1e-5)
    assert build_defence(defence.spec) == defence
    normalised = create_model("resnet20:width=4", SHAPE, 5, 0, Normalisation((0.5,) * 3, (0.2,) * 3))
    same = replace(defence, mean=(), std=()).features(normalised, SHAPE)
    assert torch.allclose(same(images)[1], features(images)[1], atol=1e-5)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ("extractor=resnet20", "needs weights"), ("weights=x", "with an extractor"), ("mean=0.5", "mean and std"),
        ("c=-1", "c must"), ("steps=0", "steps"), ("lr=0", "lr"), ("layers=first-x", "layers"), ("together=0", "tog"),
        ("layers=last-0", "layers"),
        ("extractor=resnet20,weights=nowhere.safetensors", "exists"), ("start=grey", "start"), ("std=0,mean=0", "std"),
    ],
)  # fmt: skip
def test_bad_settings(bad, what):
    with pytest.raises(ConfigError, match=what):
        build_defence(f"loda:{bad}")


def test_layers_that_do_not_exist():
    client = make_client()
    with pytest.raises(UnknownNameError, match="layer of the feature extractor 'conv7'"):
        Loda(layers="conv7", steps=1).on_data(client.data, client)
    with pytest.raises(UnknownNameError, match="'conv7'"):
        Loda(layers="conv7").check(client.model, SHAPE)
    Loda().check(client.model, SHAPE)


def test_public_images_must_be_there_and_fit():
    for aux in (None, pictures(3, shape=(3, 9, 9)), pictures(3, shape=(1, 8, 8))):
        client = make_client(aux=aux)
        with pytest.raises(DefenceError, match="starts from public images of shape"):
            Loda(steps=1).on_data(client.data, client)
    client = make_client(aux=None)
    assert Loda(steps=1, start="noise").on_data(client.data, client).images.shape == client.data.images.shape


def test_pixels_out_of_range_are_refused():
    data = pictures(2, shape=SHAPE)
    far = Batch(data.images * 255, data.labels, data.sensitive)
    with pytest.raises(DefenceError, match=r"pixels in \[0, 1\], got"):
        Loda(steps=1).on_data(far, make_client(far))
    with pytest.raises(DefenceError, match="got nan"):
        Loda(steps=1).on_data(Batch(data.images * torch.nan, data.labels, data.sensitive), make_client())


def test_the_countermoves_name_decoders():
    moves = Loda().adaptive(Arrived({}, [1.0]))
    stages = {name: [build_attack(spec) for spec in move.decode] for name, move in moves.items()}
    assert {name: [stage.way for stage in each] for name, each in stages.items()} == {
        "learned": ["learned"], "stationarity": ["stationarity"], "features": ["features"],
    }  # fmt: skip


def test_a_training_obscures_each_client_once_from_public_images_of_any_classes(tmp_path, tiny, monkeypatch):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (60, 1, 28, 28), dtype=np.uint8), np.arange(60) % 30
    np.savez(tmp_path / "public.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    made = []
    honest = Loda.obscured

    def counting(self, features, images, begun):
        made.append(len(images))
        return honest(self, features, images, begun)

    monkeypatch.setattr(Loda, "obscured", counting)
    settings = replace(
        tiny, model="lenet-dlg", defence="loda:steps=2,together=15", aux=f"{tmp_path}/public.npz", clients=2
    )
    with Simulation(settings, clients_folder=tmp_path / "clients", workers=0) as simulation:
        rows = list(simulation.run())
    assert made == [15, 5, 15, 5]
    assert all(row["loss"] > 0 for row in rows)
    assert len(list((tmp_path / "clients").glob("*/private/loda-*"))) == 4
