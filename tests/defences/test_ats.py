import pytest
import torch

from gradveil.defences import Arrived, build_defence
from gradveil.defences.ats import Ats, policy_of, transformed
from gradveil.errors import ConfigError
from tests.defences.mixing import client_with, pictures


def test_a_policy_is_its_operations_one_after_the_other():
    data = pictures(5, shape=(3, 8, 8))
    out = Ats(policy="0-9").on_batch(data, client_with(data)).images  # invert, equalize: neither has a sign
    one, two = policy_of("0-9")
    assert torch.equal(out, two(one(data.images, torch.ones(5)), torch.ones(5)))
    assert [step.name for step in (one, two)] == ["invert", "equalize"]


def test_of_several_policies_each_image_gets_one_and_signs_vary():
    data = pictures(40, shape=(3, 8, 8))
    out = Ats(policy="0+15").on_batch(data, client_with(data)).images
    (invert,), (brighter,) = policy_of("0"), policy_of("15")
    up = torch.ones(40)
    options = [invert(data.images, up), brighter(data.images, up), brighter(data.images, -up)]
    which = torch.stack([(out - option).flatten(1).abs().amax(1) < 1e-6 for option in options])
    assert which.any(0).all()
    assert which.any(1).all()


def test_labels_and_marks_stay():
    data = pictures(5, shape=(3, 8, 8))
    out = Ats().on_batch(data, client_with(data))
    assert torch.equal(out.labels, data.labels)
    assert torch.equal(out.sensitive, data.sensitive)


def test_crop_and_mirror_come_first():
    data = pictures(30, shape=(3, 8, 8))
    mirrored = Ats(policy="29", mirror=True).on_batch(data, client_with(data)).images  # 29 inverts
    straight, turned = 1 - data.images, 1 - data.images.flip(3)
    is_turned = torch.tensor([torch.allclose(a, b) for a, b in zip(mirrored, turned, strict=True)])
    is_straight = torch.tensor([torch.allclose(a, b) for a, b in zip(mirrored, straight, strict=True)])
    assert (is_turned ^ is_straight).all()
    assert 5 < is_turned.sum() < 25
    cropped = 1 - Ats(policy="29", crop=2).on_batch(data, client_with(data)).images
    padded = torch.nn.functional.pad(data.images, (2, 2, 2, 2))
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1)  # (N, C, 5, 5, 8, 8)
    off = (windows - cropped[:, :, None, None]).abs().amax((1, 4, 5)).flatten(1).min(1)
    assert off.values.max() < 1e-6
    assert len(off.indices.unique()) > 5


@pytest.mark.parametrize("bad", ["policy=50", "policy=a-b", "policy=1--2", "policy=3+", "crop=-1"])
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match=bad.split("=")[0]):
        build_defence(f"ats:{bad}")


def test_the_published_policies_build_and_their_signs_matter():
    data = pictures(2, shape=(3, 8, 8))
    for text in ("21-13-3", "7-4-15"):
        steps = policy_of(text)
        out = [transformed(data.images, steps, sign * torch.ones(2, 3)) for sign in (-1, 1)]
        assert not torch.equal(*out)
    assert build_defence("ats:policy=21-13-3+7-4-15").spec == "ats"


def test_the_countermoves():
    moves = Ats().adaptive(Arrived({}, [1.0]))
    assert moves["untransform"].decode == ("untransform",)
    assert moves["early"].decode == ()
