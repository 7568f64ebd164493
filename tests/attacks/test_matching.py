import re
import shutil
from dataclasses import replace

import pytest
import torch

from gradveil.attacks import matching
from gradveil.attacks.dlg import Dlg
from gradveil.attacks.gradinversion import Gradinversion
from gradveil.attacks.gs import Gs
from gradveil.attacks.idlg import Idlg
from gradveil.attacks.parts import search_step
from gradveil.errors import ConfigError, ThreatModelError
from gradveil.federated.protocol import LocalSettings, Protocol
from gradveil.metrics import align
from gradveil.models import create_model
from gradveil.progress import listening
from gradveil.threat import ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch
from tests.attacks.scene import psnr, run, scene

LOCAL = Protocol(LocalSettings(epochs=2, batch_size=1), 0.01)


def test_targets_do_not_disturb_each_other():
    _, _, seen = scene(targets=3)
    together = run(Gs(iterations=5, chunk=3), seen)
    apart = run(Gs(iterations=5, chunk=1), seen)
    assert torch.allclose(together.images, apart.images, atol=1e-4)


@pytest.mark.parametrize(("start", "needed"), [("class-average", "class-averages"), ("public", "public-data")])
def test_a_start_that_must_be_granted_is_asked_for_before_the_search(start, needed):
    _, _, seen = scene()
    attack = replace(Gs(iterations=1), start=start)
    assert {knowledge.value for knowledge in attack.needs} == {"num-examples", needed}
    with pytest.raises(ThreatModelError, match=rf"Attack 'gs' needs {needed}; add --knows .*{needed}"):
        run(attack, seen)
    assert replace(attack, start="grey").needs == Gs.needs


def test_the_best_restart_by_the_attackers_own_loss_is_kept(monkeypatch):
    _, _, seen = scene(targets=2)
    losses = torch.tensor([3.0, 1.0, 2.0, 0.5, 4.0, 9.0])  # three restarts of each of two targets

    def search_chunk(attack, steps, task, rng, first):
        images = torch.arange(6.0).view(6, 1, 1, 1, 1).expand(6, 1, 1, 8, 8) / 10
        return matching._Found(images, task.labels, losses, torch.ones(6), images.new_empty(0, 6, 1, 1, 8, 8), [""] * 6)

    monkeypatch.setattr(matching, "_search", search_chunk)
    result = run(Idlg(restarts=3), seen)
    assert result.loss.tolist() == [1.0, 0.5]
    assert result.images[:, 0, 0, 0, 0].tolist() == pytest.approx([0.1, 0.3])


def test_restarts_begin_at_different_points():
    _, _, seen = scene(targets=1)
    guesses = {run(Idlg(iterations=1), seen, seed).loss.item() for seed in range(3)}
    assert len(guesses) == 3


def test_iterates_are_kept_for_the_report():
    _, _, seen = scene()
    result = run(Gs(iterations=8, keep=4), seen)
    assert result.iterates.shape == (5, *result.images.shape)
    assert result.iterates.min() >= 0
    assert result.iterates.max() <= 1


def test_a_restart_that_diverged_never_wins(monkeypatch):
    _, _, seen = scene(targets=1)

    def search_chunk(attack, steps, task, rng, first):
        images = torch.arange(2.0).view(2, 1, 1, 1, 1).expand(2, 1, 1, 8, 8)
        losses = torch.tensor([torch.nan, 5.0])
        nothing = torch.ones(2)
        return matching._Found(images, task.labels, losses, nothing, images.new_empty(0, 2, 1, 1, 8, 8), ["", "chosen"])

    monkeypatch.setattr(matching, "_search", search_chunk)
    result = run(Idlg(restarts=2), seen)
    assert result.loss.tolist() == [5.0]
    assert result.why == ("chosen",)


def test_a_finished_target_leaves_and_the_others_continue(monkeypatch):
    truth, _, seen = scene(targets=3)
    sizes = []
    evaluate = search_step.SearchStep.evaluate

    def watch(step, flat, task):
        sizes.append(len(flat))
        return evaluate(step, flat, task)

    monkeypatch.setattr(search_step.SearchStep, "evaluate", watch)
    result = run(Gs(iterations=800, sign="none", schedule="cosine", tv=0.0, stop_below=1e-4), seen)
    assert sizes[0] == 3
    assert sizes[-1] < 3
    assert sizes == sorted(sizes, reverse=True)
    assert (result.loss <= 1e-4).all()
    assert psnr(truth.flatten(0, 1), result.images.flatten(0, 1)).min() > 18


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_an_update_of_another_size_than_stated_is_named(factor):
    _, _, seen = scene(targets=2)
    larger = {name: factor * tensor for name, tensor in seen.updates.items()}
    result = run(Gs(iterations=600, sign="none"), replace(seen, updates=larger))
    if factor == 1:
        assert result.why == ("", "")
    else:
        assert all(re.search(r"[34](\.\d+)? times as large .* number of steps", reason) for reason in result.why)


