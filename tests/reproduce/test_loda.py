"""The experiments of the LODA paper at scale smoke, on real data."""

import json
import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from gradveil.attacks.encodings import Encodings
from gradveil.data import load_dataset
from gradveil.defences import Defence
from gradveil.models import create_model
from gradveil.models.weights import load_weights
from gradveil.reproduce import loda_images, papers
from gradveil.reproduce.base import Lab, run_experiment
from gradveil.reproduce.loda_images import LodaScene, _paired, accuracy_under, extractor
from gradveil.types import Batch

PAPER = papers()["loda"]


def smoke(name, out, data_root):
    heard = []
    lab = Lab(out / name, "smoke", data_root=data_root, workers=0, progress=lambda share, doing: heard.append(share))
    document = run_experiment(PAPER, name, lab)
    assert heard[-1] == 1
    assert all(0 <= share <= 1 for share in heard)
    assert json.loads((lab.out / "results.json").read_bytes()) == document
    return document["rows"], lab.out


def test_all_tables_and_figures_of_the_paper_are_there():
    assert list(PAPER.experiments) == ["1", "2", "3", "4", "5", "6", "7", "fig2", "encodings"]


def test_the_extractor_is_trained_on_the_other_data_set(tmp_path, monkeypatch):
    asked, digits = [], load_dataset("mnist-5k")

    def load(name, root):
        asked.append(name)
        return digits

    monkeypatch.setattr(loda_images, "load_dataset", load)
    lab = Lab(tmp_path, "smoke", data_root=tmp_path)
    nothing = Batch(torch.empty(0), torch.empty(0), torch.empty(0))
    files = [extractor(lab, LodaScene(name, *[nothing] * 4)) for name in ("cifar10", "svhn", "cifar10")]
    assert asked == ["svhn", "cifar10"]  # each is trained once
    assert files[0] == files[2] != files[1]
    load_weights(create_model("resnet20", digits.shape, 10, seed=9), files[0])
    (tmp_path / "svhn.npz").touch()
    assert loda_images.svhn(lab) == str(tmp_path / "svhn.npz")


def test_accuracy_depends_on_the_training_labels():
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (200,), generator=rng)
    patterns = torch.rand(10, 3, 8, 8, generator=rng)
    images = (patterns[labels] + 0.1 * torch.rand(200, 3, 8, 8, generator=rng)).clamp(0, 1)
    batch = Batch(images, labels, torch.zeros(200) > 0)
    scene = LodaScene("patterns", batch[:1], batch[:100], batch[100:], batch[:5])
    before = torch.get_rng_state()
    assert accuracy_under(Defence(), scene, "resnet20:width=4", 8, 0) > 0.7
    assert torch.equal(before, torch.get_rng_state())
    wrong = Batch(batch.images, labels.roll(1), batch.sensitive)
    assert accuracy_under(Defence(), scene._replace(learn=wrong[:100]), "resnet20:width=4", 8, 0) < 0.5


def test_guesses_keep_their_order_unless_images_were_mixed():
    truth = torch.eye(4).view(4, 1, 2, 2)
    turned = truth.roll(1, 0)
    assert torch.equal(_paired(truth, turned, mixed=False), turned)
    assert torch.equal(_paired(truth, turned, mixed=True), truth)
    twice = _paired(truth, truth[[0, 0, 0, 1]], mixed=True)
    assert len(torch.unique(twice, dim=0)) == 2  # assigned: no guess serves two images
    assert twice.flatten(1).sum(0).tolist() == [3, 1, 0, 0]
    assert torch.equal(_paired(truth, torch.cat([turned, turned + 0.1]), mixed=True), truth)


@pytest.mark.parametrize("spec", ["none", "mixup:k=2,pool=data", "prune:fraction=0.5"])
def test_the_weight_of_total_variation_is_best_for_public_images(tmp_path, monkeypatch, spec):
    rng = torch.Generator().manual_seed(0)
    batch = Batch(torch.rand(12, 3, 32, 32, generator=rng), torch.arange(12) % 10, torch.zeros(12) > 0)
    private = replace(batch, images=torch.full_like(batch.images, torch.nan))  # private images must not be used
    scene = LodaScene("noise", private[:6], private, batch, batch)

    class Rehearsed(NamedTuple):
        tv: float

        def run(self, seen, rng):
            found = Encodings().run(seen, rng)
            return replace(found, images=found.images + 0.1 * abs(math.log10(self.tv) + 3) + 0.01)

    monkeypatch.setattr(loda_images, "_inversion", lambda lab, defence, tv, adaptive: Rehearsed(tv))
    assert loda_images.searched_tv(Lab(tmp_path, "smoke"), scene, spec) == 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1", "2", "3", "4", "5", "6", "7", "fig2", "encodings"])
def test_an_experiment_runs(tmp_path, real_data, name):
    rows, out = smoke(name, tmp_path, real_data)
    figures = [value for row in rows for key, value in row.items() if isinstance(value, float)]
    assert len(figures) >= len(rows)
    assert all(math.isfinite(value) for value in figures)
    if name in "12":
        assert [row["defence"] for row in rows][-2:] == ["LODA_1", "LODA_2"]
        assert all(row["psnr"] <= row["psnr_max"] for row in rows)
    if name in "34":
        assert rows[-1]["defence"] == "LODA_3"
    if name == "fig2":
        assert (out / "pictures.png").stat().st_size > 1000
