import pytest
import torch

from gradveil.attacks.parts.feature_inversion import FeatureSearch
from gradveil.errors import UnknownNameError
from gradveil.networks.watch import inputs_of
from tests.attacks.scene import scene


def features(network, images, layer="fc"):
    with torch.no_grad(), inputs_of(network, [layer]) as reached:
        network(images)
    return reached[layer]


@pytest.mark.parametrize(("distance", "start"), [("l2", "grey"), ("cosine", "normal")])
def test_images_that_have_the_features_are_found(distance, start):
    truth, _, seen = scene(targets=3)
    images = truth[:, 0]
    search = FeatureSearch(400, 0.1, 1e-6, distance=distance, start=start)
    found = search(seen, "fc", features(seen.network, images), torch.Generator().manual_seed(0))
    wanted = features(seen.network, images)
    apart, blank = (
        1 - torch.nn.functional.cosine_similarity(features(seen.network, some).double(), wanted.double())
        for some in (found.images, torch.full_like(images, 0.5))
    )
    assert (apart < 0.1 * blank).all()
    assert found.converged.all()


def test_a_grey_image_has_distance_one():
    truth, _, seen = scene(targets=2)
    aims = features(seen.network, truth[:, 0])
    found = FeatureSearch(1, 1e-12, 0.0, distance="l2", start="grey")(seen, "fc", aims, torch.Generator())
    assert torch.allclose(found.loss, torch.ones(2), atol=1e-4)
    assert not found.converged.any()


def test_an_unknown_distance_is_refused():
    truth, _, seen = scene(targets=1)
    aims = features(seen.network, truth[:, 0])
    with pytest.raises(UnknownNameError):
        FeatureSearch(1, 0.1, 0.0, distance="far")(seen, "fc", aims, torch.Generator())
