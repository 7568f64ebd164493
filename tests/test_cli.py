"""The command line: results on stdout, progress on stderr, one clear line and exit code 2 for wrong usage."""

import gzip
import json
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gradveil import cli
from gradveil.config import TrainSettings, make_train_settings, read_settings
from gradveil.engines.tripwire import TripwireWarning
from gradveil.models import create_model

QUICK = ("--model", "logistic", "--partition", "iid:images=20", "--clients", 4, "--rounds", 3, "--workers", 0)


@pytest.fixture
def refused(gradveil, tmp_path):
    """Run ``train`` with QUICK and more; it must be refused in one line, and leave no folder."""

    def run(*arguments, quick=QUICK, out=tmp_path / "refused"):
        ended = gradveil("train", *quick, "--out", out, *arguments)
        assert ended.code == 2, ended.err
        assert ended.out == ""
        assert "Traceback" not in ended.err
        kind, _, message = ended.last.partition(": ")
        assert kind.endswith("Error")
        assert message
        if out == tmp_path / "refused":
            assert not out.exists()
        return ended.last

    return run


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def small_arrays(size=8, count=40):
    rng = np.random.default_rng(0)
    labels = np.arange(count) % 3
    images = rng.integers(0, 255, (count, size, size), dtype=np.uint8)
    return {"x_train": images[:30], "y_train": labels[:30], "x_test": images[30:], "y_test": labels[30:]}


@pytest.fixture
def npz(tmp_path):
    def write(name="own.npz", **changes):
        np.savez(tmp_path / name, **small_arrays() | changes)
        return tmp_path / name

    return write


# --- results of train -------------------------------------------------------------------------------------------------


def test_json_is_one_document_and_progress_is_on_stderr(gradveil, tmp_path):
    out = tmp_path / "run"
    ended = gradveil("train", *QUICK, "--sensitive", 0.1, "--out", out, "--json")
    assert ended.code == 0
    document = json.loads(ended.out)
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert document["rows"] == rows
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert all({"round", "accuracy", "loss", "seconds"} <= row.keys() for row in rows)
    assert document["rounds"] == 3
    assert document["out"] == str(out)
    assert document["report"] == str(out / "report.html")
    assert [document[key] for key in ("accuracy", "loss", "accuracy_sensitive")] == [
        rows[-1][key] for key in ("accuracy", "loss", "accuracy_sensitive")
    ]
    own = [json.loads(line)["accuracy_own"] for line in (out / "clients.jsonl").read_text().splitlines()]
    assert document["accuracy_own_worst_client"] == min(own)
    assert "3/3" in ended.err
    assert f"{rows[-1]['accuracy']:.2%}" in ended.err
    for name in ("curves.png", "curves.svg", "report.html", "model.safetensors", "settings.toml"):
        assert (out / name).stat().st_size > 0, name


def test_without_json_a_table_is_shown(gradveil, tmp_path):
    ended = gradveil("train", *QUICK, "--out", tmp_path / "run")
    last = json.loads((tmp_path / "run" / "rows.jsonl").read_text().splitlines()[-1])
    assert ended.code == 0
    assert f"{last['accuracy']:.2%}" in ended.out
    assert "report.html" in ended.out
    assert "setting up" not in ended.out


