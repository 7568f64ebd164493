import numpy as np
import pytest
import torch

from gradveil.engines.own_images import one_client
from gradveil.errors import ConfigError, DataError

IMAGES, LABELS = torch.arange(3 * 4).view(3, 1, 2, 2).float() / 12, torch.tensor([2, 0, 1])
FORMS = {
    "tensors": (IMAGES, LABELS),
    "batches": [(IMAGES[:2], LABELS[:2]), (IMAGES[2:], LABELS[2:])],
    "named": [{"img": IMAGES, "label": LABELS}],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_client_all_its_images_and_others_none(form):
    data = one_client(FORMS[form], torch.tensor([True, False, False]), None, client=1, clients=3)
    assert [data.offsets[i + 1] - data.offsets[i] for i in range(3)] == [0, 3, 0]
    assert np.array_equal(data.train.images, IMAGES.numpy())
    assert data.train.labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("loader", "sensitive", "client", "error", "message"),
    [
        ((IMAGES, LABELS), None, 3, ConfigError, r"client must be below the number of clients \(3\), got 3"),
        ((IMAGES, LABELS), torch.tensor([True]), 0, DataError, "sensitive must say yes or no for each of 3 images"),
        ([], None, 0, DataError, "got none or others"),
        ([torch.zeros(2)], None, 0, DataError, "got none or others"),
        ((IMAGES[0], LABELS), None, 0, DataError, r"must give images \(N, C, H, W\)"),
    ],
)
def test_data_that_can_t_be_read_are_named(loader, sensitive, client, error, message):
    with pytest.raises(error, match=message):
        one_client(loader, sensitive, None, client, 3)
