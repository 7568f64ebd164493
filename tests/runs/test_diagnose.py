"""Updates that were made otherwise than stated: `gradveil diagnose` names what is wrong."""

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from gradveil.data import load_dataset
from gradveil.own import adopt
from gradveil.runs.diagnose import diagnose
from gradveil.runs.evidence import Case, balances, one_image, softmax_residual
from gradveil.runs.update_spec import UpdateSpec


def conv():
    layers = nn.Conv2d(1, 8, 5, 2, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 5, 2, 2), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(588, 10))


def plain():
    layers = nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 12, 5, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(588, 10)
    return nn.Sequential(*layers)


def dense():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


MODELS = {"conv": conv, "plain": plain, "dense": dense}
USUAL = {"model": "plain", "count": 1, "lr": 0.1, "epochs": 1, "size": 0, "optimiser": torch.optim.SGD, "train": False}
USUAL |= {"options": {}, "smoothing": 0.0, "reduction": "mean", "normalise": None, "accumulate": 1, "after": None}
USUAL |= {"other": False, "clip": 0.0, "mode": lambda net: None}


def digits(count):
    split = load_dataset("mnist-5k").train
    images, labels = split.images[40 : 40 + count], split.labels[40 : 40 + count]
    return torch.from_numpy(images.copy()).float() / 255, torch.from_numpy(labels.copy())


def trained(**changes):
    """Train a network on digits as the changes say; return the network before, and the change of its tensors."""
    how = USUAL | changes
    torch.manual_seed(0)
    network = MODELS[how["model"]]()
    before = deepcopy(network)
    if how["other"]:
        before = MODELS[how["model"]]()
    images, labels = digits(how["count"])
    if how["normalise"]:
        images = (images - how["normalise"][0]) / how["normalise"][1]
    start = deepcopy(network.state_dict())
    network.train(how["train"])
    how["mode"](network)
    optimiser = how["optimiser"](network.parameters(), lr=how["lr"], **how["options"])
    for _ in range(how["epochs"]):
        batches = list(torch.arange(how["count"]).split(how["size"] or how["count"]))
        for number, some in enumerate(batches, 1):
            loss = functional.cross_entropy(
                network(images[some]), labels[some], label_smoothing=how["smoothing"], reduction=how["reduction"]
            )
            (loss / how["accumulate"]).backward()
            if number % how["accumulate"] == 0:
                if how["clip"]:
                    nn.utils.clip_grad_norm_(network.parameters(), how["clip"])
                optimiser.step()
                optimiser.zero_grad()
    state = network.state_dict()
    change = {name: state[name] - old for name, old in start.items() if old.is_floating_point()}
    return before, change if how["after"] is None else how["after"](change, state)


def spec(**changes):
    stated = {"shape": (1, 28, 28), "num_classes": 10, "kind": "change", "lr": 0.1, "num_examples": 1} | changes
    name = stated.pop("model", "plain")
    labels = tuple(digits(stated["num_examples"] or 1)[1].tolist())
    return UpdateSpec(adopt(f"diagnosed-{name}", MODELS[name]), **{"labels": labels} | stated)


def noise(std):
    def add(change, state):
        rng = torch.Generator().manual_seed(1)
        return {name: t + std * torch.randn(t.shape, generator=rng) for name, t in change.items()}

    return add


def keep_largest(share):
    def prune(change, state):
        return {
            name: torch.where(t.abs() >= t.abs().flatten().quantile(1 - share), t, torch.zeros_like(t))
            for name, t in change.items()
        }

    return prune


def rounded(change, state):
    return {name: (t / t.abs().max() * 127).round() * t.abs().max() / 127 for name, t in change.items()}


def frozen(network):
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()


def halved(change, state):
    return {name: t.half().float() for name, t in change.items()}


def without_a_bias(change, state):
    return {name: t for name, t in change.items() if name != "0.bias"}