def test_settings_in_a_config_file_give_the_same_run(gradveil, tmp_path):
    more = ("--lr", 0.3, "--lr-steps", "1/2", "--nesterov", "--sampled", 2, "--save-rounds", "2", "--seed", 5)
    gradveil("train", *QUICK, *more, "--out", tmp_path / "a")
    assert (
        gradveil("train", "--config", tmp_path / "a" / "settings.toml", "--workers", 0, "--out", tmp_path / "b").code
        == 0
    )
    assert (tmp_path / "a" / "settings.toml").read_bytes() == (tmp_path / "b" / "settings.toml").read_bytes()
    one, two = load_file(tmp_path / "a" / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")
    assert all((tensor == two[key]).all() for key, tensor in one.items())
    settings = make_train_settings(read_settings(tmp_path / "a" / "settings.toml"))
    assert (settings.lr, settings.lr_steps, settings.nesterov, settings.seed) == (0.3, (1, 2), True, 5)
    assert (tmp_path / "b" / "rounds" / "000002" / "model.safetensors").exists()


def test_options_override_the_config_which_overrides_the_defaults(gradveil, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(
        'model = "logistic"\nrounds = 1\nclients = 2\nbatch-size = 7\nnesterov = true\n'
        '[partition]\nname = "iid"\nimages = 9\n'
    )
    ended = gradveil(
        "train", "--config", config, "--clients", 3, "--no-nesterov", "--workers", 0, "--out", tmp_path / "run"
    )
    assert ended.code == 0
    assert make_train_settings(read_settings(tmp_path / "run" / "settings.toml")) == TrainSettings(
        model="logistic", rounds=1, clients=3, batch_size=7, partition="iid:images=9"
    )


def test_every_setting_has_its_option(gradveil):
    text = gradveil("train", "--help").out
    for name in vars(TrainSettings()):
        assert f"--{name.replace('_', '-')[:12]}" in text, name
    for name in ("--out", "--config", "--resume", "--json", "--workers", "--data-root"):
        assert name in text


def test_saved_rounds_record_their_settings(gradveil, tmp_path):
    gradveil("train", *QUICK, "--save-rounds", "1/3", "--out", tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "rounds").iterdir()) == ["000001", "000003"]
    updates = sorted(path.name for path in (tmp_path / "run" / "rounds" / "000001").iterdir())
    assert updates == [
        "model.safetensors",
        *(f"update-{client}.{kind}" for client in range(4) for kind in ("safetensors", "toml")),
    ]
    with safe_open(tmp_path / "run" / "rounds" / "000001" / "update-0.safetensors", "pt") as file:
        assert file.metadata()["num_examples"] == "20"
        assert set(file.keys()) == {"linear.weight", "linear.bias"}


def test_warnings_of_the_tripwire_are_shown_above_the_table(gradveil, tmp_path):
    tensors = create_model("mlp", (1, 28, 28), 10, seed=0).state_dict()
    save_file({name: torch.full_like(tensor, 0.01) for name, tensor in tensors.items()}, tmp_path / "equal.safetensors")
    looking = (*QUICK, "--model", "mlp", "--rounds", 1, "--tripwire", "warn")
    calm = gradveil("train", *looking, "--out", tmp_path / "calm").out
    assert ["tripwire warnings", "0"] in [[cell.strip() for cell in line.split("│")[1:3]] for line in calm.splitlines()]
    assert "Clients warned" not in calm
    with pytest.warns(TripwireWarning):
        told = gradveil("train", *looking, "--weights", tmp_path / "equal.safetensors", "--out", tmp_path / "run").out
    first, *table = told.splitlines()
    assert first == "Clients warned of traps in the model that they received: 4 warnings in 1 of 1 rounds."
    assert ["tripwire warnings", "4"] in [[cell.strip() for cell in line.split("│")[1:3]] for line in table]


# --- resume -----------------------------------------------------------------------------------------------------------


def test_resume_without_options_takes_the_settings_of_the_folder(gradveil, tmp_path):
    out = tmp_path / "run"
    first = json.loads(gradveil("train", *QUICK, "--out", out, "--json").out)
    before = content(out)
    again = json.loads(gradveil("train", "--out", out, "--resume", "--workers", 0, "--json").out)
    first.pop("seconds"), again.pop("seconds")
    assert again == first
    after = content(out)
    for name in ("rows.jsonl", "settings.toml", "clients.jsonl", "checkpoint.safetensors"):
        (path,) = (path for path in before if str(path) == name)
        assert before[path] == after[path], name


def test_resume_with_more_rounds_continues(gradveil, tmp_path):
    gradveil("train", *QUICK, "--out", tmp_path / "a")
    grown = json.loads(
        gradveil("train", "--out", tmp_path / "a", "--resume", "--rounds", 5, "--workers", 0, "--json").out
    )
    whole = json.loads(gradveil("train", *QUICK, "--rounds", 5, "--out", tmp_path / "b", "--json").out)
    timeless = [[{**row, "seconds": 0} for row in run["rows"]] for run in (grown, whole)]
    assert timeless[0] == timeless[1]
    assert read_settings(tmp_path / "a" / "settings.toml")["rounds"] == 5


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--lr", 0.9, "lr = 0.9"),
        ("--seed", 9, "seed = 9"),
        ("--clients", 5, "clients = 5"),
        ("--model", "mlp", "model = 'mlp'"),
    ],
)
def test_a_changed_setting_is_named_and_nothing_is_lost(gradveil, refused, tmp_path, option, value, name):
    gradveil("train", *QUICK, "--out", tmp_path / "run")
    before = content(tmp_path / "run")
    message = refused("--resume", option, value, out=tmp_path / "run")
    assert f"got {name} (was " in message
    assert content(tmp_path / "run") == before


