import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.attacks.parts.unmixing import (
    Mixtures,
    SoftLabels,
    _centred,
    agreed_signs,
    dealt,
    estimated_coefficients,
    labelled_coefficients,
    likely_sign,
    overlaps,
    similarities,
    solved,
    train_sign,
    train_similarity,
)
from gradveil.data import load_dataset

SHAPE = (2, 10, 10)


def smooth(count, seed, shape=SHAPE):
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, shape[0], 5, 5, generator=rng)
    fine = torch.nn.functional.interpolate(coarse, size=shape[1:], mode="bilinear")
    shade = torch.linspace(0.6, -0.2, shape[1])[:, None]  # brighter at the top, as outdoors
    return (0.6 * fine + shade).clamp(-1, 1)


def shaded(count, seed):
    """Return images dominated by one common pattern of varying strength."""
    amount = torch.randn(count, 1, 1, 1, generator=torch.Generator().manual_seed(seed))
    return 0.3 * smooth(count, seed) + amount * torch.linspace(-1, 1, SHAPE[2])


def mixing(count, images, k, rng):
    keys = torch.rand(count, images, generator=rng)
    keys[torch.arange(count), torch.arange(count) % images] = -1
    weights = torch.rand(count, k, generator=rng) + torch.tensor([1.5] + [0.1] * (k - 1))
    weights = weights / weights.sum(1, keepdim=True)
    return torch.zeros(count, images).scatter_(1, keys.argsort(1)[:, :k], weights)


def encoder(images, count, rng):
    shares = mixing(count, len(images), 3, rng)
    return torch.einsum("en,n...->e...", shares, images).abs(), shares


def matched(found, truth):
    """Return coefficients (E, N) with images in the order of the true ones."""
    from scipy.optimize import linear_sum_assignment

    count = truth.shape[1]
    alike = torch.corrcoef(torch.cat([found.T, truth.T]))[:count, count:]
    rows, columns = linear_sum_assignment(-alike.numpy())
    return alike[rows, columns]


def test_the_network_recognises_encodings_that_share_unseen_images():
    rng = torch.Generator().manual_seed(0)
    how = {"num_images": 5, "width": 8, "batch": 32}
    network, naive = (
        train_similarity(shaded(80, 1), encoder, steps=steps, rng=torch.Generator().manual_seed(1), **how)
        for steps in (60, 0)
    )
    encodings, shares = encoder(shaded(5, 2), 60, rng)
    off = ~torch.eye(60, dtype=torch.bool)
    wanted = overlaps(shares)[off]
    learned, before = (
        torch.corrcoef(torch.stack([similarities(net, encodings)[off], wanted]))[0, 1] for net in (network, naive)
    )
    assert learned > 0.7
    assert learned > before + 0.1


def test_encodings_are_dealt_evenly_to_the_images_they_are_mostly_of():
    rng = torch.Generator().manual_seed(3)
    shares = mixing(40, 4, 2, rng)
    owner = dealt(overlaps(shares), 4, rng)
    assert owner.bincount().tolist() == [10] * 4
    largest = torch.arange(40) % 4
    clusters = [owner[largest == image] for image in range(4)]
    assert all((cluster == cluster.mode().values).float().mean() > 0.8 for cluster in clusters)


def test_coefficients_come_out_of_exact_overlaps():
    rng = torch.Generator().manual_seed(4)
    shares = mixing(60, 5, 3, rng)
    centred = shares - shares.mean(0)
    found = estimated_coefficients(overlaps(centred), 5, own=0.5, steps=150, rng=rng)
    assert torch.allclose(found.sum(1), torch.ones(60), atol=1e-5)
    assert matched(found, shares).min() > 0.9


@pytest.mark.parametrize("flipped", [False, True])
def test_images_and_coefficients_are_refined_from_a_rough_estimate(flipped):
    rng = torch.Generator().manual_seed(5)
    images = smooth(5, 6).flatten(1)
    shares = mixing(120, 5, 3, rng)
    encodings = shares @ images
    shown = encodings.abs() if flipped else encodings
    rough = shares + (0.02 if flipped else 0.05) * torch.rand(shares.shape, generator=rng)
    rough = rough / rough.sum(1, keepdim=True)
    mixtures = Mixtures(shown, flipped, 3, torch.zeros(200))
    once, often = (solved(mixtures, rough, rounds=rounds, restarts=6, rng=rng) for rounds in (1, 15))
    assert often.residual < 0.5 * once.residual
    assert (often.coefficients - shares).abs().mean() < 0.02
    found = often.images
    if flipped:
        assert (found.abs() - images.abs()).abs().mean() < 0.03
        found = found * agreed_signs(found, SHAPE)
        found = found * (found * images).sum().sign()
    assert (found - images).abs().mean() < 0.03


