"""Attacks on updates in files, as any framework saves them, and one clear line for every wrong input."""

import json
import pickle
import tomllib

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from gradveil.attacks import build_attack
from gradveil.data import load_dataset
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.metrics import schema_of
from gradveil.models import create_model
from gradveil.own import trusting_code
from gradveil.registry import convert
from gradveil.runs.attack import Scoring, attack_files
from gradveil.runs.inputs import read_tensors
from gradveil.runs.update_spec import UpdateSpec, read_spec
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch

MODEL = "lenet-dlg:activation=sigmoid,init=uniform"
SHAPE, CLASSES = (1, 8, 8), 4
LABELS = (1, 3)
ATTACK = "idlg:iterations=60,restarts=2"
QUICK = "idlg:iterations=1"


def gradient(net, images, labels):
    loss = torch.nn.functional.cross_entropy(net(images), labels)
    names = [name for name, _ in net.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(net.parameters())), strict=True))


class Files:
    """A folder with a model, two clients' gradients of one image each, the true images and a specification."""

    def __init__(self, folder):
        self.folder, self.out = folder, folder / "out"
        self.net = create_model(MODEL, SHAPE, CLASSES, seed=0)
        self.images = torch.rand(2, 1, *SHAPE, generator=torch.Generator().manual_seed(1))  # (T, B, C, H, W)
        self.model, self.truth = folder / "model.safetensors", folder / "truth.npz"
        self.updates = [folder / f"update-{number}.safetensors" for number in range(2)]
        save_file(self.net.state_dict(), self.model)
        self.gradients = [
            gradient(self.net, images, torch.tensor([label])) for images, label in zip(self.images, LABELS, strict=True)
        ]
        for path, found in zip(self.updates, self.gradients, strict=True):
            save_file(found, path)
        np.savez(self.truth, images=self.images.numpy())
        self.text = {"model": MODEL, "shape": list(SHAPE), "num_classes": CLASSES, "kind": "gradient"}
        self.text |= {"num_examples": 1}

    def spec(self, **changes):
        path = self.folder / "spec.toml"
        lines = [f"{key} = {json.dumps(value)}" for key, value in (self.text | changes).items() if value is not None]
        path.write_text("\n".join(lines))
        return path

    def arguments(self, *more, attack=ATTACK, **changes):
        options = {"--model-file": self.model, "--spec": self.spec(**changes), "--attack": attack, "--out": self.out}
        updates = [piece for path in self.updates for piece in ("--update", path)]
        return ["attack", *[piece for pair in options.items() for piece in pair], *updates, *more]


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


@pytest.fixture
def refused(gradveil, files):
    """Run ``attack`` with a change; it must be refused in one line, and leave no folder."""

    def run(*more, attack=QUICK, **changes):
        before = sorted(files.folder.iterdir())
        code, out, err = gradveil(*files.arguments(*more, attack=attack, **changes))
        assert (code, out) == (2, ""), err
        assert "Traceback" not in err
        last = err.rstrip("\n").splitlines()[-1]
        kind, _, message = last.partition(": ")
        assert kind.endswith("Error")
        assert not files.out.exists()
        assert set(files.folder.iterdir()) - set(before) <= {files.folder / "spec.toml"}
        return message

    return run


# --- results ----------------------------------------------------------------------------------------------------------


