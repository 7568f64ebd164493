import numpy as np
import pytest

from gradveil.data.auxiliary import dealt, joined, placed, refuse_overlap
from gradveil.data.datasets import Dataset, Split
from gradveil.errors import ConfigError


def dataset(name, value, *, count=4, side=2, classes=3, floating=False):
    """Return images of one grey value that differ only in their first pixel."""
    images = np.full((count, 1, side, side), value, np.uint8)
    images[:, 0, 0, 0] = np.arange(count)
    split = Split(images.astype(np.float32) / 255 if floating else images, np.arange(count) % classes)
    return Dataset(name, split, split, classes, (0.5,), (0.5,))


def test_public_images_come_last_and_keep_their_labels():
    both = joined(dataset("own", 10), dataset("other", 200, count=2))
    assert both.images.dtype == np.uint8
    assert both.images[:, 0, 1, 1].tolist() == [10] * 4 + [200] * 2
    assert both.labels.tolist() == [0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize("floating", [(True, False), (False, True)])
def test_bytes_and_floats_are_joined_as_floats(floating):
    both = joined(dataset("own", 51, floating=floating[0]), dataset("other", 102, floating=floating[1]))
    assert both.images.dtype == np.float32
    assert both.images[[0, 4], 0, 1, 1].tolist() == pytest.approx([0.2, 0.4])


@pytest.mark.parametrize(("odd", "message"), [({"side": 3}, "shape"), ({"classes": 4}, "at most the 3 classes")])
def test_data_sets_that_do_not_fit_are_refused(odd, message):
    with pytest.raises(ConfigError, match=message):
        joined(dataset("own", 10), dataset("other", 200, **odd))


def test_an_image_that_is_also_private_is_refused_whatever_its_type():
    same = joined(dataset("own", 51), dataset("other", 51, floating=True))
    refuse_overlap(same, np.array([0, 1]), np.array([6, 7]))
    with pytest.raises(ConfigError, match="got 2 that are"):
        refuse_overlap(same, np.array([0, 1, 2]), np.array([5, 6, 7]))


def test_guards_share_the_public_images_and_keep_their_client_numbers():
    parts = dealt(np.arange(10, 15), 2)
    assert [part.tolist() for part in parts] == [[10, 12, 14], [11, 13]]
    everyone = placed([np.array([0]), np.array([1])], parts, [2, 0])
    assert [part.tolist() for part in everyone] == [[11, 13], [0], [10, 12, 14], [1]]
    with pytest.raises(ConfigError, match="an image for each of 6 guards, got 5"):
        dealt(np.arange(5), 6)


def test_unused_labels_may_be_of_other_classes():
    own, other = dataset("own", 10, classes=2), dataset("other", 200, classes=4)
    with pytest.raises(ConfigError, match="at most the 2 classes"):
        joined(own, other)
    assert len(joined(own, other, labelled=False)) == 8
