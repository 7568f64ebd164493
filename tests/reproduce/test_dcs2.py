"""The tables of the DCS2 paper, with attacks and trainings replaced, and one table at scale smoke."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from gradveil.data import Split
from gradveil.defences import build_defence
from gradveil.engines.simulation import Simulation
from gradveil.metrics.ssim import gaussian_window
from gradveil.reproduce import dcs2, dcs2_training, papers
from gradveil.reproduce.base import Lab, run_experiment
from gradveil.reproduce.dcs2_attacks import attack_case, authors_scores, class_averages, make_case, scores
from gradveil.reproduce.dcs2_training import (
    DEFENDED,
    TASKS,
    Accuracy,
    Images,
    load_images,
    partition_of,
    resized,
    train,
    training,
)
from gradveil.types import Batch
from tests.reproduce.invented import invented

PAPER = papers()["dcs2"]
SHAPES = {"cifar10": (3, 32, 32), "faces-lfw.npz": (1, 64, 64), "tiny-imagenet-1600.npz": (3, 64, 64)}


@pytest.fixture
def no_files(monkeypatch):
    """Replace every data set by random images."""

    def load(spec, root=None):
        return invented(spec, SHAPES.get(spec.rpartition("/")[2], (1, 28, 28)), each=40)

    for module in (dcs2, dcs2_training):
        monkeypatch.setattr(module, "load_dataset", load)


@pytest.fixture
def no_work(monkeypatch, no_files):
    """Replace attacks by grey images, skip training, and return the list of requested attacks and trainings."""
    asked = []

    def attack(case, defence, attack, *, adaptive, seed):
        asked.append((defence, attack, adaptive))
        return torch.full_like(case.truth, 0.5)

    def trained(lab, settings, images, progress):
        asked.append(settings)
        progress(1.0)
        return Accuracy(0.8, 0.9)

    monkeypatch.setattr(dcs2, "attack_case", attack)
    monkeypatch.setattr(dcs2, "train", trained)
    monkeypatch.setattr(dcs2, "picture_lines", lambda lines: Figure())
    return asked


def played(name, out, scale="smoke", data_root=None):
    heard = []
    lab = Lab(out / name, scale, data_root=data_root, workers=0, progress=lambda share, doing: heard.append(share))
    document = run_experiment(PAPER, name, lab)
    assert heard == sorted(heard)
    assert heard[-1] == 1
    assert json.loads((lab.out / "results.json").read_bytes()) == document
    return document


def test_all_tables_of_the_paper_are_there():
    assert list(PAPER.experiments) == ["1", "2", "3", "4", "5", "6", "7", "9", "10", "11"]


def test_baselines_have_the_papers_settings():
    strengths = {name: [build_defence(spec) for spec in task.defences.values()][1:4] for name, task in TASKS.items()}
    found = {name: (noise.std, prune.fraction, soteria.prune) for name, (noise, prune, soteria) in strengths.items()}
    assert found == {
        "mnist": (0.01, 0.7, 0.2), "cifar10": (0.001, 0.9, 0.5), "faces": (0.001, 0.7, 0.7), "tiny": (0.5, 0.7, 0.9),
    }  # fmt: skip
    own = {name: build_defence(task.defences["DCS2"]) for name, task in TASKS.items()}
    assert {defence.lambda_g for defence in own.values()} == {0.7}
    assert [(own[n].lambda_x, own[n].lambda_z) for n in own] == [(0.01, 0.01), (0.01, 0.01), (0.01, 0.1), (0.001, 0.01)]


def test_training_at_full_scale_has_the_papers_settings(tmp_path):
    lab = Lab(tmp_path, "full")
    data = invented("mnist", each=500)
    settings = training(lab, TASKS["mnist"], Images(data, data), "dcs2")
    assert (settings.clients, settings.rounds, settings.batch_size, settings.epochs) == (10, 200, 64, 1)
    assert (settings.lr, settings.lr_decay, settings.momentum) == (0.01, 0.99, 0.9)
    assert (settings.partition, settings.defence, settings.defended) == ("iid:images=200", "dcs2", (5,))
    everyone = training(lab, TASKS["mnist"], Images(data, data), "dcs2", everyone=True)
    assert (everyone.defended, everyone.sensitive) == ((), "1.0")


@pytest.mark.parametrize("task", TASKS)
def test_public_images_belong_to_no_client(tmp_path, no_files, task):
    lab = Lab(tmp_path, "smoke")
    images = load_images(lab, TASKS[task])
    case = make_case(images, TASKS[task].model(lab), partition_of(lab, TASKS[task], images), 3, 0)
    assert len(case.private) == 3
    assert all(bool(batch.sensitive.all()) for batch in case.private)
    public = {image.numpy().tobytes() for image in case.public.images}
    assert not any(image.numpy().tobytes() in public for image in case.truth[:, 0])
    assert len(images.public.train) + len(images.data.train) == 400


def test_images_are_resized_and_converted_to_grey():
    colours = invented("cifar10", (3, 8, 8), each=2)
    grey = resized(colours, 4, grey=True)
    assert grey.shape == (1, 4, 4)
    assert len(grey.mean) == 1
    flat = Split(np.full((2, 3, 8, 8), 7, np.uint8), np.zeros(2, np.int64))
    assert (resized(dataclasses.replace(colours, train=flat), 4).train.images == 7).all()
    assert resized(colours, 8) is colours


def test_an_empty_class_gets_the_average_of_all_images():
    images = torch.tensor([0.0, 0.2, 0.7]).view(3, 1, 1, 1)
    found = class_averages(Batch(images, torch.tensor([0, 0, 2]), torch.zeros(3) > 0), 3).flatten()
    assert found.tolist() == pytest.approx([0.1, 0.3, 0.7])


def test_table_1(tmp_path, no_work):
    document = played("1", tmp_path)
    rows = document["rows"]
    assert {row["dataset"] for row in rows} == {"MNIST", "CIFAR10"}
    plain = [row for row in rows if row["attacker"] == "plain" and row["dataset"] == "MNIST"]
    assert [row["paper_psnr"] for row in plain] == [59.20, 35.38, 14.13, 9.67, 7.84]
    assert [row["paper_accuracy"] for row in plain] == [0.8716, 0.8691, 0.8691, 0.8694, 0.8698]
    assert all((row["accuracy"], row["accuracy_sensitive"]) == (0.8, 0.9) for row in plain)
    assert all(row["accuracy_all_defend"] == 0.8 for row in plain)
    knowing = [row for row in rows if row["attacker"] == "knows it"]
    assert {row["paper_name"] for row in knowing} == {"DP-Gaussian", "Prune", "Soteria", "DCS2"}
    assert all(row["accuracy"] is None and row["paper_psnr"] is None for row in knowing)
    asked = [entry for entry in no_work if isinstance(entry, tuple)]
    attacks = {attack for _, attack, _ in asked}
    plain = {"gs:sign=none,boxed=false,iterations=30", "gs:sign=none,boxed=false,iterations=3"}
    assert attacks == plain | {f"{attack},adapt=joint" for attack in plain}
    joint = [row["paper_name"] for row in rows if row["attacker"] == "searches both"]
    assert joint == ["DCS2"] * 2
    assert {defence.partition(":")[0] for defence, attack, _ in asked if "joint" in attack} == {"dcs2"}
    trainings = [entry for entry in no_work if not isinstance(entry, tuple)]
    assert len(trainings) == 15  # five on CIFAR-10, and ten on MNIST: with one client and with all clients defending
    assert {entry.defended for entry in trainings} == {(), (DEFENDED,)}
    assert (tmp_path / "1" / "pictures-mnist.png").exists()


def test_the_imprint_attack_has_no_adaptive_attacker(tmp_path, no_work):
    rows = played("2", tmp_path)["rows"]
    imprinted = [row for row in rows if row["dataset"] == "TinyImageNet"]
    assert [row["paper_ssim"] for row in imprinted] == [1.00, 1.00, 0.91, 1.00, 0.79]
    assert {row["attacker"] for row in imprinted} == {"plain"}
    assert {entry[1] for entry in no_work if isinstance(entry, tuple) and "imprint" in entry[1]} == {dcs2.IMPRINT}
    shares = played("3", tmp_path)["rows"]
    assert [build_defence(row["defence"]).lambda_g for row in shares] == [0.5, 0.7, 1.0]


@pytest.mark.parametrize(("table", "names"), [("4", ["None", "DCS2"]), ("11", list(TASKS["mnist"].defences))])
def test_the_attack_starts_from_class_averages(tmp_path, no_work, table, names):
    rows = played(table, tmp_path)["rows"]
    assert [row["paper_name"] for row in rows if row["attacker"] == "plain"] == names
    assert all("start=class-average" in attack for _, attack, _ in no_work)


def test_tables_5_7_9_and_10(tmp_path, no_work):
    starts = played("5", tmp_path)["rows"]
    assert [build_defence(row["defence"]).start for row in starts if row["attacker"] == "plain"] == [
        "other", "mixup", "noise",
    ]  # fmt: skip
    both = next(row for row in played("7", tmp_path)["rows"] if row["paper_name"] == "Prune & DCS2")
    assert both["paper_psnr"] == 6.08
    assert [part.name for part in build_defence(both["defence"]).defences] == ["dcs2", "prune"]
    nine = {row["paper_name"]: row["paper_psnr"] for row in played("9", tmp_path)["rows"] if row["attacker"] == "plain"}
    assert nine == {"None": 20.41, "DCS2": 8.04, "ATS": 19.68}
    no_work.clear()
    played("10", tmp_path)
    assert {entry.partition for entry in no_work if not isinstance(entry, tuple)} == {"by-class:classes=2,per_class=10"}


def test_concealed_faces_start_from_another_data_set(tmp_path, no_files, monkeypatch):
    cases = []

    def attack(case, defence, attack, *, adaptive, seed):
        cases.append(case)
        assert attack.startswith("ggl:")
        return case.truth

    monkeypatch.setattr(dcs2, "attack_case", attack)
    monkeypatch.setattr(dcs2, "train", lambda *rest: Accuracy(0.5, 0.5))
    monkeypatch.setattr(dcs2, "picture_lines", lambda lines: Figure())
    rows = played_quietly("6", tmp_path)
    assert build_defence(rows[-1]["defence"]).start == "aux"
    faces = load_images(Lab(tmp_path, "smoke"), TASKS["faces"]).public.train.images
    known, starts = (
        (images * 255).round().numpy().astype(np.uint8) for images in (cases[0].public.images, cases[0].aux.images)
    )
    assert np.array_equal(known, faces)  # the attacker still knows faces
    assert starts.shape == faces.shape == (len(faces), 1, 32, 32)
    assert not np.array_equal(starts, faces)


def played_quietly(name, out):
    return run_experiment(PAPER, name, Lab(out / name, "smoke", workers=0))["rows"]


def test_noise_stops_faint_rows_only(tmp_path):
    lab = Lab(tmp_path, "smoke")
    images = load_images(lab, TASKS["mnist"])
    case = make_case(images, "lenet5", partition_of(lab, TASKS["mnist"], images), 2, 0)

    def psnr(defence, attack):
        return scores(case, attack_case(case, defence, attack, adaptive=False, seed=0), None)["psnr"]

    noise = "gaussian:std=0.1,where=gradient"
    assert psnr("none", "imprint:gain=1e-3") > 60
    assert psnr(noise, "imprint:gain=1e-3") < 20
    assert psnr(noise, "imprint") > 60


def test_one_client_defends_in_a_real_training(tmp_path):
    lab, heard = Lab(tmp_path, "smoke", workers=0), []
    images = load_images(lab, TASKS["mnist"])
    assert len(set(images.data.test.labels.tolist())) == 10
    settings = dataclasses.replace(training(lab, TASKS["mnist"], images, "dcs2"), lr=0.3)
    assert settings.defence == "dcs2:steps=1"
    found = train(lab, settings, images, heard.append)
    assert heard == [0.5, 1.0]
    with Simulation(settings, dataset=images.data, aux=images.public, workers=0) as simulation:
        assert simulation.data.count("sensitive", None) == 20
        last = list(simulation.run())[-1]
    assert found == Accuracy(last["accuracy"], last["accuracy_sensitive"])


@pytest.mark.slow
def test_table_4_at_scale_smoke(tmp_path):
    rows = played("4", tmp_path)["rows"]
    none, plain, knowing, joint = rows
    assert none["psnr"] > plain["psnr"]
    assert (knowing["attacker"], joint["attacker"]) == ("knows it", "searches both")


def test_the_authors_ssim_counts_windows_that_reach_beyond_the_image():
    rng = torch.Generator().manual_seed(0)
    truth, guess = torch.rand(2, 3, 1, 14, 12, generator=rng).double()
    weights = gaussian_window(11)
    window = weights[:, None] * weights

    def mean(image, row, column):
        """By hand: pixels outside of the image are 0."""
        total = 0.0
        for down in range(11):
            for right in range(11):
                y, x = row + down - 5, column + right - 5
                if 0 <= y < 14 and 0 <= x < 12:
                    total += float(window[down, right] * image[y, x])
        return total

    def slow(x, y):
        found = []
        for row in range(14):
            for column in range(12):
                a, b = mean(x, row, column), mean(y, row, column)
                aa, bb, ab = (
                    mean(x * x, row, column) - a * a,
                    mean(y * y, row, column) - b * b,
                    mean(x * y, row, column) - a * b,
                )
                found.append((2 * a * b + 1e-4) * (2 * ab + 9e-4) / ((a * a + b * b + 1e-4) * (aa + bb + 9e-4)))
        return sum(found) / len(found)

    by_hand = sum(slow(x[0], y[0]) for x, y in zip(truth, guess, strict=True)) / 3
    found = authors_scores(truth, guess, None)
    assert found["ssim_authors"] == pytest.approx(by_hand, rel=1e-3)
