import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.defences import Arrived, build_defence
from gradveil.defences.mixup import Mixup, coefficients
from gradveil.errors import ConfigError, DefenceError
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch
from tests.defences.mixing import client_with, coefficients_of, pictures


@given(st.integers(2, 6), st.integers(1, 4), st.floats(0.62, 1.0), st.integers(0, 10))
@settings(max_examples=25, deadline=None)
def test_images_and_labels_are_the_same_mixture_of_k_within_the_cap(k, own, cap, seed):
    data = pictures(8, seed)
    mixed = Mixup(k=k, own=own, cap=cap).on_batch(data, client_with(data, seed=seed))
    weights = coefficients_of(mixed.images, data.images)
    assert torch.allclose(weights.sum(1), torch.ones(8).double(), atol=1e-4)
    assert (weights > -1e-4).all()
    assert ((weights > 1e-4).sum(1) <= k).all()
    assert ((weights.diagonal() > 0) & (weights.diagonal() <= cap + 1e-4)).all()
    assert torch.allclose(
        mixed.labels.double(), weights @ torch.nn.functional.one_hot(data.labels, 5).double(), atol=1e-4
    )
    assert torch.equal(mixed.sensitive, weights[:, 0] > 1e-5)


def test_coefficients_have_the_dirichlet_mean_and_a_lower_one_under_the_cap():
    rng = SecretStream(0)
    free = coefficients(20_000, 4, 3, 1.0, rng)
    assert torch.allclose(free.mean(0), torch.tensor([3, 1, 1, 1]) / 6, atol=0.01)
    variance = 3 / 6 * (1 - 3 / 6) / 7
    assert free[:, 0].var().item() == pytest.approx(variance, rel=0.05)
    capped = coefficients(20_000, 4, 3, 0.65, rng)
    kept = free[(free <= 0.65).all(1)]
    assert torch.allclose(capped.mean(0), kept.mean(0), atol=0.01)


def test_every_batch_is_mixed_anew_and_other_data_can_be_the_pool():
    data = pictures(30)
    client = client_with(data)
    one, two = (Mixup().on_batch(data[:6], client) for _ in range(2))
    assert not torch.allclose(one.images, two.images)
    assert (coefficients_of(one.images, data.images)[:, 6:].abs() < 1e-4).all()
    wide = [coefficients_of(Mixup(pool="data").on_batch(data[:6], client).images, data.images) for _ in range(5)]
    assert (torch.stack(wide)[:, :, 6:] > 1e-2).any()


def test_an_image_is_never_its_own_partner():
    data = pictures(4)
    for seed in range(20):
        mixed = Mixup(k=4, pool="data").on_batch(data[:1], client_with(data, seed=seed))
        assert (coefficients_of(mixed.images, data.images) > 1e-6).all()


def test_a_small_batch_takes_partners_from_the_clients_other_images():
    data = pictures(6)
    mixed = Mixup(k=4).on_batch(data[:2], client_with(data))
    assert ((coefficients_of(mixed.images, data.images) > 1e-5).sum(1) == 4).all()


def test_the_model_keeps_its_modes_and_statistics():
    data = pictures(6)
    client = client_with(data)
    client.model.train()
    client.model[2].eval()
    before = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
    Mixup().on_batch(data, client)
    assert [layer.training for layer in client.model] == [True, True, False]
    assert all(torch.equal(before[name], tensor) for name, tensor in client.model.state_dict().items())


def test_soft_labels_are_mixed_too():
    data = pictures(6)
    soft = Batch(data.images, torch.eye(6), data.sensitive)
    mixed = Mixup().on_batch(soft, client_with(soft))
    assert torch.allclose(mixed.labels, coefficients_of(mixed.images, data.images).float(), atol=1e-4)


def test_more_images_than_a_client_has():
    with pytest.raises(DefenceError, match="mixes 4 of a client's images, got a client with 3"):
        Mixup().on_batch(pictures(3), client_with(pictures(3)))


@pytest.mark.parametrize("bad", ["k=1", "cap=0", "cap=0.25", "own=0", "pool=public", "pool=mine"])
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match=bad.split("=")[0]):
        build_defence(f"mixup:{bad}")


def test_a_cap_that_is_hardly_ever_met_is_refused():
    with pytest.raises(DefenceError, match=r"at most cap=0.3, but 1000 draws .* Raise cap"):
        Mixup(own=40, cap=0.3).on_batch(pictures(8), client_with(pictures(8)))


def test_the_countermove_searches_soft_labels_and_unmixes():
    (move,) = Mixup().adaptive(Arrived({}, [1.0])).values()
    assert move.soft_labels
    assert move.decode == ("unmix",)


@pytest.mark.parametrize("spec", ["mixup:k=2", "instahide:k=2", "ats"])
def test_pixels_out_of_range_are_refused(spec):
    data = pictures(4)
    far = Batch(data.images * 255, data.labels, data.sensitive)
    with pytest.raises(DefenceError, match=rf"'{spec.partition(':')[0]}' needs pixels in \[0, 1\], got"):
        build_defence(spec).on_batch(far, client_with(far))
