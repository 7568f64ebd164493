import pytest

from gradveil.attacks.gs import Gs
from gradveil.errors import ConfigError
from gradveil.metrics import align
from gradveil.models import Normalisation
from tests.attacks.scene import psnr, run, scene


@pytest.mark.parametrize("normalisation", [None, Normalisation((0.3,), (0.5,))])
def test_gs_reconstructs_with_and_without_normalisation(normalisation):
    truth, _, seen = scene(normalisation=normalisation)
    result = run(Gs(iterations=500), seen)
    start = run(Gs(iterations=1), seen)
    close = psnr(truth.flatten(0, 1), result.images.flatten(0, 1))
    assert close.min() > 17
    assert (close > psnr(truth.flatten(0, 1), start.images.flatten(0, 1)) + 5).all()


def test_gs_on_a_batch():
    truth, _, seen = scene(targets=1, size=2)
    result = run(Gs(iterations=800), seen)
    assert psnr(truth[0], align(truth[0], result.images[0])).mean() > 14


@pytest.mark.parametrize(
    "bad", [{"iterations": 0}, {"lr": 0.0}, {"restarts": 0}, {"chunk": 0}, {"keep": -1}, {"prior": "x"}]
)
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Gs(**bad)
