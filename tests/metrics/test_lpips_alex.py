"""LPIPS on AlexNet: the published distances, and how weights are found, loaded and refused."""

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from gradveil.errors import ConfigError, DataError
from gradveil.metrics import MetricUnavailable
from gradveil.metrics import lpips as lpips_module
from gradveil.metrics.lpips_alex import LpipsAlex
from tests.metrics.conftest import random_heads, random_trunk
from tests.metrics.naive_lpips import naive_lpips

PICTURES = Path(__file__).parents[3] / "shared" / "data" / "weights" / "lpips_examples"


@pytest.fixture
def published(monkeypatch):
    root = os.environ.get("GRADVEIL_TEST_DATA")
    if not root or not (Path(root) / "weights" / LpipsAlex.default_file).is_file():
        pytest.skip("GRADVEIL_TEST_DATA names no folder with weights/lpips_alex_v0.1.safetensors")
    monkeypatch.setenv("GRADVEIL_DATA", root)
    return Path(root) / "weights" / LpipsAlex.default_file


@pytest.fixture
def pictures():
    if not PICTURES.is_dir():
        pytest.skip(f"the example pictures of LPIPS are not in {PICTURES}")
    names = ("ex_ref", "ex_p0", "ex_p1")
    return [
        torch.from_numpy(np.array(Image.open(PICTURES / f"{name}.png"))).permute(2, 0, 1)[None] / 255 for name in names
    ]


@pytest.fixture
def pair():
    rng = torch.Generator().manual_seed(5)
    return torch.rand(2, 2, 3, 36, 33, generator=rng).unbind(0)


def test_the_published_distances(published, pictures):
    reference, first, second = pictures
    distances = LpipsAlex()(reference.repeat(2, 1, 1, 1), torch.cat([first, second]))
    assert [round(value, 3) for value in distances.tolist()] == [0.722, 0.138]


def test_the_published_distances_from_the_files_that_users_have(published, pictures, tmp_path):
    tensors = load_file(published)
    torch.save({k: v for k, v in tensors.items() if k.startswith("lin")}, tmp_path / "alex.pth")
    torch.save({k: v for k, v in tensors.items() if k.startswith("features")}, tmp_path / "alexnet.pth")
    metric = LpipsAlex(weights=str(tmp_path / "alex.pth"), trunk=str(tmp_path / "alexnet.pth"))
    assert round(metric(pictures[0], pictures[1]).item(), 3) == 0.722


