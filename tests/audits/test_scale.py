"""Updates of hundreds of images: attacks that can't search them are left out before any work, the others run."""

import json

import numpy as np
import pytest

from gradveil.audits import audit
from gradveil.audits.plan import plan
from gradveil.audits.scale import left_out
from gradveil.data import load_dataset
from gradveil.errors import ConfigError

LARGE = {
    "protocol": "fedavg", "clients": 2, "rounds": 1, "targets": 1, "batch_size": 32, "epochs": 2,
    "knows": "labels,num-examples,local-steps",
}  # fmt: skip


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    """Return the path of a data set with 300 training images, 150 for each of two clients."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (360, 1, 8, 8), dtype=np.uint8)
    labels = np.arange(360) % 3
    path = tmp_path_factory.mktemp("data") / "many.npz"
    np.savez(path, x_train=images[:300], y_train=labels[:300], x_test=images[300:], y_test=labels[300:])
    return str(path)


def reasons(settings):
    return left_out(settings, load_dataset(settings.dataset))


def test_a_search_is_left_out_above_its_number_of_images_and_not_below(many, small):
    large = small(dataset=many, attacks="gs,labels", **LARGE)
    assert list(reasons(large)) == ["gs"]
    assert "at most 128 images per update, got 150" in reasons(large)["gs"]
    assert "--partition iid:images=8" in reasons(large)["gs"]
    assert reasons(small(dataset=many, attacks="gs,labels", partition="iid:images=128", **LARGE)) == {}
    assert reasons(small(dataset=many, attacks="gs,labels", protocol="lab")) == {}


def test_a_search_that_simulates_too_many_local_steps_is_left_out_unless_it_simulates_none(many, small):
    steps = LARGE | {"batch_size": 1, "epochs": 20, "partition": "iid:images=60"}
    found = reasons(small(dataset=many, attacks="gs,gs:local=once,representations", **steps))
    assert list(found) == ["gs"]
    assert "at most 1,000 local steps, got 1,200" in found["gs"]


def test_a_batch_larger_than_the_layer_is_wide_is_left_out_by_name(many, small):
    lab = {"dataset": many, "protocol": "lab", "clients": 2, "rounds": 1, "targets": 1, "images": 140}
    found = reasons(small(attacks="cpa,spear,standard", model="mlp:hidden=100", **lab))
    assert list(found) == ["cpa", "spear"]
    assert "smaller than the Linear layer is wide (100), got 140" in found["cpa"]
    assert "smaller than the first layer is wide (100), got 140" in found["spear"]
    assert reasons(small(attacks="cpa,spear,standard", model="mlp:hidden=200", **lab)) == {}


def test_only_attacked_clients_count(many, small):
    unequal = LARGE | {"partition": "label-parts"}  # one client has 100 images, the other 200
    assert len(reasons(small(dataset=many, attacks="gs,labels", **unequal | {"targets": 2}))) == 1
    sizes = [len(reasons(small(dataset=many, attacks="gs,labels", seed=seed, **unequal))) for seed in range(6)]
    assert set(sizes) == {0, 1}


def test_an_error_only_if_nothing_is_left(many, small, tmp_path):
    with pytest.raises(ConfigError, match=r"No attack can run: Attack 'gs' can search at most 128.*labels"):
        audit(small(dataset=many, attacks="gs", **LARGE), tmp_path / "run", workers=0)
    assert not (tmp_path / "run").exists()


def test_a_left_out_attack_needs_no_knowledge_and_has_no_cells(many, small):
    settings = small(dataset=many, attacks="gs,labels", **LARGE)
    assert {cell.attack for cell in plan(settings, {"gs": "why"})} == {"", "labels"}


def test_the_rest_runs_and_the_folder_says_what_did_not(many, small, tmp_path):
    settings = small(dataset=many, attacks="gs,labels", **LARGE | {"partition": "label-parts", "targets": 2})
    result = audit(settings, tmp_path / "run", workers=0)
    assert list(result.left_out) == ["gs"]
    assert not result.failed
    rows = [row for row in result.rows if row["kind"] == "privacy"]
    assert {row["attack"] for row in rows} == {"labels"}
    assert json.loads((tmp_path / "run" / "plan.json").read_bytes())["left_out"] == result.left_out
    for row in rows:
        assert row["knows"] == ["local-steps", "num-examples"]  # labels were granted, and not used
        assert row["seeks"] == "labels"
        assert row["images"] in (100, 200)
        assert row["psnr"] is row["images_recognisable"] is row["identified"] is None
        assert 0 <= row["blind_label_accuracy"] < 0.7  # a client has two of three classes at most
        assert 0 <= row["label_accuracy"] <= 1
    page = result.report.read_text()
    assert "<b>Not run</b>" in page
    assert "at most 128 images per update" in page
    assert "<dt>Labels</dt>" in page
    assert "No attack here looked for pictures" in page


def test_public_images_have_all_classes_although_test_images_are_sorted(tmp_path, small):
    from gradveil.audits.views import PUBLIC_IMAGES, public_images

    images = np.random.default_rng(0).integers(0, 255, (1300, 1, 8, 8), dtype=np.uint8)
    labels = np.concatenate([np.arange(60) % 2, np.repeat([0, 1], 620)])
    path = tmp_path / "sorted.npz"
    np.savez(path, x_train=images[:60], y_train=labels[:60], x_test=images[60:], y_test=labels[60:])
    public = public_images(load_dataset(str(path)))
    assert len(public) == PUBLIC_IMAGES
    assert 0.4 < float(public.labels.float().mean()) < 0.6