def test_several_updates_are_recovered_scored_and_drawn(gradveil, files):
    code, out, err = gradveil(*files.arguments("--truth", files.truth, "--json", "--seed", 3))
    assert code == 0, err
    document = json.loads(out)
    rows = document["rows"]
    assert document["out"] == str(files.out)
    assert rows == [json.loads(line) for line in (files.out / "rows.jsonl").read_text().splitlines()]
    assert [row["target"] for row in rows] == [0, 1]
    for row, label in zip(rows, LABELS, strict=True):
        assert row["labels"] == [label]
        assert row["converged"]
        assert row["psnr"] > 35
        assert row["ssim"] > 0.95
        assert row["mse"] < 1e-3
        assert row["attacker_loss"] < 1e-3
        assert row["seconds"] > 0
        assert (row["defence"], row["attack"], row["adaptive"], row["seed"]) == ("unknown", ATTACK, False, 3)
        assert row["knows"] == ["num-examples"]
        assert row["lpips"] is not None or "lpips" in row["unmeasured"][0]
        assert row["why"] == ""
    found = load_file(files.out / "reconstruction.safetensors")
    assert found["images"].shape == (2, 1, *SHAPE)
    torch.testing.assert_close(found["images"], files.images, atol=0.05, rtol=0)
    assert found["labels"].tolist() == [[label] for label in LABELS]
    for target in range(2):
        with Image.open(files.out / "images" / f"target-{target}.png") as picture:
            assert picture.size == (128, 128)
            shown = torch.from_numpy(np.asarray(picture)[8::16, 8::16, 0] / 255.0)
        torch.testing.assert_close(shown, files.images[target, 0, 0].double(), atol=0.05, rtol=0)
    assert "attacking 2 updates" in err


def test_a_real_digit_is_recovered_from_its_gradient(tmp_path):
    split = load_dataset("mnist-5k").train
    image = torch.from_numpy(split.images[:1].copy()).float() / 255
    label = int(split.labels[0])
    net = create_model(MODEL, (1, 28, 28), 10, seed=0)
    save_file(net.state_dict(), tmp_path / "m.safetensors")
    np.savez(tmp_path / "u.npz", **{n: g.numpy() for n, g in gradient(net, image, torch.tensor([label])).items()})
    np.savez(tmp_path / "truth.npz", images=split.images[:1])
    spec = UpdateSpec(MODEL, (1, 28, 28), 10, "gradient", num_examples=1)
    (row,) = attack_files(
        tmp_path / "m.safetensors",
        [tmp_path / "u.npz"],
        spec,
        "idlg:iterations=60,restarts=2",
        tmp_path / "out",
        scoring=Scoring(tmp_path / "truth.npz"),
    )
    assert row["labels"] == [label]
    assert row["psnr"] > 30


def test_the_same_command_gives_the_same_rows_and_settings_say_how(files):
    def run(name, seed=0):
        rows = attack_files(files.model, files.updates, read_spec(files.spec()), QUICK, files.folder / name, seed=seed)
        return [{**row, "seconds": 0} for row in rows]

    first = run("a")
    assert run("b") == first
    assert run("c", seed=1)[0]["attacker_loss"] != first[0]["attacker_loss"]
    saved = tomllib.loads((files.folder / "a" / "settings.toml").read_text())
    assert saved["updates"] == [str(path) for path in files.updates]
    assert (saved["attack"], saved["seed"], saved["model_file"]) == (QUICK, 0, str(files.model))
    again = UpdateSpec(**convert(UpdateSpec, saved["spec"], owner="test"))
    assert again == read_spec(files.spec())