def test_a_background_takes_what_the_coefficients_leave():
    rng = torch.Generator().manual_seed(7)
    images, rest = smooth(4, 8).flatten(1), torch.full((200,), 0.4)
    shares = 0.7 * mixing(60, 4, 2, rng)
    encodings = shares @ images + 0.3 * rest
    found = solved(Mixtures(encodings, False, 2, rest), shares, rounds=1, restarts=1, rng=rng)
    assert torch.allclose(found.images, images, atol=1e-2)
    assert found.residual < 1e-3


def test_signs_agree_up_to_a_common_one_which_public_images_reveal():
    images, public = smooth(12, 9).flatten(1), smooth(300, 10).flatten(1)
    rng = torch.Generator().manual_seed(0)
    spoiled = images * (2 * torch.randint(2, (1, 200), generator=rng) - 1)
    back = spoiled * agreed_signs(spoiled, SHAPE)
    assert ((back * images).sum(0).sign().mean().abs()) > 0.9
    pictures, known = back.view(-1, *SHAPE), public.view(-1, *SHAPE)
    up = back * likely_sign(pictures, known, torch.Generator().manual_seed(1))
    assert (up * images).sum() > 0
    assert torch.equal(-back * likely_sign(-pictures, known, torch.Generator().manual_seed(1)), up)


def test_a_few_real_images_are_distinguished_from_their_negatives(real_data):
    data = load_dataset("cifar10", real_data)
    pixels = [torch.from_numpy(split.images[:1200]).float() / 127.5 - 1 for split in (data.train, data.test)]
    network = train_sign(pixels[1][:500], torch.Generator().manual_seed(0))
    with torch.no_grad():
        odds = (network(pixels[0]) - network(-pixels[0])).view(-1, 8).sum(1)
    assert (odds > 0).float().mean() > 0.96  # a linear discriminant has 0.975 of eight, and 0.9 of four


def shares_of(classes, count=60, seed=0):
    """Return coefficients of images, each the main one in turn, and the soft labels that they give."""
    rng = torch.Generator().manual_seed(seed)
    mixing = torch.rand(count, len(classes), generator=rng)
    mixing[torch.arange(count), torch.arange(count) % len(classes)] += 2.0
    mixing = mixing / mixing.sum(1, keepdim=True)
    return mixing, mixing @ torch.nn.functional.one_hot(torch.tensor(classes), 6).float()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=7), st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_soft_labels_tell_how_many_images_each_class_has(classes, seed):
    mixing, soft = shares_of(classes, seed=seed)
    labels = SoftLabels.of(soft, len(classes))
    assert labels.classes.tolist() == sorted(classes)
    order = torch.tensor(classes).argsort(stable=True)
    torch.testing.assert_close(labels.fitted(mixing[:, order]), mixing[:, order])
    wrong = labels.fitted(torch.rand(mixing.shape, generator=torch.Generator().manual_seed(seed)))
    torch.testing.assert_close(wrong @ torch.nn.functional.one_hot(labels.classes, 6).float(), soft)
    nothing = labels.fitted(torch.zeros_like(mixing))
    torch.testing.assert_close(nothing.sum(1), torch.ones(len(mixing)))


def test_more_classes_than_images_tell_nothing():
    assert SoftLabels.of(torch.eye(6), 3) is None


def test_shares_of_images_with_a_class_of_their_own_are_read_off():
    mixing, soft = shares_of([4, 0, 2])
    found = labelled_coefficients(torch.eye(60), SoftLabels.of(soft, 3), steps=1, rng=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found, mixing[:, [1, 2, 0]])


def test_images_of_one_class_are_told_apart_by_similarity():
    mixing, soft = shares_of([1, 1, 3, 5])
    similarity = _centred(overlaps(mixing))
    rng = torch.Generator().manual_seed(0)
    found = labelled_coefficients(similarity, SoftLabels.of(soft, 4), steps=300, rng=rng)
    miss = min(float((found[:, [a, 1 - a]] - mixing[:, :2]).abs().mean()) for a in (0, 1))
    assert miss < 0.03
