"""Blind guesses, identification and scores image by image, compared with naive loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gradveil.attacks.gs import Gs
from gradveil.audits import audit
from gradveil.audits.blind import AVERAGE, GREY, MEAN, judged, yardstick
from gradveil.audits.views import private_batches
from gradveil.data import load_dataset
from gradveil.metrics.psnr import Psnr
from gradveil.metrics.ssim import Ssim
from gradveil.report.blind import blind_lines
from tests.audits.conftest import QUICK


@pytest.fixture
def dataset(pictures):
    return load_dataset(str(pictures))


@pytest.fixture(scope="session")
def similar(tmp_path_factory):
    """Return a set of images that nearly all look like the average of their class, as X-rays do."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.random((2, 1, 4, 4)))
    means = torch.nn.functional.interpolate(coarse, size=(16, 16), mode="bicubic").clamp(0.05, 0.95).numpy()
    labels = np.arange(160) % 2
    images = means[labels] + 0.03 * rng.standard_normal((160, 1, 16, 16))
    images = (images.clip(0, 1) * 255).astype(np.uint8)
    path = tmp_path_factory.mktemp("similar") / "similar.npz"
    np.savez(path, x_train=images[:80], y_train=labels[:80], x_test=images[80:], y_test=labels[80:])
    return path


def test_the_class_average_by_hand(dataset, small):
    targets = torch.cat([batch.images for batch in private_batches(small(), dataset)])
    rule = yardstick(dataset, targets, 0)
    for label in range(3):
        of_class = [
            image / 255 for image, own in zip(dataset.test.images, dataset.test.labels, strict=True) if own == label
        ]
        assert np.allclose(rule.averages[label], sum(of_class) / len(of_class), atol=1e-6)
    assert np.allclose(rule.mean, dataset.test.images.mean(0) / 255, atol=1e-6)


def test_no_target_is_among_the_other_images(dataset, small):
    targets = torch.cat([batch.images for batch in private_batches(small(targets=5), dataset)])
    others = yardstick(dataset, targets, 0).others
    assert len(others) == 60 - 5 + 20  # all that are there: training images first, then public ones
    assert torch.cdist(targets.flatten(1), others.flatten(1)).min() > 0


def test_without_public_images_the_blind_guess_is_grey(dataset, small):
    only = type(dataset)(**vars(dataset) | {"test": dataset.train})
    rule = yardstick(only, torch.zeros(1, 1, 8, 8), 0)
    assert rule.name(True) == GREY
    assert rule.guess(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]), True).eq(0.5).all()


def test_rows_have_the_figures_of_a_naive_loop_over_images(dataset, small):
    settings = small(images=4, targets=2)
    private = private_batches(settings, dataset)
    truth, labels = (torch.stack([getattr(batch, what) for batch in private]) for what in ("images", "labels"))
    rule = yardstick(dataset, truth.flatten(0, 1), 0)
    guess = truth + torch.linspace(0, 0.6, 8).view(2, 4, 1, 1, 1) * torch.randn(
        truth.shape, generator=torch.Generator()
    )
    guess[1, 3] = torch.nan
    rows = judged(truth, guess, labels, [True, False], rule, settings)
    for number, row in enumerate(rows):
        psnrs, ssims, blind, passed, named = [], [], [], 0, 0
        for image in range(4):
            true, mine = truth[number, image][None], guess[number, image][None]
            mean = rule.averages[labels[number, image]] if number == 0 else rule.mean
            # averages of one class are alike, so that only a batch of several classes could be matched otherwise
            blind.append((Psnr()(true, mean[None]).item(), Ssim()(true, mean[None]).item()))
            if mine.isfinite().all():
                psnrs.append(Psnr()(true, mine).item())
                ssims.append(Ssim()(true, mine).item())
                errors = [((other - mine[0].clamp(0, 1)) ** 2).mean() for other in rule.others]
                named += all(((true - mine.clamp(0, 1)) ** 2).mean() < error for error in errors)
                passed += ssims[-1] >= max(0.5, blind[-1][1] + 0.02) and psnrs[-1] >= blind[-1][0] + 2
        assert row["images"] == 4
        assert row["images_recognisable"] == passed
        assert row["identified"] == named / 4
        assert row["candidates"] == len(rule.others) + 1
        assert row["blind"] == (AVERAGE, MEAN)[number]
        assert row["image_psnr"] == pytest.approx(sorted(psnrs, reverse=True), abs=1e-4)
        assert len(row["image_ssim"]) == len(psnrs)
        if number:
            assert row["blind_psnr"] == pytest.approx(np.mean([psnr for psnr, _ in blind]))
        else:  # matching may only help the blind guess
            assert row["blind_mse"] <= np.mean([10 ** (-psnr / 10) for psnr, _ in blind]) + 1e-9
    assert {0, 4} != {row["images_recognisable"] for row in rows}


def never_looking(dataset):
    """Return the `run` of an attack whose guess is the average of the clients' images, whatever they sent."""
    images, labels = torch.from_numpy(dataset.train.images) / 255, torch.from_numpy(dataset.train.labels)
    means = torch.stack([images[labels == label].mean(0) for label in range(dataset.num_classes)])
    search = Gs.run

    def run(self, seen, rng):
        found = search(self, seen, rng)
        return replace(found, images=means[seen.labels], iterates=found.iterates[:0], steps=())

    return run


def test_an_attack_that_never_reads_the_update_recovers_nothing(small, similar, tmp_path, monkeypatch):
    dataset = load_dataset(str(similar))
    monkeypatch.setattr(Gs, "run", never_looking(dataset))
    settings = small(
        dataset=str(similar), defences="none,gaussian:std=1", targets=16, rounds=0, attacks="gs:iterations=2"
    )
    result = audit(settings, tmp_path / "run", workers=0)
    (blind,) = blind_lines(result.rows, result.schema)
    assert blind["ssim"] > 0.5  # by SSIM alone all would be recognisable
    for line in result.summary:
        assert line["ssim"] > 0.5
        assert (line["recognisable"], line["images"]) == (0, 16)
        assert line["identified"] < 0.3


def test_a_run_says_it_everywhere(gradveil, pictures, tmp_path):
    command = ["audit", "--dataset", pictures, "--attacks", QUICK, "--targets", 2, "--images", 2, "--rounds", 0]
    ended = gradveil(*command, "--workers", 0, "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    table = ended.out.splitlines()
    assert next(line for line in table if "none" in line or "blind guess" in line).count("blind guess") == 1
    assert any(" of 4" in line for line in table)
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.index('data-head="Defence">blind guess') < page.index('data-head="Defence">none')
    assert "is what someone has who never saw the update" in page
    assert "chance is" in page