@pytest.mark.parametrize("local", ["unroll", "line", "once"])
@pytest.mark.parametrize("attack", [Dlg(iterations=12, restarts=2), Gs(iterations=200, sign="none")])
def test_images_are_reconstructed_from_several_local_steps_without_labels(attack, local):
    truth, _, seen = scene(targets=2, size=2, grants=("num-examples", "local-steps"), protocol=LOCAL)
    found = run(replace(attack, local=local), seen)
    start = run(replace(attack, local=local, iterations=1), seen)
    gain = [
        psnr(t, align(t, g)).mean() - psnr(t, align(t, s)).mean()
        for t, g, s in zip(truth, found.images, start.images, strict=True)
    ]
    assert min(gain) > 3


def test_several_steps_are_not_attacked_without_knowing_them():
    _, _, seen = scene(size=2, grants=("num-examples",), protocol=LOCAL)
    with pytest.raises(ThreatModelError, match="local-steps"):
        run(Gs(iterations=1), seen)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_compiled_search_is_the_same_search():
    _, _, seen = scene(targets=5)  # the last chunk is padded
    attack = Gs(iterations=5, chunk=3)
    plain, fast = (run(replace(attack, compile=way), seen) for way in ("off", "on"))
    assert torch.allclose(plain.images, fast.images, atol=1e-3)
    assert torch.allclose(plain.loss, fast.loss, rtol=1e-2, atol=1e-6)


def test_without_a_compiler_compile_auto_continues_and_compile_on_fails(monkeypatch):
    def fails(function, examples):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(search_step, "compiled", fails)
    _, _, seen = scene(targets=1)
    monkeypatch.setattr(matching, "_LONG", 1)
    assert run(Gs(iterations=2), seen).images.isfinite().all()
    with pytest.raises(ConfigError, match="no compiler here"):
        run(Gs(iterations=2, compile="on"), seen)


def test_chunks_that_stop_at_different_steps_keep_as_many_iterates():
    _, _, seen = scene(targets=3)
    result = run(Idlg(iterations=30, keep=30, chunk=1, stop_below=1e-4), seen)
    assert result.iterates.shape == (31, *result.images.shape)


def test_a_guess_that_explains_nothing_has_not_converged_however_small_the_gradient():
    _, _, seen = scene(targets=2)
    tiny = {name: 1e-4 * tensor for name, tensor in seen.updates.items()}
    assert not run(Idlg(iterations=1), replace(seen, updates=tiny)).converged.any()


def test_targets_that_leave_take_no_noise_from_the_others():
    _, _, seen = scene(targets=3)
    other = {name: tensor.clone() for name, tensor in seen.updates.items()}
    for tensor in other.values():
        tensor[1] = tensor[0] * 0.5
    attack = Gradinversion(iterations=60, restarts=1, stop_below=0.2)
    one, two = run(attack, seen), run(attack, replace(seen, updates=other))
    assert torch.allclose(one.images[[0, 2]], two.images[[0, 2]], atol=1e-4)


def test_a_picture_of_one_row_has_no_vertical_variation():
    network = create_model("mlp:hidden=4", (1, 1, 16), 3, 0)
    private = [Batch(torch.rand(1, 1, 1, 16), torch.tensor([1]), torch.zeros(1) > 0)]
    seen = observe(network, private, threat=ThreatModel.of("num-examples"), num_classes=3)
    assert run(Gs(iterations=3), seen).loss.isfinite().all()


@pytest.mark.parametrize("attack", [Dlg(iterations=2), Idlg(iterations=2), Gs(iterations=5)])
@pytest.mark.parametrize(("parts", "kept"), [("convolutions", "conv"), ("linear", "fc")])
def test_only_the_chosen_parts_are_matched(attack, parts, kept):
    _, _, seen = scene()
    rest = {name: tensor if name.startswith(kept) else 3 * tensor for name, tensor in seen.updates.items()}
    chosen = replace(attack, parts=parts)
    one, other = run(chosen, seen), run(chosen, replace(seen, updates=rest))
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.loss, other.loss)
    assert not torch.equal(run(attack, seen).loss, one.loss)


def test_the_linear_layer_alone_reveals_the_image():
    truth, _, seen = scene(targets=1)
    attack = Gs(iterations=400, sign="none", schedule="cosine", lr=0.3, parts="linear")
    assert psnr(truth[0], run(attack, seen).images[0]) > 20


def test_parts_that_a_network_lacks_are_refused():
    network = create_model("logistic", (1, 4, 4), 3, 0)
    private = [Batch(torch.rand(1, 1, 4, 4), torch.tensor([1]), torch.zeros(1) > 0)]
    seen = observe(network, private, threat=ThreatModel.of("num-examples"), num_classes=3)
    with pytest.raises(ConfigError, match="parts=convolutions must leave some tensor"):
        run(Gs(iterations=1, parts="convolutions"), seen)


def test_an_unknown_part_is_refused():
    with pytest.raises(ConfigError, match="parts"):
        Gs(parts="head")


def test_progress_is_reported_over_all_steps_and_chunks():
    _, _, seen = scene(targets=2)
    heard = []
    with listening(heard.append):
        run(Gs(iterations=4, chunk=1), seen)
    assert heard == [0, 0.125, 0.25, 0.375, 0.5, 0.5, 0.625, 0.75, 0.875, 1]
