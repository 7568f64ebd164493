"""What labels stand for: from a file, from folders, from the authors of a set, or nothing."""

import numpy as np
import pytest
from PIL import Image

from gradveil.data import load_dataset
from gradveil.errors import DataError


def save(path, **more):
    images, labels = np.zeros((4, 8, 8), np.uint8), np.arange(4) % 2
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels, **more)
    return str(path)


def test_a_file_may_say_it(tmp_path):
    assert load_dataset(save(tmp_path / "scans.npz", class_names=["well", "ill"])).class_names == ("well", "ill")
    assert load_dataset(save(tmp_path / "more.npz")).class_names == ()


@pytest.mark.parametrize("names", [["one"], [0, 1], [["a", "b"]]])
def test_names_that_do_not_fit_are_refused(tmp_path, names):
    with pytest.raises(DataError, match="2 texts"):
        load_dataset(save(tmp_path / "scans.npz", class_names=names))


def test_medmnist_says_it_for_its_files_if_the_classes_fit(tmp_path):
    assert load_dataset(save(tmp_path / "pneumoniamnist.npz")).class_names == ("normal", "pneumonia")
    images = np.zeros((3, 8, 8), np.uint8)
    path = tmp_path / "breastmnist.npz"
    np.savez(path, x_train=images, y_train=[0, 1, 2], x_test=images, y_test=[0, 1, 2])
    assert load_dataset(str(path)).class_names == ()


def test_folders_are_named_by_their_classes(tmp_path):
    for name in ("normal", "pneumonia"):
        (tmp_path / "scans" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("L", (8, 8)).save(tmp_path / "scans" / name / f"{number}.png")
    assert load_dataset(f"{tmp_path / 'scans'}/").class_names == ("normal", "pneumonia")


def test_digits_speak_for_themselves():
    assert load_dataset("mnist-5k").class_names == ()
