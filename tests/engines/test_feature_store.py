"""Features in clients' private folders."""

import stat

import torch

from gradveil.engines.feature_store import FeatureStore
from gradveil.storage import PrivateFolder
from tests.models.test_trunk import network, pictures


def used(store, module, images, folder=None, name="client 0"):
    """Return the features that a network has, and how many images had to be computed for them."""
    before = module.trunk.computed
    with store.released():
        store.use(name, images, folder)
        found = module.trunk(images)
    assert module.trunk.memo is None
    return found, module.trunk.computed - before


def test_features_are_computed_once_and_survive_the_process(tmp_path):
    images, folder = pictures(20), PrivateFolder(tmp_path / "0" / "private")
    module = network()
    store = FeatureStore(module)
    first, count = used(store, module, images, folder)
    assert count == 20
    assert used(store, module, images, folder)[1] == 0
    again = network()
    found, count = used(FeatureStore(again), again, images, folder)
    assert count == 0
    assert torch.equal(found, first)
    path = folder.path / "features.safetensors"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_other_images_other_trunks_and_damaged_files_are_computed_anew(tmp_path):
    images, folder, module = pictures(20), PrivateFolder(tmp_path / "0" / "private"), network()
    used(FeatureStore(module), module, images, folder)
    assert used(FeatureStore(module), module, pictures(20, seed=1), folder)[1] == 20
    used(FeatureStore(module), module, images, folder)
    other = network()
    other.trunk.fingerprint = "f" * 64
    assert used(FeatureStore(other), other, images, folder)[1] == 20
    path = folder.path / "features.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    path.chmod(0o600)
    assert used(FeatureStore(module), module, images, folder)[1] == 20


def test_memory_is_bounded_and_recalling_needs_no_folder(monkeypatch):
    monkeypatch.setattr("gradveil.engines.feature_store.MOST_BYTES", 1000)
    module = network()
    store = FeatureStore(module)
    used(store, module, pictures(40), name="a")  # 800 bytes
    used(store, module, pictures(40, seed=1), name="b")
    before = module.trunk.computed
    with store.released():
        store.recall("a")
        assert module.trunk.memo is None
        store.recall("b")
        module.trunk(pictures(40, seed=1)[3:5])
    assert module.trunk.computed == before


def test_networks_without_a_trunk_are_left_alone():
    store = FeatureStore(torch.nn.Linear(2, 2))
    with store.released():
        store.use("a", pictures(2))
        store.recall("a")
