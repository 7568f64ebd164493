import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.defences import build_defence
from gradveil.defences.instahide import Instahide
from gradveil.defences.mixup import Mixup
from gradveil.errors import ConfigError, DefenceError
from tests.defences.mixing import client_with, coefficients_of, pictures


@given(st.integers(2, 5), st.floats(0.0, 1.0), st.integers(0, 10))
@settings(max_examples=20, deadline=None)
def test_it_is_mixup_but_for_signs(k, flip, seed):
    data = pictures(8, seed)
    hidden = Instahide(k=k, flip=flip).on_batch(data, client_with(data, seed=seed))
    plain = Mixup(k=k).on_batch(data, client_with(data, seed=seed))
    signed, before = 2 * hidden.images - 1, 2 * plain.images - 1
    assert torch.allclose(signed.abs(), before.abs(), atol=1e-5)
    assert torch.equal(hidden.labels, plain.labels)
    assert hidden.images.min() >= 0
    assert hidden.images.max() <= 1


def test_half_of_the_pixels_flip():
    data = pictures(200)
    hidden = Instahide().on_batch(data, client_with(data))
    plain = Mixup().on_batch(data, client_with(data))
    flipped = (hidden.images - plain.images).abs() > 1e-6
    assert flipped.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert not torch.equal(flipped[0], flipped[1])


def test_public_images_have_weight_and_no_label():
    data, public = pictures(9), pictures(12, seed=1)
    hidden = Instahide(pool="public", k=6, flip=0.0).on_batch(data, client_with(data, aux=public))
    weights = coefficients_of(hidden.images, torch.cat([data.images, public.images]))
    own, theirs = weights[:, :9], weights[:, 9:]
    assert ((own > 1e-5).sum(1) == 2).all()
    assert ((theirs > 1e-6).sum(1) == 4).all()
    shares = own / own.sum(1, keepdim=True)
    assert torch.allclose(
        hidden.labels.double(), shares @ torch.nn.functional.one_hot(data.labels, 5).double(), atol=1e-3
    )
    assert Instahide(pool="public").uses_aux
    assert not Instahide().uses_aux


@pytest.mark.parametrize("aux", [None, pictures(1), pictures(9, shape=(2, 5, 5))])
def test_public_images_must_be_there_and_fit(aux):
    data = pictures(6)
    with pytest.raises(DefenceError, match=r"needs at least 2 public images of shape \(2, 4, 4\), got"):
        Instahide(pool="public").on_batch(data, client_with(data, aux=aux))


@pytest.mark.parametrize("bad", ["flip=2", "k=1", "pool=mine"])
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match=bad.split("=")[0]):
        build_defence(f"instahide:{bad}")