def test_a_folder_with_another_run_is_not_changed(gradveil, refused, tmp_path):
    gradveil("train", *QUICK, "--out", tmp_path / "run")
    before = content(tmp_path / "run")
    assert "holds a run. Add --resume" in refused("--lr", 0.3, out=tmp_path / "run")
    assert "rounds must be at least" in refused("--resume", "--rounds", 2, out=tmp_path / "run")
    assert content(tmp_path / "run") == before


def test_resume_without_options_needs_a_run(refused, tmp_path):
    """A misspelt --out must not start a run with default settings."""
    message = refused("--resume", "--workers", 0, quick=(), out=tmp_path / "no" / "such")
    assert "such to resume. Check --out, or give the settings of a new run." in message
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_damaged_checkpoint_is_refused(gradveil, refused, tmp_path, size):
    gradveil("train", *QUICK, "--out", tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    before = content(tmp_path / "run")
    assert "checkpoint.safetensors must be a whole safetensors file" in refused("--resume", out=tmp_path / "run")
    assert content(tmp_path / "run") == before


def test_a_checkpoint_of_another_model_is_refused(gradveil, refused, tmp_path):
    gradveil("train", *QUICK, "--out", tmp_path / "a")
    gradveil("train", *QUICK, "--model", "mlp:hidden=3", "--out", tmp_path / "b")
    shutil.copy(tmp_path / "b" / "checkpoint.safetensors", tmp_path / "a")
    assert "checkpoint" in refused("--resume", "--rounds", 5, out=tmp_path / "a")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dataset", "mnist5k"), "Unknown dataset 'mnist5k'. Did you mean 'mnist-5k'?"),
        (("--model", "lenet6"), "Unknown model 'lenet6'. Did you mean 'lenet5'?"),
        (("--model", "mlp:hiden=3"), "Model 'mlp' has no setting 'hiden'. Did you mean 'hidden'?"),
        (("--model", "mlp:activation=relux"), "Unknown activation 'relux'. Did you mean 'relu'?"),
        (("--model", "mlp:hidden"), "must be key=value pairs"),
        (("--model", "mlp:hidden=-3"), "hidden must be at least 1, got -3"),
        (("--model", "lenet5", "--clients", "nan"), "Setting clients of a training must be of type int, got 'nan'"),
        (("--defence", "nonne"), "Unknown defence 'nonne'. Did you mean 'none'?"),
        (("--defence", "none+nonne"), "Unknown defence 'nonne'. Did you mean 'none'?"),
        (("--defence", "none:x=1"), "Defence 'none' has no setting 'x'. Known: none."),
        (("--partition", "dirichlt"), "Unknown partition 'dirichlt'. Did you mean 'dirichlet'?"),
        (("--partition", "iid:imags=3"), "Partition 'iid' has no setting 'imags'. Did you mean 'images'?"),
        (("--sampling", "unifrom"), "Unknown sampling 'unifrom'. Did you mean 'uniform'?"),
        (("--weighting", "sized"), "Unknown weighting 'sized'. Did you mean 'size'?"),
        (("--algorithm", "fedsdg"), "Unknown algorithm 'fedsdg'. Did you mean 'fedsgd'?"),
        (("--batch-norm", "averge"), "Unknown batch_norm 'averge'. Did you mean 'average'?"),
        (("--device", "gpu7"), "device must be one that torch can use here, got 'gpu7'"),
        (("--device", "meta"), "device must be one that torch can use here, got 'meta'"),
        (("--device", "hpu"), "device must be one that torch can use here, got 'hpu'"),
        (("--normalise", "imagenet"), "normalise must have a mean and a"),
        (("--normalise", "0.5/0"), "normalise must have a mean and a positive std"),
        (("--normalise", "mean"), "normalise must be dataset, imagenet, none or mean/std"),
        (("--normalise", "0.5/nan"), "normalise must have a mean and a positive std"),
    ],
)  # fmt: skip
def test_unknown_names_are_refused_with_a_hint(refused, arguments, message):
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--clients", 4001, "--partition", "iid"), "4,001 clients need an image each, the set has 4,000"),
        (("--clients", 300), "300 clients x 20 images = 6,000 needed, the set has 4,000"),
        (("--partition", "by-class:classes=11"), "classes must be at most 10"),
        (("--partition", "by-class:classes=2,per_class=500"), "per_class"),
        (("--sampled", 5), "sampled must be at most clients without replacement, got 5 of 4"),
        (("--sampled", -1), "got -1"),
        (("--clients", 0), "clients must be at least 1, got 0"),
        (("--clients", "9" * 400), "clients"),
        (("--seed", "9" * 400), "seed must be in"),
        (("--seed", -1), "seed must be in"),
        (("--rounds", -1), "rounds must be at least 0, got -1"),
        (("--rounds", "many"), "Setting rounds of a training must be of type int, got 'many'"),
        (("--rounds", 2.5), "Setting rounds of a training must be of type int, got '2.5'"),
        (("--epochs", 0), "epochs must be at least 1, got 0"),
        (("--batch-size", -2), "batch_size must be at least 0, got -2"),
        (("--lr", "nan"), "got nan"),
        (("--lr", "inf"), "got inf"),
        (("--lr", -0.1), "got -0.1"),
        (("--lr", ""), "Setting lr of a training must be of type float, got ''"),
        (("--momentum", 1), "momentum must be in [0, 1), got 1.0"),
        (("--momentum", 0, "--nesterov"), "momentum must be more than 0 for nesterov"),
        (("--weight-decay", "-inf"), "got -inf"),
        (("--lr-steps", "0"), "lr_steps must be at least 1, got 0"),
        (("--lr-steps", "1/x"), "must be of type int, or several separated by slashes such as 1/2, got '1/x'"),
        (("--save-rounds", "4"), "save_rounds must be in [1, 3], got 4"),
        (("--eval-every", 0), "eval_every must be at least 1, got 0"),
        (("--sensitive", "1.5"), "sensitive must be in [0, 1], got 1.5"),
        (("--sensitive", "9:0"), "sensitive must name clients 0..3"),
        (("--sensitive", "0/20"), "sensitive must name positions that clients have"),
        (("--workers", -1), "workers must be at least 0, got -1"),
        (("--partition", "dirichlet:alpha=inf"), "alpha must be more than 0, got inf"),
    ],
)  # fmt: skip
def test_invalid_numbers_are_refused(refused, arguments, message):
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--lr-factor", "1e300", "--lr-steps", "1/1", "--lr", "1e-3"),
        ("--weight-decay", "1e39"),
        ("--lr", "1e39"),
        ("--lr", "1e37", "--clients", 2),
        ("--sampled", 10**13, "--sampling", "uniform-replace"),
    ],
)
def test_numbers_too_large_to_train_with_end_in_a_clear_line(gradveil, tmp_path, arguments):
    ended = gradveil("train", *QUICK, "--out", tmp_path / "run", *arguments)
    assert ended.code in (1, 2)
    assert ended.last.partition(": ")[0] in ("ConfigError", "DivergedError")