@pytest.mark.usefixtures("with_weights")
def test_equals_a_plain_transcription(pair):
    tensors = random_trunk(LpipsAlex) | random_heads(LpipsAlex)
    plan = [
        (0, {"stride": 4, "padding": 2}), "compare", (3, 2), (3, {"padding": 2}), "compare", (3, 2),
        (6, {"padding": 1}), "compare", (8, {"padding": 1}), "compare", (10, {"padding": 1}), "compare",
    ]  # fmt: skip
    expected = naive_lpips(tensors, plan, *pair)
    torch.testing.assert_close(LpipsAlex()(*pair), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("with_weights")
class TestImages:
    def test_grey_is_the_same_as_three_equal_channels(self, pair):
        grey = [images[:, :1] for images in pair]
        assert torch.equal(LpipsAlex()(*grey), LpipsAlex()(*(images.repeat(1, 3, 1, 1) for images in grey)))

    def test_31_pixels_is_the_smallest_side_of_the_trunk(self):
        trunk = torch.nn.Sequential(*LpipsAlex.layers())
        assert trunk(torch.zeros(1, 3, 31, 31)).shape == (1, 256, 1, 1)
        with pytest.raises(RuntimeError, match="too small"):
            trunk(torch.zeros(1, 3, 30, 31))

    @pytest.mark.parametrize(("sides", "enlarged"), [((28, 28), (31, 31)), ((14, 28), (31, 62)), ((62, 7), (275, 31))])
    def test_small_images_are_enlarged_with_their_proportions(self, sides, enlarged):
        rng = torch.Generator().manual_seed(0)
        truth, guess = torch.rand(2, 1, 3, *sides, generator=rng)
        large = [
            torch.nn.functional.interpolate(
                images[None] if images.ndim == 3 else images, size=enlarged, mode="bilinear"
            )
            for images in (truth, guess)
        ]
        torch.testing.assert_close(LpipsAlex()(truth, guess), LpipsAlex()(*large), rtol=1e-4, atol=1e-6)

    def test_groups_do_not_change_the_values(self, pair, monkeypatch):
        together = LpipsAlex()(*pair)
        monkeypatch.setattr(lpips_module, "PIXELS_AT_ONCE", 1)
        torch.testing.assert_close(LpipsAlex()(*pair), together, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("channels", [2, 4])
    def test_other_numbers_of_channels_are_refused(self, channels):
        images = torch.zeros(1, channels, 32, 32)
        with pytest.raises(ConfigError, match=f"'lpips-alex' must have 1 or 3 channels, got {channels}"):
            LpipsAlex()(images, images)


class TestWeights:
    @pytest.fixture
    def files(self, tmp_path):
        """Write the usual files: heads as shipped by lpips, torchvision's checkpoint with its classifier."""
        torch.save(random_heads(LpipsAlex), tmp_path / "alex.pth")
        extra = {"classifier.1.weight": torch.zeros(4, 4)}
        torch.save(random_trunk(LpipsAlex) | extra, tmp_path / "alexnet.pth", _use_new_zipfile_serialization=False)
        return tmp_path

    def test_missing_weights_say_why_and_where_to_put_the_file(self, without_weights, pair):
        place = without_weights / "weights" / "lpips_alex_v0.1.safetensors"
        with pytest.raises(MetricUnavailable, match=re.escape(f"'lpips-alex' needs pretrained weights, and {place}")):
            LpipsAlex()(*pair)
        with pytest.raises(MetricUnavailable, match=r"lpips-alex:weights=PATH/alex.pth,trunk=PATH/alexnet-owt"):
            LpipsAlex(weights="no.pth", trunk="none.pth")(*pair)

    def test_a_file_put_in_place_later_is_found(self, without_weights, random_root, pair):
        with pytest.raises(MetricUnavailable):
            LpipsAlex()(*pair)
        (without_weights / "weights").mkdir(parents=True)
        source = random_root / "weights" / LpipsAlex.default_file
        (without_weights / "weights" / LpipsAlex.default_file).symlink_to(source)
        assert LpipsAlex()(*pair).isfinite().all()

    def test_a_file_in_the_working_directory_is_not_used_by_default(
        self, without_weights, random_root, pair, monkeypatch
    ):
        monkeypatch.chdir(random_root / "weights")
        with pytest.raises(MetricUnavailable):
            LpipsAlex()(*pair)

    def test_heads_and_trunk_in_two_files_of_torch(self, files, random_root, pair):
        split = LpipsAlex(weights=str(files / "alex.pth"), trunk=str(files / "alexnet.pth"))
        whole = LpipsAlex(weights=str(random_root / "weights" / LpipsAlex.default_file))
        assert torch.equal(split(*pair), whole(*pair))

    def test_relative_paths_are_those_of_the_working_directory_or_the_data_root(self, files, pair, monkeypatch):
        metric = LpipsAlex(weights="alex.pth", trunk="alexnet.pth")
        monkeypatch.setenv("GRADVEIL_DATA", str(files / "data"))
        monkeypatch.chdir(files)
        here = metric(*pair)
        (files / "data").mkdir()
        (files / "data" / "weights").symlink_to(files)
        monkeypatch.chdir("/")
        assert torch.equal(metric(*pair), here)

    def test_a_trunk_without_heads_is_refused(self):
        with pytest.raises(ConfigError, match="weights of metric 'lpips-alex' must name the heads when trunk is set"):
            LpipsAlex(trunk="alexnet.pth")

    def test_the_network_is_loaded_once(self, files, pair):
        metric = LpipsAlex(weights=str(files / "alex.pth"), trunk=str(files / "alexnet.pth"))
        first = metric(*pair)
        for name in ("alex.pth", "alexnet.pth"):
            (files / name).write_bytes(b"")
        assert torch.equal(metric(*pair), first)

    @pytest.mark.parametrize("legacy", [False, True])
    def test_code_in_a_pickle_is_refused_and_not_run(self, tmp_path, pair, legacy):
        class Evil:
            def __reduce__(self):
                return (Path.touch, (tmp_path / "ran",))

        path = tmp_path / "alex.pth"
        if legacy:
            path.write_bytes(pickle.dumps(Evil(), protocol=2))
        else:
            torch.save({"lin0.model.1.weight": Evil()}, path)
        with pytest.raises(DataError, match="must be a whole state dict of tensors and nothing else") as caught:
            LpipsAlex(weights=str(path))(*pair)
        assert not isinstance(caught.value, MetricUnavailable)
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("name", ["x.pth", "x.pt", "x.safetensors", "x"])
    @pytest.mark.parametrize("content", [b"", b"not weights", bytes(range(256)), b"PK\x03\x04torn"])
    def test_a_file_that_is_no_weights_is_a_data_error(self, tmp_path, pair, name, content):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} must be a whole"):
            LpipsAlex(weights=str(tmp_path / name))(*pair)

    @pytest.mark.parametrize("content", [torch.zeros(3), {"state_dict": {"a": torch.zeros(1)}}, [1, 2]])
    def test_a_checkpoint_that_is_no_state_dict_is_named(self, tmp_path, pair, content):
        torch.save(content, tmp_path / "x.pth")
        with pytest.raises(DataError, match="must be a state dict, tensors by name, got"):
            LpipsAlex(weights=str(tmp_path / "x.pth"))(*pair)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"lin4.model.1.weight": None}, r"hold lin4.model.1.weight of shape \(1, 256, 1, 1\), got none"),
            ({"features.3.bias": torch.zeros(7)}, r"hold features.3.bias of shape \(192,\), got \(7,\)"),
            ({"features.0.bias": torch.full((64,), torch.nan)}, r"finite weights, got NaN or infinity in features.0.b"),
        ],
    )
    def test_weights_of_another_network_are_refused(self, tmp_path, pair, changes, message):
        tensors = random_trunk(LpipsAlex) | random_heads(LpipsAlex) | changes
        save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "x.safetensors")
        with pytest.raises(DataError, match=message):
            LpipsAlex(weights=str(tmp_path / "x.safetensors"))(*pair)
