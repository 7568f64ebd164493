import pytest
import torch

from gradveil.attacks.grnn import Grnn
from gradveil.defences import build_defence
from gradveil.errors import ConfigError
from gradveil.metrics import align
from tests.attacks.scene import psnr, run, scene

QUICK = {"width": 8, "noise": 16, "lr": 1e-3}


def close(truth, result):
    return psnr(truth.flatten(0, 1), result.images.flatten(0, 1))


@pytest.mark.parametrize("wasserstein", ["norm", "sliced", "none"])
def test_finds_image_and_label_of_every_target(wasserstein):
    truth, labels, seen = scene(targets=3, grants=("num-examples",))
    result = run(Grnn(iterations=250, wasserstein=wasserstein, **QUICK), seen)
    start = run(Grnn(iterations=1, **QUICK), seen)
    assert torch.equal(result.labels, labels)
    assert close(truth, result).mean() > max(20, close(truth, start).mean() + 5)
    assert (close(truth, result) > close(truth, start)).all()
    assert (result.loss < start.loss / 4).all()


def test_a_batch_has_one_generator_per_image():
    truth, _, seen = scene(targets=1, size=2, grants=("num-examples",))
    result = run(Grnn(iterations=300, **QUICK), seen)
    assert psnr(truth[0], align(truth[0], result.images[0])).mean() > 14


def test_several_targets_at_once_are_searched_as_each_would_be_alone():
    """With one iteration the loss is that of the start, and of the first step: rows never mix."""
    _, _, seen = scene(targets=3)
    attack = Grnn(iterations=2, chunk=3, restarts=1, **QUICK)
    search = attack.search(seen)
    flat = search.maker.begin(3, torch.Generator().manual_seed(0))
    together = search.maker.pictures(flat, None)
    alone = torch.cat([search.maker.pictures(row[None], None) for row in flat])
    assert torch.allclose(together, alone, atol=1e-6)


def test_iterates_are_kept_and_the_search_stops_when_a_target_is_found():
    _, _, seen = scene(targets=2)
    result = run(Grnn(iterations=40, keep=4, **QUICK), seen)
    assert result.steps == (0, 10, 20, 30, 40)
    assert result.iterates.shape == (5, 2, 1, 1, 8, 8)
    early = run(Grnn(iterations=40, keep=4, stop_below=0.9, **QUICK), seen)
    assert (early.loss >= result.loss).all()
    assert (early.loss > result.loss).any()


def test_an_attacker_who_knows_the_pruning_reconstructs_better():
    truth, _, seen = scene(grants=("num-examples",), defence=build_defence("prune:fraction=0.7"))
    _, _, adaptive = scene(grants=("num-examples", "defence"), defence=build_defence("prune:fraction=0.7"))
    plain, knowing = (run(Grnn(iterations=250, **QUICK), each) for each in (seen, adaptive))
    assert close(truth, knowing).mean() > close(truth, plain).mean() + 1


@pytest.mark.parametrize(
    "bad",
    [
        {"start": "uniform"},
        {"wasserstein": "true"},
        {"tv": -1.0},
        {"lr": 0.0},
        {"schedule": "linear"},
        {"noise": 0},
        {"width": 0},
    ],
)
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Grnn(**bad)