def test_a_run_that_diverges_exits_with_code_1(gradveil, tmp_path):
    ended = gradveil("train", *QUICK, "--model", "mlp", "--lr", 1e20, "--out", tmp_path / "run", "--json")
    assert (ended.code, ended.out) == (1, "")
    assert ended.last.startswith("DivergedError: ")
    assert "Lower --lr" in ended.last
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("train", "--cleints", "3", "--out", "x"), "--clients"),
        (("trian",), "trian"),
        (("data", "lsit"), "list"),
        (("train",), "--out"),
    ],
)
def test_unknown_options_and_commands_are_bad_usage(gradveil, arguments, hint):
    ended = gradveil(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert hint in ended.err
    assert "Traceback" not in ended.err


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = ", "must be valid TOML"),
        ("cleints = 3", "A training has no setting 'cleints'. Did you mean 'clients'?"),
        ("epochs = 'one'", "Setting epochs of a training must be of type int, got 'one'"),
        ("lr = true", "Setting lr of a training must be of type float, got True"),
        ("lr = nan", "got nan"),
        ("[defence]\nx = 1", "must have a name"),
        ("[defence]\nname = 'nonne'", "Unknown defence 'nonne'"),
        (f"weight_decay = {'9' * 400}", "Setting weight_decay of a training must be of type float"),
        ("sensitive = 0.1", "Setting sensitive of a training must be of type str, got 0.1"),
    ],
)
def test_a_bad_config_is_refused(refused, tmp_path, text, message):
    (tmp_path / "c.toml").write_text(text)
    assert message in refused("--config", tmp_path / "c.toml")