FOUR = {"count": 4, "size": 1}
STEPS = {"num_examples": 4, "epochs": 1, "batch_size": 1}
ONE = {"epochs": 1, "batch_size": 0}
TRAINED = {"model": "conv", "train": True, "count": 4}
FROZEN = {"model": "conv", "train": True, "mode": frozen}
MODES = {"batch_norm": "freeze", "dropout": "on", **ONE}
SUMMED = {"count": 8, "reduction": "sum", "lr": 0.01}
BROKEN = {
    "BatchNorm trained, stated frozen": ("BatchNorm mode", TRAINED, {"num_examples": 4} | MODES),
    "BatchNorm frozen, stated trained": ("BatchNorm mode", FROZEN, MODES | {"batch_norm": "average"}),
    "dropout on, not stated": ("dropout", FROZEN, MODES | {"dropout": "off"}),
    "dropout off, stated on": ("dropout", {"model": "conv"}, MODES),
    "normalisation not stated, dense": ("normalisation", {"model": "dense", "normalise": (0.1307, 0.3081)}, {}),
    "normalisation not stated, convolution": ("normalisation", {"normalise": (0.1307, 0.3081)}, {}),
    "normalisation stated, not done": ("normalisation", {"model": "dense"}, {"normalise": "0.5/0.5"}),
    "Adam": ("Adam", {"optimiser": torch.optim.Adam, "lr": 1e-3}, {"lr": 1e-3}),
    "AdamW, several steps": ("Adam", {**FOUR, "optimiser": torch.optim.AdamW, "lr": 1e-3}, {"lr": 1e-3, **STEPS}),
    "weight decay": ("weight decay", {"options": {"weight_decay": 0.05}}, {}),
    "momentum": ("momentum", {**FOUR, "lr": 0.01, "options": {"momentum": 0.9}}, {"lr": 0.01, **STEPS}),
    "rate ten times too large": ("learning rate", {"lr": 0.01}, {}),
    "rate ten times too small": ("learning rate", {"lr": 1.0}, {}),
    "summed loss": ("loss reduction", SUMMED, {"num_examples": 8, "lr": 0.01}),
    "accumulation": ("accumulation", {**FOUR, "accumulate": 4, "lr": 0.01}, {"lr": 0.01, **STEPS}),
    "label smoothing": ("label smoothing", {"smoothing": 0.2}, {}),
    "wrong weights": ("wrong weights", {"other": True}, {}),
    "pruned": ("pruned", {"after": keep_largest(0.1)}, {}),
    "several images, pruned": ("pruned", {"count": 8, "after": keep_largest(0.1)}, {"num_examples": 8}),
    "several images, dense, pruned": (
        "pruned", {"model": "dense", "count": 8, "after": keep_largest(0.1)}, {"num_examples": 8},
    ),
    "quantised to 8 bits": ("quantised", {"after": rounded}, {}),
    "half precision": ("quantised", {"after": halved}, {}),
    "clipped": ("clipped", {"clip": 0.5}, {}),
    "noisy": ("noisy", {"after": noise(1e-4)}, {}),
    "very noisy": ("noisy", {"after": noise(1e-2)}, {}),
    "a missing tensor": ("parameters", {"after": without_a_bias}, {}),
    "an extra tensor": ("parameters", {"after": lambda change, state: change | {"more": torch.zeros(1)}}, {}),
    "nothing trained": ("near-zero gradient", {"lr": 1e-9}, {}),
    "whole weights": ("whole weights", {"after": lambda change, state: state}, {}),
    "a change taken for weights": (
        "not whole weights", {"after": lambda change, state: {n: t - state[n] for n, t in change.items()}},
        {"kind": "weights"},
    ),
    "the wrong way round": ("sign", {"after": lambda change, state: {n: -t for n, t in change.items()}}, {}),
}  # fmt: skip
HEALTHY = {
    "one image": ({}, {}),
    "one image, labels not known": ({}, {"labels": None}),
    "dense": ({"model": "dense"}, {}),
    "normalised as stated": ({"model": "dense", "normalise": (0.1307, 0.3081)}, {"normalise": "0.1307/0.3081"}),
    "several images": ({"count": 4}, {"num_examples": 4}),
    "several images, dense": ({"model": "dense", "count": 8}, {"num_examples": 8}),
    "several images, dense, not stated": ({"model": "dense", "count": 8}, {"num_examples": None, "labels": None}),
    "several steps": ({**FOUR, "lr": 0.01}, {"lr": 0.01, **STEPS}),
    "Adam as stated": ({"optimiser": torch.optim.Adam, "lr": 1e-3}, {"lr": 1e-3, "optimiser": "adam"}),
    "weight decay as stated": ({"options": {"weight_decay": 0.05}}, {"weight_decay": 0.05}),
    "momentum as stated": ({**FOUR, "lr": 0.01, "options": {"momentum": 0.9}}, {"lr": 0.01, "momentum": 0.9, **STEPS}),
    "smoothed as stated": ({"smoothing": 0.2}, {"label_smoothing": 0.2}),
    "clipped as stated": ({"clip": 0.5}, {"clip_norm": 0.5}),
    "summed as stated": (SUMMED, {"num_examples": 8, "lr": 0.01, "reduction": "sum"}),
    "modes as stated": (FROZEN, MODES),
    "training mode as stated": (TRAINED, {"num_examples": 4, "dropout": "on", **ONE}),
    "pruned by a known defence": ({"after": keep_largest(0.1)}, {"defence": "prune:fraction=0.9"}),
}  # fmt: skip


