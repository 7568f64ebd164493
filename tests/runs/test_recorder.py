"""Any torch loop becomes files that explain themselves; what can't be explained is said, and nothing is lost."""

import tomllib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import gradveil
from gradveil.attacks.parts.local_training import replay_of
from gradveil.errors import ConfigError, TrainingError, UnexplainedError
from gradveil.federated.protocol import LocalSettings
from gradveil.models import create_model
from gradveil.runs.explained import RecordedBatch, rhythm
from gradveil.runs.update_spec import make_spec
from gradveil.threat import Known
from gradveil.threat.received import received


def net():
    layers = nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.25), nn.Linear(36, 3)
    return nn.Sequential(*layers)


def data(count=8, low=0.0, high=1.0):
    rng = torch.Generator().manual_seed(1)
    images = torch.rand(count, 1, 8, 8, generator=rng)
    images[0, 0, 0, 0], images[0, 0, 0, 1] = 0.0, 1.0
    return low + (high - low) * images, torch.randint(0, 3, (count,), generator=rng)


SGD = {"lr": 0.1}
LOOPS = {
    "plain": (lambda p: torch.optim.SGD(p, **SGD), {}, {"lr": 0.1, "momentum": 0.0, "epochs": 1, "batch_size": 4}),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), {"epochs": 2},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "epochs": 2, "num_examples": 8},
    ),
    "adam": (
        lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.8, 0.99)), {"epochs": 2},
        {"optimiser": "adam", "lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-8},
    ),
    "adamw": (
        lambda p: torch.optim.AdamW(p, lr=1e-3), {}, {"optimiser": "adamw", "weight_decay": 0.01}
    ),
    "accumulated": (
        lambda p: torch.optim.SGD(p, **SGD), {"size": 2, "accumulate": 2},
        {"accumulate": 2, "batch_size": 2, "epochs": 1, "lr": 0.1},
    ),
    "clipped": (lambda p: torch.optim.SGD(p, **SGD), {"clip": 0.05}, {"clip_norm": pytest.approx(0.05, rel=1e-3)}),
    "smoothed": (lambda p: torch.optim.SGD(p, **SGD), {"smoothing": 0.2}, {"label_smoothing": 0.2}),
    "summed": (lambda p: torch.optim.SGD(p, **SGD), {"reduction": "sum"}, {"reduction": "sum", "lr": 0.1}),
    "scaled": (
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3), {"factor": 3.0},
        {"lr": pytest.approx(0.3), "weight_decay": pytest.approx(0.1)},
    ),
    "evaluating": (lambda p: torch.optim.SGD(p, **SGD), {"train": False}, {"batch_norm": "freeze", "dropout": "off"}),
    "one batch": (lambda p: torch.optim.SGD(p, **SGD), {"size": 8}, {"epochs": 1, "batch_size": 0, "num_examples": 8}),
}  # fmt: skip


USUAL = {"size": 4, "epochs": 1, "accumulate": 1, "clip": 0.0, "smoothing": 0.0, "reduction": "mean", "factor": 1.0}
USUAL |= {"train": True, "penalty": 0.0}


def loop(model, optimiser, images, labels, **options):
    size, epochs, accumulate, clip, smoothing, reduction, factor, train, penalty = (USUAL | options).values()
    model.train(train)
    for _ in range(epochs):
        order = torch.randperm(len(images)).split(size)
        for number, some in enumerate(order, 1):
            loss = functional.cross_entropy(
                model(images[some]), labels[some], label_smoothing=smoothing, reduction=reduction
            )
            total = factor * loss / accumulate + penalty * sum(p.square().sum() for p in model.parameters())
            total.backward()
            if number % accumulate == 0:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimiser.step()
                optimiser.zero_grad()


def recorded(folder, name="plain", images=None, **changes):
    make, options, _ = LOOPS[name]
    torch.manual_seed(0)
    model = net()
    optimiser = make(model.parameters())
    pictures, labels = images or data()
    with gradveil.Recorder(model, optimiser, folder / "run", factory=net, images=True) as recorder:
        loop(model, optimiser, pictures, labels, **options | changes)
    return recorder