def test_a_missing_config_is_refused(refused, tmp_path):
    assert "There is no settings file" in refused("--config", tmp_path / "none.toml")
    assert "must be valid TOML" in refused("--config", tmp_path)


def test_out_must_be_a_folder(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        for more in ((), ("--resume",)):
            assert "must be a folder that can be written" in refused(*more, out=out)
    assert (tmp_path / "file").read_text() == "mine"


OWN = {
    "rubbish": "def factory():\n    return 3\n",
    "classes": "from torch import nn\ndef factory(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 9))\n",
    "fails": "def factory(): raise KeyError('x')\n",
    "broken": "def factory(:\n",
    "leaves": "raise SystemExit(0)\n",
    "builtin": "factory = dict\n",
    "number": "factory = 3\n",
    "needs": "def factory(shape, depth): pass\n",
    "size": "from torch import nn\ndef factory(): return nn.Linear(5, 10)\n",
    "empty": "from torch import nn\nclass factory(nn.Module):\n    def forward(self, x): return x.flatten(1)[:, :10]\n",
    "tuple": (
        "from torch import nn\nclass factory(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.l = nn.Linear(784, 10)\n    def forward(self, x): return self.l(x.flatten(1)), 1\n"
    ),
    "frozen": (
        "from torch import nn\ndef factory():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).requires_grad_(False)\n"
    ),
    "mixed": (
        "from torch import nn\nclass factory(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.l = nn.Linear(784, 10)\n        self.d = nn.Linear(1, 1).double()\n"
        "    def forward(self, x): return self.l(x.flatten(1))\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rubbish", "must return a torch.nn.Module, got int"),
        ("classes", "must return (N, 10) for this data set, got (2, 9)"),
        ("fails", "failed when called with (nothing): KeyError"),
        ("broken", "failed when imported: SyntaxError"),
        ("leaves", "failed when imported: SystemExit"),
        ("builtin", "must"),
        ("number", "must be a function or class that returns a torch.nn.Module, got 3"),
        ("needs", "must be callable with (shape), got: missing a required argument: 'depth'"),
        ("size", "The model must take images of shape (1, 28, 28), got RuntimeError"),
        ("empty", "a model without any"),
        ("tuple", "The model must return (N, 10) for this data set, got"),
        ("frozen", "model"),
        ("mixed", "must have one dtype"),
    ],
)
def test_an_unusable_model_of_the_user_is_refused(refused, tmp_path, name, message):
    (tmp_path / f"{name}.py").write_text(OWN[name])
    assert message in refused("--model", f"{tmp_path / name}.py:factory")