def names(made, stated):
    network, change = trained(**made)
    return [found.name for found in diagnose(network, change, spec(model=made.get("model", "plain"), **stated))]


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_is_named(case):
    wanted, made, stated = BROKEN[case]
    assert wanted in names(made, stated)


@pytest.mark.parametrize("case", HEALTHY)
def test_nothing_is_found_where_nothing_is_wrong(case):
    assert names(*HEALTHY[case]) == []


def test_at_least_twenty_kinds_of_broken_input_are_tried():
    assert len(BROKEN) >= 20


def case(**made):
    network, change = trained(**made)
    model = made.get("model", "plain")
    return Case(network.eval(), change, spec(model=model, num_examples=made.get("count", 1)), digits(4)[0])


def test_the_identities_hold_for_true_gradients():
    one = case()
    assert float(softmax_residual(one, one.gradient).norm() / one.gradient["5.weight"].norm()) < 1e-5
    assert [pair for pair, _ in balances(one, one.gradient)] == ["0 and 2", "2 and 5"]
    assert all(off < 1e-4 for _, off in balances(one, one.gradient))


@pytest.mark.parametrize(("rate", "smoothing"), [(0.1, 0.0), (0.2, 0.0), (0.1, 0.3), (0.05, 0.1)])
def test_scale_and_smoothing_of_one_image_are_exact(rate, smoothing):
    found = one_image(case(lr=rate, smoothing=smoothing))
    assert found.scale == pytest.approx(rate / 0.1, rel=1e-2)
    assert found.smoothing == pytest.approx(smoothing, abs=1e-2)
    assert found.misfit < 1e-3


def test_figures_are_estimated():
    def told(kind):
        wanted, made, stated = BROKEN[kind]
        network, change = trained(**made)
        found = diagnose(network, change, spec(**stated))
        return str(next(each for each in found if each.name == wanted))

    assert "weight_decay = 0.05" in told("weight decay")
    assert "label_smoothing = 0.2" in told("label smoothing")
    assert "lr = 0.01" in told("rate ten times too large")
    assert "clip_norm = 0.5" in told("clipped")
    assert "prune:fraction=0.9" in told("pruned")
    assert 'gaussian:std=0.1"' in told("very noisy")


def test_the_command_prints_words_or_json(gradveil, tmp_path):
    network, change = trained(model="dense", lr=0.01)
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\ndef dense():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))\n"
    )
    save_file(network.state_dict(), tmp_path / "m.safetensors")
    save_file(change, tmp_path / "u.safetensors")
    lines = {"model": f"{tmp_path}/mine.py:dense", "shape": [1, 28, 28], "num_classes": 10, "kind": "change", "lr": 0.1}
    lines |= {"num_examples": 1}
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in lines.items())
    (tmp_path / "spec.toml").write_text(text)
    words = ["diagnose", "--trust-code"]
    for name, file in (("model-file", "m.safetensors"), ("update", "u.safetensors"), ("spec", "spec.toml")):
        words += [f"--{name}", tmp_path / file]
    code, out, err = gradveil(*words)
    assert code == 0, err
    assert "learning rate: the update is 0.1 times as large as stated" in out
    code, out, _ = gradveil(*words, "--json")
    (found,) = json.loads(out)["updates"][0]["diagnoses"]
    assert found["name"] == "learning rate"
    (tmp_path / "spec.toml").write_text(text.replace("lr = 0.1", "lr = 0.01"))
    assert "nothing found" in gradveil(*words)[1]
