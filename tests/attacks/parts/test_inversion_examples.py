"""Examples are played with public images only, apart from held-out ones, and need not be played twice."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks.parts import inversion_examples
from gradveil.attacks.parts.inversion_examples import CHUNK, fingerprint, forget_parts, played_examples
from gradveil.defences import build_defence
from gradveil.errors import ConfigError
from gradveil.scratch import scratch_in
from gradveil.threat import Knowledge, PublicKnowledge, ThreatModel
from gradveil.threat.observe import observe
from gradveil.types import Batch


def batch(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(count, 1, 4, 4, generator=rng), torch.arange(count) % 3, torch.zeros(count).bool())


def watched(spec="prune:fraction=0.5", public=None, images=1, knows=("defence", "public-data", "num-examples")):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    return observe(
        network, [batch(images)], threat=ThreatModel.of(*knows), num_classes=3, defence=build_defence(spec),
        public=PublicKnowledge(public or batch(40, 1)),
    )  # fmt: skip


def test_examples_are_updates_of_public_images_as_the_defence_sends_them():
    seen = watched()
    found = played_examples(seen, 30, 1000, seed=0)
    assert found.images.shape == (30, 1, 1, 4, 4)
    for row in range(0, 30, 7):
        picture = Batch(found.images[row], found.labels[row], torch.ones(1).bool())
        sent = observe(
            seen.script.network, [picture], threat=seen.threat, num_classes=3, defence=seen.defence,
            public=PublicKnowledge(batch(1)),
        ).mean_gradients  # fmt: skip
        for name, rows in found.sketches.items():
            assert torch.allclose(rows[row], sent[name].flatten(1)[0], atol=1e-6)
    assert (found.sketches["1.weight"] == 0).float().mean() > 0.3  # pruned


def test_held_out_images_are_in_no_other_example():
    public = batch(40, 1)
    found = played_examples(watched(public=public), 40, 1000, seed=0)
    near = torch.cdist(found.images.flatten(1), public.images.flatten(1)).argmin(1)
    assert not set(near[found.held].tolist()) & set(near[~found.held].tolist())
    assert int(found.held.sum()) == 4


def test_batches_are_ordered_by_label():
    found = played_examples(watched(images=3), 12, 1000, seed=0)
    assert (found.labels.diff(dim=1) >= 0).all()


def test_a_killed_run_plays_the_rest_and_gets_the_same(tmp_path, monkeypatch):
    seen, calls = watched("gaussian:std=0.1"), []
    real = inversion_examples.rehearse

    def counted(*given):
        calls.append(1)
        return real(*given)

    monkeypatch.setattr(inversion_examples, "rehearse", counted)
    plain = played_examples(seen, CHUNK + 10, 1000, seed=0)
    with scratch_in(tmp_path):
        played_examples(seen, CHUNK + 10, 1000, seed=0)
        assert len(calls) == 4
        next(iter(sorted(tmp_path.glob("*.safetensors")))).write_bytes(b"cut")
        again = played_examples(seen, CHUNK + 10, 1000, seed=0)
        assert len(calls) == 5
        forget_parts(seen, CHUNK + 10, 1000, seed=0)
    assert not list(tmp_path.glob("*.safetensors"))
    assert all(torch.equal(again.sketches[name], rows) for name, rows in plain.sketches.items())


def test_the_fingerprint_knows_what_matters(tmp_path):
    seen = watched()
    base = fingerprint(seen, 1)
    assert base == fingerprint(watched(), 1)
    own = tmp_path / "mine.py"
    text = (
        "from dataclasses import dataclass\nfrom gradveil.defences import Defence\n"
        "@dataclass(frozen=True)\nclass Mine(Defence):\n    x: int = {}\n"
    )
    own.write_text(text.format(1))
    mine = fingerprint(watched(f"{own}:Mine"), 1)
    own.write_text(text.format(1) + "# another\n")
    others = [
        fingerprint(seen, 2),
        fingerprint(watched("prune:fraction=0.6"), 1),
        fingerprint(watched(public=batch(40, 2)), 1),
        fingerprint(seen.without(Knowledge.DEFENCE), 1),
        mine,
        fingerprint(watched(f"{own}:Mine"), 1),
    ]
    assert len({base, *others}) == 7
    moved = replace(seen, public={"guard": torch.ones(2)})
    assert fingerprint(moved, 1) != base
    auxiliary = [replace(seen, script=replace(seen.script, aux=batch(8, number))) for number in (3, 4)]
    sizes = [watched(images=2), replace(seen, clients=2)]
    assert len({base, *(fingerprint(other, 1) for other in (*auxiliary, *sizes))}) == 5


def test_too_few_or_misshapen_public_images_are_named():
    with pytest.raises(ConfigError, match="at least 20 public images, got 5"):
        played_examples(watched(public=batch(5)), 30, 100, 0)
    odd = Batch(torch.rand(30, 1, 5, 5), torch.zeros(30).long(), torch.zeros(30).bool())
    with pytest.raises(ConfigError, match="shape"):
        played_examples(watched(public=odd), 30, 100, 0)