def test_a_missing_model_file_or_factory_is_refused(refused, tmp_path):
    (tmp_path / "mine.py").write_text(OWN["rubbish"])
    assert "There is no file" in refused("--model", f"{tmp_path}/none.py:factory")
    assert "Did you mean 'factory'" in refused("--model", f"{tmp_path}/mine.py:factroy")
    assert "must be a subclass of gradveil's Defence" in refused("--defence", f"{tmp_path}/mine.py:factory")


def test_a_model_of_the_users_trains(gradveil, tmp_path):
    (tmp_path / "net.py").write_text(OWN["classes"].replace("9", "10"))
    assert gradveil("train", *QUICK, "--model", f"{tmp_path}/net.py:factory", "--out", tmp_path / "run").code == 0
    assert load_file(tmp_path / "run" / "model.safetensors").keys() == {"1.weight", "1.bias"}


def test_prints_of_a_users_file_do_not_corrupt_the_json(gradveil, tmp_path):
    (tmp_path / "loud.py").write_text("print('hello')\n" + OWN["classes"].replace("9", "10"))
    ended = gradveil("train", *QUICK, "--model", f"{tmp_path}/loud.py:factory", "--out", tmp_path / "run", "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["rounds"] == 3


def test_unusable_weights_are_refused(refused, tmp_path):
    import torch

    path = tmp_path / "w.safetensors"
    assert "must be a readable safetensors file" in refused("--weights", path)
    path.write_bytes(b"no tensors")
    assert "must be a readable safetensors file" in refused("--weights", path)
    save_file({"linear.weight": torch.zeros(10, 784)}, path)
    assert "missing: linear.bias" in refused("--weights", path)
    save_file({"linear.weight": torch.zeros(10, 783), "linear.bias": torch.zeros(10)}, path)
    assert "wrong shape: linear.weight (10, 783) instead of (10, 784)" in refused("--weights", path)


def test_a_run_starts_from_the_weights_given(gradveil, tmp_path):
    gradveil("train", *QUICK, "--out", tmp_path / "a")
    trained = json.loads((tmp_path / "a" / "rows.jsonl").read_text().splitlines()[-1])
    more = ("--rounds", 0, "--weights", tmp_path / "a" / "model.safetensors", "--json")
    ended = gradveil("train", *QUICK, *more, "--out", tmp_path / "b")
    assert json.loads(ended.out)["accuracy"] == trained["accuracy"]


def test_own_data_train(gradveil, tmp_path, npz):
    path = npz()
    ended = gradveil("train", *QUICK, "--partition", "iid", "--dataset", path, "--out", tmp_path / "run", "--json")
    assert ended.code == 0
    assert len(json.loads(ended.out)["rows"]) == 3


def test_broken_arrays_are_refused(refused, tmp_path, npz):
    def data(path):
        return refused("--partition", "iid", "--dataset", path)

    assert "none.npz must exist" in data(tmp_path / "none.npz")
    whole = npz().read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 10):
        (tmp_path / "own.npz").write_bytes(whole[:size])
        assert "own.npz must be an .npz file of plain arrays" in data(tmp_path / "own.npz")
    assert "must be class indices in 0.." in data(npz(y_train=np.full(30, -1)))
    assert "must be integers" in data(npz(y_test=np.zeros(10)))
    assert "one label for each image" in data(npz(y_train=np.zeros(29, int)))
    assert "images of one shape" in data(npz(x_test=np.zeros((10, 9, 9), np.uint8)))
    assert "must be in [0, 1]" in data(npz(x_train=np.full((30, 8, 8), 2.0)))
    assert "must be in [0, 1]" in data(npz(x_train=np.full((30, 8, 8), np.nan)))
    assert "plain arrays" in data(npz(x_train=np.array([{}] * 30, dtype=object)))


