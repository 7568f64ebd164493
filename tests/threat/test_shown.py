"""Guesses in a notebook: a picture per target, a missing guess in grey."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil.report.notebook import MOST_ROWS, ShownRows
from gradveil.threat import Reconstruction
from gradveil.threat.shown import TARGETS, picture


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "L")])
def test_pictures_stand_side_by_side(channels, mode):
    images = torch.stack(
        [torch.zeros(channels, 4, 5), torch.ones(channels, 4, 5), torch.full((channels, 4, 5), torch.nan)]
    )
    drawn = Image.open(io.BytesIO(picture(images)))
    assert (drawn.size, drawn.mode) == ((15, 4), mode)
    pixels = np.asarray(drawn.convert("L"))
    assert pixels[0, [0, 5, 10]].tolist() == [0, 255, 128]


def test_a_reconstruction_shows_its_guesses_and_what_is_left_out():
    count = TARGETS + 3
    made = Reconstruction(
        torch.rand(count, 2, 1, 4, 4), torch.zeros(count, 2), torch.arange(count) / 7, torch.arange(count) % 2 == 0
    )
    html = made._repr_html_()
    assert html.count("<img") == TARGETS
    assert "and 3 more targets" in html
    assert html.count("did not converge") == TARGETS // 2


def test_rows_are_a_list_and_a_table():
    rows = ShownRows({"kind": "privacy", "defence": "<b>", "attack": "gs", "psnr": 12.5} for _ in range(MOST_ROWS + 1))
    assert rows == list(rows)
    html = rows._repr_html_()
    assert html.count("<tr>") == MOST_ROWS + 1
    assert "&lt;b&gt;" in html
    assert "and 1 more rows" in html