@pytest.mark.parametrize("name", LOOPS)
def test_the_specification_says_how_the_loop_trained(tmp_path, name):
    recorder = recorded(tmp_path, name)
    spec = tomllib.loads(recorder.spec.read_text())
    assert spec == recorder.files["spec"]
    wanted = {"shape": [1, 8, 8], "num_classes": 3, "kind": "change", "num_examples": 8, "normalise": "none"}
    wanted |= {"batch_norm": "average", "dropout": "on"} | LOOPS[name][2]
    assert {key: spec[key] for key in wanted} == wanted
    assert sorted(spec["labels"]) == sorted(data()[1].tolist())
    truth = torch.from_numpy(np.load(recorder.out / "truth.npz")["images"])[0]
    assert sorted(truth.flatten(1).sum(1).tolist()) == pytest.approx(sorted(data()[0].flatten(1).sum(1).tolist()))


@pytest.mark.parametrize("name", [name for name in LOOPS if name != "adamw"])
def test_the_recorded_specification_replays_the_update(tmp_path, name):
    """The true images, in the recorded order and without Dropout, cause the recorded update."""
    make, options, _ = LOOPS[name]
    torch.manual_seed(0)
    model = net()
    model[4].p = 0.0
    optimiser = make(model.parameters())
    with gradveil.Recorder(model, optimiser, tmp_path / "run", factory=net, images=True) as recorder:
        loop(model, optimiser, *data(), **options | {"epochs": 1})
    spec = make_spec(recorder.files["spec"], "test")
    how = spec.local_steps()
    before = net()
    before.load_state_dict(load_file(recorder.model_file))
    seen = received(
        before.double(), load_file(recorder.update), shape=(1, 8, 8), num_classes=3, lr=spec.lr, num_examples=8,
        known=Known(local_steps=how),
    )  # fmt: skip
    replay = replay_of(seen, "unroll", torch.Generator())
    steps = torch.split(torch.arange(8), (how.batch_size or 8) * how.accumulate)
    images = torch.from_numpy(np.load(recorder.out / "truth.npz")["images"])[0].double()
    found = type(replay)(replay.network, 8, "unroll", replay.how, replay.lr, tuple(steps))(
        images, torch.tensor(spec.labels), {}
    )
    for key, wanted in seen.mean_gradients.items():
        if how.is_adam and key == "0.bias":  # BatchNorm cancels it: its gradient is rounding, which Adam enlarges
            continue
        loose = 2e-2 if how.is_adam else 1e-3
        torch.testing.assert_close(found[key], wanted, rtol=loose, atol=loose * float(wanted.abs().max()) + 1e-7)


def test_a_normalised_input_is_recognised_by_its_range(tmp_path):
    recorder = recorded(tmp_path, images=data(low=-1.0, high=1.0))
    mean, std = map(float, recorder.files["spec"]["normalise"].split("/"))
    assert (mean, std) == (pytest.approx(0.5), pytest.approx(0.5))
    assert "inferred" in recorder.spec.read_text()
    truth = np.load(recorder.out / "truth.npz")["images"]
    assert 0 <= truth.min() < truth.max() <= 1


def test_what_is_recorded_can_be_attacked(tmp_path):
    torch.manual_seed(0)
    model = create_model("lenet-dlg:activation=sigmoid,init=uniform", (1, 8, 8), 3, seed=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = data(1)
    name = "lenet-dlg:activation=sigmoid,init=uniform"
    with gradveil.Recorder(model, optimiser, tmp_path / "run", factory=name, images=True) as recorder:
        loop(model, optimiser, images, labels)
    result = gradveil.attack(**recorder.files, attack="idlg:iterations=60,restarts=2", out=tmp_path / "attacked")
    assert result.rows[0]["psnr"] > 30


def test_several_epochs_of_returning_images_are_told_from_one_epoch():
    def batch(*keys):
        blank = torch.zeros(len(keys), 1, 1, 1)
        return [RecordedBatch(blank, blank.flatten().long(), 2, 0.0, 1.0, {}, None, tuple(map(bytes, keys)))]

    two = [batch(1, 2), batch(3, 4), batch(4, 1), batch(2, 3)]
    assert rhythm(two) == {"epochs": 2, "batch_size": 2, "num_examples": 4}
    assert rhythm(two[:2]) == {"epochs": 1, "batch_size": 2, "num_examples": 4}
    three = [batch(1, 2), batch(3, 4), batch(5, 6)]
    assert rhythm(three * 2) == {"epochs": 2, "batch_size": 2, "num_examples": 6}
    assert rhythm(three[:1] * 4) == {"epochs": 4, "batch_size": 2, "num_examples": 2}
    odd = [batch(1, 2), batch(3), batch(5, 6), batch(7)]
    assert rhythm(odd) == {"epochs": 2, "batch_size": 2, "num_examples": 3}
    with pytest.raises(UnexplainedError, match="equally many images"):
        rhythm([batch(1), batch(2, 3), batch(4)])


def test_a_model_that_is_never_stepped_is_an_error(tmp_path):
    model = net()
    with (
        pytest.raises(UnexplainedError, match="step at least once"),
        gradveil.Recorder(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run"),
    ):
        model(data()[0])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), "got torch.optim.RMSprop, whose steps attacks can't replay"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "torch.optim.Adam with amsgrad"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1), "with dampening"),
        (lambda p: torch.optim.SGD([{"params": list(p)[:2]}, {"params": []}], 0.1), "one group of parameters, got 2"),
        (lambda p: torch.optim.SGD(list(p)[:2], 0.1), "all parameters of the model"),
    ],
)
def test_an_optimiser_that_cannot_be_replayed_is_refused_before_the_training(tmp_path, make, message):
    model = net()
    with (
        pytest.raises(UnexplainedError, match=message),
        gradveil.Recorder(model, make(model.parameters()), tmp_path / "run"),
    ):
        pytest.fail("the block must not run")