def test_without_the_truth_there_are_no_scores_and_the_table_says_so(gradveil, files):
    code, out, err = gradveil(*files.arguments(attack="gs:iterations=2"))
    assert code == 0
    assert out.count("attack did not converge") == 2
    assert err.count("Not measured: no truth was given") == 1
    assert "guessed labels" in out
    assert "safe" not in out.replace(str(files.folder), "")
    assert str(files.out) in out
    for line in (files.out / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert [row[name] for name in ("mse", "psnr", "ssim", "lpips")] == [None] * 4
        assert not row["converged"]
        assert (row["why"], row["unmeasured"]) == ("", ["no truth was given"])


def test_an_update_without_information_gives_no_guess(files):
    save_file({name: torch.zeros_like(g) for name, g in files.gradients[1].items()}, files.updates[1])
    one, two = attack_files(
        files.model, files.updates, read_spec(files.spec()), QUICK, files.out, scoring=Scoring(files.truth)
    )
    assert one["psnr"] is not None
    assert (two["psnr"], two["attacker_loss"], two["converged"]) == (None, None, False)
    assert two["why"].startswith("gradient is zero: nothing to match; near-zero gradient: its norm is 0")
    assert two["unmeasured"][0] == "no guess for 1 of 1 images"
    assert (files.out / "images" / "target-1.png").exists()


def test_what_is_wrong_is_told_before_the_attack_and_in_the_row(gradveil, files):
    for number, path in enumerate(files.updates):
        save_file({name: 5 * g for name, g in files.gradients[number].items()}, path)
    code, out, err = gradveil(*files.arguments("--json", attack=QUICK))
    assert code == 0, err
    assert err.count("Diagnosis: ") == 2
    for row in json.loads(out)["rows"]:
        assert "learning rate: the update is 5 times as large as stated" in row["why"]


def test_a_criterion_of_an_attack_gives_its_exit_code(gradveil, files):
    code, _, err = gradveil(*files.arguments("--truth", files.truth, "--fail-on", "psnr>35"))
    assert code == 3, err
    assert "Criterion psnr>35 is met" in err


def test_a_batch_is_matched_to_the_truth_before_it_is_scored(files):
    """The order of the true images does not change the scores."""
    images = files.images[:, 0]
    save_file(gradient(files.net, images, torch.tensor(LABELS)), files.updates[0])
    spec = UpdateSpec(MODEL, SHAPE, CLASSES, "gradient", labels=LABELS)
    scores = []
    for number, order in enumerate(([0, 1], [1, 0])):
        np.savez(files.truth, images=images[order].numpy())  # (B, C, H, W) of a single target
        out = files.folder / f"out-{number}"
        (row,) = attack_files(
            files.model, files.updates[:1], spec, "idlg:iterations=100", out, scoring=Scoring(files.truth)
        )
        assert row["knows"] == ["labels", "num-examples"]
        scores.append(row["psnr"])
    assert scores[0] == pytest.approx(scores[1])
    assert scores[0] > 20


def test_true_images_as_bytes_or_floats_give_equal_scores(files):
    spec, rows = read_spec(files.spec()), []
    dark = (files.images * 255).round().to(torch.uint8)
    for number, images in enumerate((dark.numpy(), dark[:, 0].double().numpy() / 255)):
        np.savez(files.truth, images=images)
        out = files.folder / f"out-{number}"
        rows.append(attack_files(files.model, files.updates, spec, QUICK, out, scoring=Scoring(files.truth))[1])
    assert rows[0]["psnr"] == pytest.approx(rows[1]["psnr"])


def test_updates_of_several_local_steps_are_simulated(files):
    change = {name: -0.1 * g for name, g in files.gradients[0].items()}
    save_file(change, files.updates[0])
    spec = read_spec(files.spec(kind="change", lr=0.1, num_examples=4, epochs=1, batch_size=2, momentum=0.5))
    assert spec.local_steps() == LocalSettings(epochs=1, batch_size=2, momentum=0.5)
    (row,) = attack_files(files.model, files.updates[:1], spec, QUICK, files.out)
    assert row["knows"] == ["local-steps", "num-examples"]
    assert len(row["labels"]) == 4
    saved = tomllib.loads((files.out / "settings.toml").read_text())["spec"]
    assert (saved["epochs"], saved["weight_decay"], saved["batch_norm"]) == (1, 0.0, "average")


def test_the_defence_in_the_specification_is_known(files):
    rows = attack_files(files.model, files.updates, read_spec(files.spec(defence="none")), QUICK, files.out)
    assert {row["defence"] for row in rows} == {"none"}
    assert rows[0]["knows"] == ["defence", "num-examples"]


def test_public_images_come_from_the_data_set_in_the_specification(files):
    images = np.random.default_rng(0).random((12, 1, 8, 8), dtype=np.float32)
    for name, shape in (("public", images), ("large", images.repeat(2, 3))):
        labels = np.arange(12) % CLASSES
        np.savez(files.folder / f"{name}.npz", x_train=shape, y_train=labels, x_test=shape, y_test=labels)
    attack = "ggl:iterations=1,population=4"
    spec = read_spec(files.spec(public_data=str(files.folder / "public.npz")))
    rows = attack_files(files.model, files.updates, spec, attack, files.out)
    assert rows[0]["knows"] == ["num-examples", "public-data"]
    spec = read_spec(files.spec(public_data=str(files.folder / "large.npz")))
    with pytest.raises(ConfigError, match=r"images of shape \(1, 8, 8\), got \(1, 8, 16\)"):
        attack_files(files.model, files.updates, spec, attack, files.folder / "other")
    with pytest.raises(ConfigError, match=r"needs public_data, got none\. State it in the --spec file"):
        attack_files(files.model, files.updates, read_spec(files.spec()), attack, files.folder / "other")


def test_labels_may_differ_between_updates(files):
    spec = read_spec(files.spec(labels=[[label] for label in LABELS], num_examples=None))
    assert spec.num_examples == 1
    rows = attack_files(files.model, files.updates, spec, QUICK, files.out)
    assert [row["labels"] for row in rows] == [[label] for label in LABELS]


def test_npz_files_work_like_safetensors(files):
    path = files.folder / "u.npz"
    np.savez(path, **{name: g.numpy().astype(">f4") for name, g in files.gradients[0].items()})
    for name, tensor in read_tensors(path).items():
        torch.testing.assert_close(tensor.float(), files.gradients[0][name])


def test_normalisation_and_an_own_model_come_from_the_specification(files):
    own = files.folder / "own.py"
    own.write_text("from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))\n")
    net = create_model(f"{own}:net", SHAPE, CLASSES, seed=0)
    save_file(net.state_dict(), files.model)
    save_file(gradient(net, (files.images[0] - 0.5) / 0.25, torch.tensor([1])), files.updates[0])
    with trusting_code():
        spec = read_spec(files.spec(model=f"{own}:net", normalise="0.5/0.25"))
    (row,) = attack_files(files.model, files.updates[:1], spec, "idlg:iterations=200", files.out)
    found = load_file(files.out / "reconstruction.safetensors")["images"]
    assert row["converged"]
    torch.testing.assert_close(found[0], files.images[0], atol=0.05, rtol=0)


def test_metrics_can_be_chosen_and_be_your_own(gradveil, files):
    own = files.folder / "mine.py"
    own.write_text(
        "from dataclasses import dataclass\n"
        "from gradveil.metrics import Metric\n"
        "@dataclass(frozen=True)\n"
        "class Brightness(Metric):\n"
        '    """Difference of the mean brightness."""\n'
        "    higher_is_leakier = False\n"
        "    def measure(self, truth, guess):\n"
        "        return (truth - guess).mean((1, 2, 3)).abs()\n"
    )
    more = ("--truth", files.truth, "--metrics", f"psnr,rmse,{own}:Brightness")
    code, out, err = gradveil(*files.arguments(*more, attack=QUICK))
    assert code == 0, err
    assert "rmse" in out
    row = json.loads((files.out / "rows.jsonl").read_text().splitlines()[0])
    found = load_file(files.out / "reconstruction.safetensors")["images"]
    assert row["brightness"] == pytest.approx(float((found[0] - files.images[0]).mean().abs()), abs=1e-5)
    assert row["psnr"] == pytest.approx(-20 * np.log10(row["rmse"]), abs=1e-3)
    assert row["ssim"] is None  # not asked for
    assert tomllib.loads((files.out / "settings.toml").read_text())["metrics"] == ["psnr", "rmse", f"{own}:Brightness"]


def test_rows_have_the_columns_of_the_schema(files):
    (row, _) = attack_files(files.model, files.updates, read_spec(files.spec()), QUICK, files.out)
    assert list(row) == schema_of().keys("attack")


def test_several_local_steps_need_their_settings(files):
    """Matching attacks replay local training; the error comes from the attack, before it starts."""
    threat = ThreatModel.of("labels", "num-examples")
    images, labels = files.images[:, 0], torch.tensor(LABELS)
    protocol = Protocol(LocalSettings(epochs=2, batch_size=1), 0.1)
    seen = observe(
        files.net,
        [Batch(images, labels, torch.ones(2, dtype=torch.bool))],
        threat=threat,
        num_classes=CLASSES,
        protocol=protocol,
    )
    with pytest.raises(ThreatModelError, match="needs local-steps; add --knows labels,local-steps,num-examples"):
        build_attack(QUICK)(seen, torch.Generator())


# --- refused inputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_clases": 4}, "The specification has no setting 'num_clases'. Did you mean 'num_classes'?"),
        ({"shape": None, "kind": None}, "must state model, shape, num_classes, kind, got no shape and no kind"),
        ({"shape": [8, 8]}, "shape must be channels, height and width"),
        ({"shape": [1, 0, 8]}, "shape must be channels, height and width"),
        ({"shape": "x"}, "Setting shape of the specification must be of type"),
        ({"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ({"kind": "gradeint"}, "Unknown kind 'gradeint'. Did you mean 'gradient'?"),
        ({"kind": "change"}, "lr must be the clients' learning rate"),
        ({"lr": 0}, "lr must be in (0, 1e+38], got 0"),
        ({"num_examples": 0}, "num_examples must be at least 1, got 0"),
        ({"num_examples": None}, "Attack 'idlg' needs num_examples, got none. State it in the --spec file."),
        ({"labels": [4]}, "labels must be in [0, 3], got 4"),
        ({"labels": [-1]}, "labels must be in [0, 3], got -1"),
        ({"labels": [10**30]}, "labels must be in [0, 3]"),
        ({"labels": []}, "labels must be a list"),
        ({"num_examples": 4, "labels": [1]}, "labels must be those of the 4 images of num_examples, got 1"),
        ({"labels": [[1], [1, 2]]}, "labels must be a list, or lists of one length"),
        ({"labels": [1, 2]}, "labels must have shape (2, 1), got (2,)"),
        ({"labels": [0.5]}, "Setting labels of the specification must be of type"),
        ({"normalise": "dataset"}, "normalise must be imagenet, none or mean/std, got 'dataset'"),
        ({"normalise": "imagenet"}, "normalise must have a mean and a std for each of 1 channels"),
        ({"defence": "nonne"}, "Unknown defence 'nonne'. Did you mean 'none'?"),
        ({"model": "lenet6"}, "Unknown model 'lenet6'"),
        ({"model": "mlp"}, "must have the names and shapes of the network"),
        ({"num_classes": 5}, "wrong shape"),
        ({"momentum": 0.9}, "momentum is of several local steps, which need epochs or batch_size, got neither"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": 2}, "A gradient comes from one step"),
        ({"batch_size": 1, "batch_norm": "frozen"}, "Unknown batch_norm 'frozen'"),
    ],
)  # fmt: skip
def test_a_bad_specification(refused, changes, message):
    assert message in refused(**changes)


def test_a_specification_that_is_no_toml(files, gradveil):
    arguments = files.arguments(attack=QUICK)
    (files.folder / "spec.toml").write_text("model = ")
    code, out, err = gradveil(*arguments)
    assert (code, out) == (2, "")
    assert "must be valid TOML" in err
    (files.folder / "spec.toml").unlink()
    assert "There is no " in gradveil(*arguments)[2]
    assert not files.out.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--attack", "gss"), "Unknown attack 'gss'. Did you mean 'gs'?"),
        (("--attack", "gs:iteratoins=3"), "Did you mean 'iterations'?"),
        (("--seed", -1), "seed must be in [0, "),
        (("--device", "gpu"), "device must be one that torch can use here, got 'gpu'"),
        (("--update", "/nowhere/u.safetensors"), "There is no file '/nowhere/u.safetensors'. Check the path."),
        (("--model-file", "/nowhere/m.safetensors"), "There is no file '/nowhere/m.safetensors'."),
        (("--truth", "/nowhere/t.npz"), "There is no file '/nowhere/t.npz'."),
        (("--model-file", "m.pkl"), "safetensors.torch.save_file(tensors_by_name, 'm.safetensors')"),
        (("--update", "x" * 300), "There is no "),
    ],
)
def test_bad_arguments(refused, more, message):
    assert message in refused(*more)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.parametrize("name", ["u.pkl", "u.pickle", "U.PKL"])