def test_broken_idx_files_are_refused(refused, tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    arrays = small_arrays(28)
    for part, name in (("train", "train"), ("test", "t10k")):
        images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"].astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (raw / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))

    def data():
        return refused("--partition", "iid", "--dataset", "mnist", "--data-root", tmp_path)

    images, labels = raw / "train-images-idx3-ubyte.gz", raw / "train-labels-idx1-ubyte.gz"
    whole, good = images.read_bytes(), labels.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:20] + b"\0\0\0\0" + whole[24:], b"", b"rubbish"):
        images.write_bytes(broken)
        assert "train-images-idx3-ubyte.gz must be " in data()
    images.write_bytes(gzip.compress(gzip.decompress(whole)[:-5]))
    assert "its header promises" in data()
    images.write_bytes(whole)
    labels.write_bytes(gzip.compress(gzip.decompress(good)[:-1] + bytes([10])))
    assert "must have labels in 0..9, got 10" in data()


def test_pictures_of_mixed_sizes_are_refused(refused, gradveil, tmp_path):
    for index in range(12):
        folder = tmp_path / "pictures" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (9 if index == 7 else 8, 8), index * 20).save(folder / f"{index:02d}.png")
    data = ("--partition", "iid", "--dataset", f"{tmp_path}/pictures/")
    assert "All pictures must have the same size" in refused(*data)
    assert "size=" in refused(*data)
    sized = (*data[:-1], f"{data[-1]}:size=8")
    assert gradveil("train", *QUICK, *sized, "--out", tmp_path / "run").code == 0
    (tmp_path / "pictures" / "a" / "00.png").write_bytes(b"no picture")
    assert "must be a picture that can be read" in refused(*sized)