def test_a_step_that_is_not_torchs_is_found(tmp_path):
    class SGD(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(1.5)

    model = net()
    optimiser = SGD(model.parameters(), 0.1)
    with (
        pytest.raises(UnexplainedError, match=r"must be that of torch\.optim"),
        gradveil.Recorder(model, optimiser, tmp_path / "run", factory=net),
    ):
        loop(model, optimiser, *data())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"penalty": 1.0}, "must be that of the cross-entropy"), ({"size": 3}, None)],
)
def test_other_losses_are_found_and_uneven_batches_are_not(tmp_path, options, message):
    if message is None:
        assert recorded(tmp_path, **options).files["spec"]["batch_size"] == 3
        return
    with pytest.raises(UnexplainedError, match=message):
        recorded(tmp_path, **options)


def test_a_used_optimiser_is_refused(tmp_path):
    model = net()
    optimiser = torch.optim.Adam(model.parameters())
    loop(model, optimiser, *data())
    with pytest.raises(UnexplainedError, match="must be fresh"):
        gradveil.Recorder(model, optimiser, tmp_path / "run").__enter__()


def test_what_a_specification_cannot_say_is_told_and_the_files_are_kept(tmp_path):
    model = net()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1, 0.5)
    images, labels = data()

    def falling():
        for _ in range(2):
            loop(model, optimiser, images, labels, size=8)
            schedule.step()

    with (
        pytest.raises(TrainingError, match=r"scheduler.*are saved in"),
        gradveil.Recorder(model, optimiser, tmp_path / "run", factory=net),
    ):
        falling()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"model.safetensors", "update.safetensors"}


def test_a_model_that_the_factory_does_not_build_is_told_and_the_files_are_kept(tmp_path):
    model = net()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises(TrainingError, match="factory="),
        gradveil.Recorder(model, optimiser, tmp_path / "run", factory="lenet5"),
    ):
        loop(model, optimiser, *data())
    assert (tmp_path / "run" / "update.safetensors").exists()


def test_an_error_of_the_loop_is_the_users_own(tmp_path):
    model = net()
    with (
        pytest.raises(ZeroDivisionError),
        gradveil.Recorder(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run"),
    ):
        _ = 1 / 0
    assert not model._forward_pre_hooks


def test_a_used_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    model = net()
    with pytest.raises(ConfigError, match="must be new or empty"):
        gradveil.Recorder(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path).__enter__()


def test_losses_by_module_and_by_log_probabilities_are_recognised(tmp_path):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.LogSoftmax(1))
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    images, labels = data()
    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.LogSoftmax(1))  # noqa: E731
    with gradveil.Recorder(model, optimiser, tmp_path / "run", factory=build, labels=False) as recorder:
        nn.NLLLoss()(model(images), labels).backward()
        optimiser.step()
    assert "labels" not in recorder.files["spec"]
    assert LocalSettings().reduction == "mean"
    assert "reduction" not in recorder.files["spec"]


def frozen():
    model = net()
    model[0].requires_grad_(False)
    return model