def test_a_pickled_update_is_never_opened(refused, files, name):
    path = files.folder / name
    path.write_bytes(pickle.dumps(Bomb()))
    message = refused("--update", path)
    assert "never opened" in message
    assert "safetensors.torch.save_file(tensors_by_name, " in message


def test_a_pickle_under_another_name_is_never_opened(refused, files):
    for name in ("u.safetensors", "u"):
        (files.folder / name).write_bytes(pickle.dumps(Bomb()))
        assert "must be a whole safetensors file" in refused("--update", files.folder / name)
    for content in (pickle.dumps(Bomb()), b"", files.truth.read_bytes()[:-30]):
        (files.folder / "u.npz").write_bytes(content)
        assert "must be an .npz file of arrays" in refused("--update", files.folder / "u.npz")
    np.savez(files.folder / "u.npz", weight=np.array([Bomb()], dtype=object))
    assert "arrays of Python objects are not loaded" in refused("--update", files.folder / "u.npz")
    np.savez(files.folder / "u.npz", weight=np.array(["text"]))
    assert "it holds weight of type <U4" in refused("--update", files.folder / "u.npz")
    np.save(files.folder / "u.npy", np.zeros(3))
    (files.folder / "u.npy").rename(files.folder / "u.npz")
    assert "must be an .npz file of arrays" in refused("--update", files.folder / "u.npz")