def test_missing_data_are_named_with_their_path(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    message = refused("--dataset", "svhn", "--data-root", tmp_path)
    assert "md5" in message
    assert str(tmp_path) in message


# --- the other commands -----------------------------------------------------------------------------------------------


def test_list_and_describe(gradveil):
    everything = json.loads(gradveil("list", "--json").out)
    assert {"datasets", "defences", "models", "partitions"} <= everything.keys()
    assert json.loads(gradveil("list", "models", "--json").out) == {"models": everything["models"]}
    assert all(text for kind in everything.values() for text in kind.values())
    assert "lenet5" in gradveil("list", "models").out
    for kind in everything.values():
        for name in kind:
            described = json.loads(gradveil("describe", name, "--json").out)
            assert described["name"] == name
            assert described["doc"].startswith(kind[name]) or described["kind"] not in everything
    assert json.loads(gradveil("describe", "mlp", "--json").out)["settings"]["hidden"] == [200, 200]
    assert "hidden=(200, 200)" in gradveil("describe", "mlp").out
    assert "Reports: " not in gradveil("describe", "mlp").out
    reports = json.loads(gradveil("describe", "entangle", "--json").out)["reports"]
    assert list(reports) == ["entangle_change", "entangle_replaced"]
    assert f"  entangle_change: {reports['entangle_change']}" in gradveil("describe", "entangle").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "modles"), "Unknown kind 'modles'. Did you mean 'models'?"),
        (("describe", "lenet6"), "Unknown component 'lenet6'. Did you mean 'lenet5'?"),
        (("data", "verify", "mnits"), "Unknown dataset 'mnits'. Did you mean 'mnist'?"),
        (("data", "verify", "none.npz"), "must exist"),
    ],
)
def test_unknown_names_in_other_commands_are_refused(gradveil, arguments, message):
    ended = gradveil(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.last


def test_the_data_commands_take_the_data_root(gradveil, tmp_path):
    assert gradveil("data", "path", "--data-root", tmp_path).out == f"{tmp_path}\n"
    listed = json.loads(gradveil("data", "list", "--data-root", tmp_path, "--json").out)
    assert listed["root"] == str(tmp_path)
    assert {row["name"]: row["state"] for row in listed["datasets"]}["mnist"] == "missing"
    assert gradveil("data", "verify", "mnist-5k", "--data-root", tmp_path).code == 0
    assert gradveil("data", "verify", "mnist", "--data-root", tmp_path).code == 2


def test_the_environment_names_the_data_root(gradveil, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADVEIL_DATA", str(tmp_path / "here"))
    assert gradveil("data", "path").out == f"{tmp_path / 'here'}\n"


def test_own_data_are_verified(gradveil, npz):
    (row,) = json.loads(gradveil("data", "verify", npz(), "--json").out)["files"]
    assert (row["status"], row["detail"]) == ("ok", "30 training images")


@pytest.mark.slow
def test_the_program_in_its_own_process_ends_with_one_line(tmp_path):
    call = [sys.executable, "-m", "gradveil.cli", "train", "--lr", "nan", "--out", str(tmp_path / "run"), "--json"]
    ended = subprocess.run(call, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("ConfigError: lr must be ")
    assert ended.stderr.endswith(", got nan. Change --lr.\n")
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_prints_of_a_users_model_do_not_go_to_stdout(tmp_path, monkeypatch, capsys):
    (tmp_path / "chatty.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(784, 10)\n"
        "    def forward(self, x):\n"
        "        print('forward')\n"
        "        return self.linear(x.flatten(1))\n"
        "def make():\n"
        "    print('building')\n"
        "    return Net()\n"
    )
    arguments = ["train", "--model", f"{tmp_path}/chatty.py:make", "--partition", "iid:images=4", "--clients", "2"]
    arguments += ["--rounds", "1", "--workers", "0", "--out", str(tmp_path / "run"), "--json"]
    monkeypatch.setattr(sys, "argv", ["gradveil", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rounds"] == 1
    assert "building" in err


def test_an_edited_model_file_is_not_resumed(tmp_path, monkeypatch, capsys):
    own = tmp_path / "own.py"
    code = "import torch\ndef make():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))\n"
    own.write_text(code)
    arguments = ["train", "--model", f"{own}:make", "--partition", "iid:images=4", "--clients", "2", "--rounds", "1"]
    arguments += ["--workers", "0", "--out", str(tmp_path / "run"), "--resume"]
    for expected, text in ((0, code), (0, code), (2, code + "# edited\n")):
        own.write_text(text)
        monkeypatch.setattr(sys, "argv", ["gradveil", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == expected
    assert "own files" in capsys.readouterr().err


def test_a_training_that_learns_nothing_warns_early_and_at_the_end_on_stderr(gradveil, tmp_path):
    quick = (*QUICK[:-4], "--workers", 0, "--rounds", 7, "--lr", 1e-9)
    ended = gradveil("train", *quick, "--out", tmp_path / "run", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["warning"].startswith("The training has not learned anything: after 7 rounds")
    assert [f"after {n} rounds" in ended.err for n in (4, 5, 6, 7)] == [False, True, False, True]
    assert json.loads(gradveil("train", *QUICK, "--out", tmp_path / "short", "--json").out)["warning"] is None


def test_an_audit_without_a_trained_model_says_that_the_price_is_not_known(gradveil, tmp_path):
    few = ("--partition", "iid:images=20", "--clients", 2, "--rounds", 1, "--targets", 1, "--workers", 0, "--lr", 1e-9)
    attack = ("--defences", "prune", "--attacks", "gs:iterations=1")
    ended = gradveil("audit", *few, *attack, "--model", "logistic", "--out", tmp_path / "run", "--json")
    assert ended.code == 0, ended.err
    assert all("price not known" in line["why"] for line in json.loads(ended.out)["utility"])
    assert "Warning: none: price not known: the undefended training did not learn" in ended.err
    assert "What defences cost is not known" in (tmp_path / "run" / "report.html").read_text()