def test_a_model_with_frozen_layers_is_recorded_if_the_factory_freezes_them(tmp_path):
    def run(name, factory):
        model = frozen()
        optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        with gradveil.Recorder(model, optimiser, tmp_path / name, factory=factory) as recorder:
            loop(model, optimiser, *data())
        return recorder

    assert run("run", frozen).files["spec"]["batch_size"] == 4
    with pytest.raises(TrainingError, match=r"0\.weight is trained there and frozen here"):
        run("other", net)
    assert (tmp_path / "other" / "update.safetensors").exists()


def test_a_block_that_failed_leaves_nothing_for_the_next(tmp_path):
    model = net()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    recorder = gradveil.Recorder(model, optimiser, tmp_path / "run", factory=net)

    def failing():
        loop(model, optimiser, *data())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), recorder:
        failing()
    with recorder:
        loop(model, optimiser, *data(), size=8)
    assert recorder.files["spec"]["batch_size"] == 0
    assert recorder.files["spec"]["num_examples"] == 8


def kept(folder, train, factory=net):
    """Return the error of a recorded loop, and the files that it left."""
    torch.manual_seed(0)
    model = factory()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises(UnexplainedError) as caught,
        gradveil.Recorder(model, optimiser, folder / "run", factory=factory),
    ):
        train(model, optimiser, *data())
    return str(caught.value), {path.name for path in (folder / "run").glob("*")}


def halved(model, optimiser, images, labels):
    loop(model, optimiser, images, labels)
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def never_zeroed(model, optimiser, images, labels):
    for some in torch.arange(8).split(4):
        functional.cross_entropy(model(images[some]), labels[some]).backward()
        optimiser.step()


def later_by_value(model, optimiser, images, labels):
    for number, some in enumerate(torch.arange(8).split(4)):
        optimiser.zero_grad()
        functional.cross_entropy(model(images[some]), labels[some]).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3 if number else 1e3)
        optimiser.step()


def by_closure(model, optimiser, images, labels):
    optimiser.step(lambda: functional.cross_entropy(model(images), labels))


def rounded(model, optimiser, images, labels):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    optimiser.step()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (halved, "Only the optimiser's steps must change the weights"),
        (never_zeroed, "Gradients must begin at zero"),
        (later_by_value, "clipping by value"),
    ],
)
def test_what_goes_wrong_after_the_first_step_is_told_when_the_files_are_saved(tmp_path, train, message):
    said, files = kept(tmp_path, train)
    assert message in said
    assert "are saved in" in said
    assert files == {"model.safetensors", "update.safetensors"}


def test_a_closure_is_told_before_the_first_step(tmp_path):
    said, files = kept(tmp_path, by_closure)
    assert "got a closure" in said
    assert not files


def test_mixed_precision_is_named_if_its_gradients_differ_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr("gradveil.runs.recorded.CLOSE", 1e-5)
    said, files = kept(tmp_path, rounded)
    assert "torch.autocast" in said
    assert not files


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_a_scaled_loss_of_mixed_precision_is_unscaled(tmp_path, clip):
    torch.manual_seed(0)
    model = net()
    optimiser, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    images, labels = data()
    with gradveil.Recorder(model, optimiser, tmp_path / "run", factory=net) as recorder:
        for some in torch.arange(8).split(4):
            optimiser.zero_grad()
            scaler.scale(functional.cross_entropy(model(images[some]), labels[some])).backward()
            if clip:
                scaler.unscale_(optimiser)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimiser)
            scaler.update()
    spec = recorder.files["spec"]
    assert (spec["lr"], spec["clip_norm"]) == (0.1, pytest.approx(clip, rel=1e-3))


def test_batches_whose_gradients_are_thrown_away_do_not_count(tmp_path):
    torch.manual_seed(0)
    model = net()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    images, labels = data()
    with gradveil.Recorder(model, optimiser, tmp_path / "run", factory=net) as recorder:
        functional.cross_entropy(model(images[:3]), labels[:3]).backward()
        optimiser.zero_grad()
        pair = [functional.cross_entropy(model(images[some]), labels[some]) for some in torch.arange(8).split(4)]
        (sum(pair) / 2).backward()
        optimiser.step()
    spec = recorder.files["spec"]
    assert (spec["num_examples"], spec["batch_size"], spec["accumulate"]) == (8, 4, 2)