def test_names_and_shapes_must_be_those_of_the_model(refused, files):
    first = next(iter(files.gradients[1]))
    save_file({f"strange.{name}": g for name, g in files.gradients[1].items()}, files.updates[1])
    assert "Update 1 must have the model's parameters" in refused()
    save_file(files.gradients[1] | {first: torch.zeros(2)}, files.updates[1])
    assert f"'{first}' of update 1 must have shape" in refused()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": np.zeros(3)}, "must hold an array 'images', got pictures"),
        ({"images": np.zeros((3, 1, 8, 8))}, "must have shape (2, 1, 1, 8, 8), got (3, 1, 8, 8)"),
        ({"images": np.zeros((2, 2, 1, 8, 8))}, "must have shape (2, 1, 1, 8, 8), got (2, 2, 1, 8, 8)"),
        ({"images": np.zeros((2, 1, 8, 9))}, "must have shape"),
        ({"images": np.float64(1)}, "must have shape"),
        ({"images": np.zeros((2, 0, 1, 8, 8))}, "must have shape"),
        ({"images": np.full((2, 1, 8, 8), 2.0)}, "must be bytes or numbers in [0, 1]"),
        ({"images": np.full((2, 1, 8, 8), np.nan)}, "must be bytes or numbers in [0, 1]"),
    ],
)
def test_a_truth_that_does_not_fit(refused, files, arrays, message):
    np.savez(files.truth, **arrays)
    assert message in refused("--truth", files.truth)


