import numpy as np
import pytest
import torch

from gradveil.defences.parts.policies import PolicySearch, accuracy_score, privacy_scores, search_policies
from gradveil.errors import ConfigError
from gradveil.models import create_model
from gradveil.secret_stream import SecretStream
from gradveil.types import Batch


@pytest.fixture
def network():
    return create_model("lenet-dlg", (1, 8, 8), 4, 0).eval()


@pytest.fixture
def batch():
    rng = torch.Generator().manual_seed(0)
    return Batch(torch.rand(6, 1, 8, 8, generator=rng), torch.randint(4, (6,), generator=rng), torch.zeros(6) > 1)


def test_privacy_is_the_area_under_the_cosines_image_by_image(network, batch):
    found = privacy_scores(network, batch.images, batch.labels, SecretStream(3))
    noise = SecretStream(3).uniform(batch.images.shape)
    for number in range(2):
        image, label = batch.images[number : number + 1], batch.labels[number : number + 1]

        def gradient(some, label=label):
            return torch.autograd.grad(
                torch.nn.functional.cross_entropy(network(some), label), list(network.parameters())
            )

        wanted, heights = gradient(image), []
        for part in range(21):
            mixed = part / 20 * image + (1 - part / 20) * noise[number : number + 1]
            pairs = zip(gradient(mixed), wanted, strict=True)
            heights.append(np.mean([float(torch.cosine_similarity(a.flatten(), b.flatten(), 0)) for a, b in pairs]))
        assert found[number].item() == pytest.approx(np.trapezoid(heights, dx=1 / 20), abs=1e-4)


def test_accuracy_follows_the_eigenvalues_of_the_jacobians_correlations(network, batch):
    slopes = [torch.autograd.functional.jacobian(lambda x: network(x).sum(), image[None]) for image in batch.images]
    values = np.linalg.eigvalsh(np.corrcoef(torch.stack(slopes).flatten(1).double().numpy())) + 1e-5
    assert accuracy_score(network, batch.images) == pytest.approx(-(np.log(values) + 1 / values).sum(), rel=1e-3)


def test_equal_images_are_the_worst_for_accuracy(network, batch):
    same = batch.images[:1].expand(6, -1, -1, -1)
    assert accuracy_score(network, same) < accuracy_score(network, batch.images)


def test_the_search_sorts_by_privacy_those_that_keep_enough_accuracy(network, batch):
    def dimmed(policy, images, rng):
        return images * (1 - int(policy.split("-")[0]) / 100)

    def search(least):
        rng = SecretStream(0)
        return search_policies(network, network, batch, dimmed, PolicySearch(6, least_accuracy=least), rng)

    everything = search(-1e9)
    assert len({each.policy for each in everything}) == 6
    assert [each.privacy for each in everything] == sorted(each.privacy for each in everything)
    middle = sorted(each.accuracy for each in everything)[3]
    strict = search(middle)
    assert [each.accuracy >= middle for each in strict] == [True] * 3 + [False] * 3
    assert {each.policy for each in strict} == {each.policy for each in everything}


def test_bad_input(network, batch):
    rng = SecretStream(0)
    with pytest.raises(ConfigError, match="at least two images"):
        search_policies(network, network, batch[:1], lambda p, i, r: i, PolicySearch(1), rng)
    with pytest.raises(ConfigError, match="at most the number"):
        search_policies(network, network, batch, lambda p, i, r: i, PolicySearch(5, longest=1, operations=2), rng)
    with pytest.raises(ConfigError, match="candidates"):
        PolicySearch(candidates=0)