def test_a_used_folder_is_not_changed(gradveil, files):
    files.out.mkdir()
    (files.out / "mine.txt").write_text("mine")
    code, out, err = gradveil(*files.arguments(attack=QUICK))
    assert (code, out) == (2, "")
    assert "must be new or empty, got a folder with 'mine.txt'" in err
    assert [path.name for path in files.out.iterdir()] == ["mine.txt"]
    files.out = files.folder / "file"
    files.out.write_text("mine")
    assert "must be a folder that can be written" in gradveil(*files.arguments(attack=QUICK))[2]


def test_an_attack_that_fails_midway_exits_with_code_1_and_leaves_nothing(gradveil, files, monkeypatch):
    def fail(self, seen, rng):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr("gradveil.attacks.matching.Matching.run", fail)
    code, out, err = gradveil(*files.arguments(attack=QUICK))
    assert (code, out) == (1, "")
    assert err.rstrip().endswith("TrainingError: The attack failed while running: out of memory. Nothing was saved.")
    assert not files.out.exists()


def test_an_interrupted_attack_does_not_offer_to_resume(gradveil, files, monkeypatch):
    def stop(self, seen, rng):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradveil.attacks.matching.Matching.run", stop)
    code, out, err = gradveil(*files.arguments(attack=QUICK))
    assert (code, out) == (130, "")
    assert "Stopped. Nothing was saved." in err
    assert "--resume" not in err
    assert not files.out.exists()
