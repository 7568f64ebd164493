"""The report of an audit: its content, and the handling of folders that are unfinished, broken or of another kind."""

import base64
import csv
import io
import json
import re
import shlex
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from gradveil.errors import RunFolderError
from gradveil.metrics import schema_of
from gradveil.report import audit, sheets
from gradveil.report.audit import command_of, headline, write_report
from gradveil.report.audit_folder import clean, read_audit
from gradveil.report.figures import draw_figures
from gradveil.report.sheets import png, read_gallery
from gradveil.rows import to_plain
from gradveil.storage import load_tensors, save_tensors

from .folders import STEPS, Made, privacy_row, utility_row

VOID = {"meta", "link", "input", "wbr", "line", "circle"}
SECTIONS = ["gallery", "plane", "table", "rows", "about"]


class Checker(HTMLParser):
    """A parser that checks that every tag is closed, and collects ids, addresses, event handlers and texts."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.handlers, self.texts = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [value for key, value in attrs if key in ("src", "href")]
        self.handlers += [key for key, _ in attrs if key.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)


def read(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    assert len(checker.ids) == len(set(checker.ids))
    return text, checker, re.sub(r"\s+", " ", "".join(checker.texts)).replace("\xa0", " ")


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))


def sheet(text, number):
    found = re.search(rf'id="sheet-{number}">(.*?)</script>', text).group(1)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(found))))


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Skip matplotlib's figures, which take most of the time."""
    monkeypatch.setattr(audit, "draw_figures", lambda *_: [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Made().write(tmp_path_factory.mktemp("audit") / "run")


def test_the_page_is_one_file_with_its_sections_in_order(folder):
    text, checker, words = read(folder)
    assert [name for name in checker.ids if name in SECTIONS] == SECTIONS
    assert all(link.startswith(("#", "data:")) for link in checker.links)
    assert "Content-Security-Policy" in text
    assert headline(read_audit(folder).rows) in words
    assert "SSIM to the truth is at least 0.5" in words
    assert "unfinished" not in words
    assert "knows the defence" in words


def test_all_files_are_written(folder, monkeypatch):
    monkeypatch.setattr(audit, "draw_figures", draw_figures)
    write_report(folder)
    assert sorted(path.name for path in (folder / "figures").iterdir()) == ["gallery.png", "plane.png", "plane.svg"]
    with (folder / "summary.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["defence"], line["adaptive"]) for line in lines] == [
        ("none", "False"),
        ("prune:fraction=0.7", "False"),
        ("prune:fraction=0.7", "True"),
    ]
    assert lines[0]["accuracy"] == "0.969"
    assert lines[0]["psnr_low"] == ""
    assert lines[2]["knows"] == "labels+num-examples+defence"


def test_long_names_leave_room_for_the_pictures(tmp_path, monkeypatch):
    """matplotlib would warn, which is an error here, that it can't lay out the figure."""
    monkeypatch.setattr(audit, "draw_figures", draw_figures)
    folder = Made(attacks=("folder/" * 40 + "mine.py:Mine:iterations=1000",)).write(tmp_path / "run")
    write_report(folder)
    assert (folder / "figures" / "gallery.png").exists()


def test_the_same_folder_gives_the_same_page(folder):
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


def test_the_sheets_hold_the_truth_and_the_guesses(folder):
    text, _, _ = read(folder)
    truth = load_tensors(folder / "truth.safetensors")["images"]
    assert (sheet(text, 0) == np.concatenate(truth[:, 0, 0].numpy(), axis=1)).all()
    iterates = load_tensors(folder / "cells" / "000.safetensors")["iterates"]
    found = sheet(text, 1)
    assert found.shape == (len(STEPS) * 16, 4 * 16)
    assert (found[16:32, 32:48] == iterates[1, 2, 0, 0].numpy()).all()
    line = data_of(text)["lines"][0]
    assert line["steps"] == list(STEPS)
    rows = read_audit(folder).rows
    assert line["psnr"][-1] == [round(row["psnr"], 2) for row in rows[:4]]
    assert line["psnr"][0][0] < line["psnr"][-1][0]


def test_cells_of_one_line_are_joined_and_missing_targets_stay_empty(tmp_path):
    folder = Made(targets=6, cell_size=2, seeds=(0, 1)).write(tmp_path / "run")
    for kind in ("json", "safetensors"):
        (folder / "cells" / f"001.{kind}").unlink()
    gallery = read_gallery(read_audit(folder))
    assert len(gallery.lines) == 6
    assert gallery.lines[0].there == (True, True, False, False, True, True)
    whole = load_tensors(folder / "cells" / "002.safetensors")["images"]
    assert (gallery.lines[0].frames[-1, 4] == whole[0, 0].numpy()).all()
    _, _, words = read(folder)
    assert "21 of 22 cells are done" in words


def test_a_missing_guess_is_shown_as_a_chequerboard():
    frames = np.full((2, 2, 1, 16, 16), 7, np.uint8)
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(png(frames, [True, False])))))
    assert (picture[:, :16] == 7).all()
    assert sorted(set(picture[:, 16:].flatten().tolist())) == [153, 204]


@pytest.mark.parametrize(("channels", "mode", "height"), [(1, "L", 8), (3, "RGB", 8), (2, "L", 16)])
def test_any_number_of_channels_can_be_shown(channels, mode, height):
    picture = Image.open(io.BytesIO(base64.b64decode(png(np.zeros((1, 3, channels, 8, 8), np.uint8)))))
    assert (picture.mode, picture.size) == (mode, (24, height))


def test_batches_are_shown_image_by_image_with_the_psnr_of_each(tmp_path):
    folder = Made(targets=2, images=3, iterates=False).write(tmp_path / "run")
    gallery = read_gallery(read_audit(folder))
    assert [(column.target, column.image) for column in gallery.columns] == [(t, i) for t in range(2) for i in range(3)]
    guess = load_tensors(folder / "cells" / "000.safetensors")["images"]
    truth = load_tensors(folder / "truth.safetensors")["images"]
    mse = ((guess[1, 2].double() - truth[1, 2]) / 255).square().mean()
    assert gallery.lines[0].psnr == [pytest.approx(gallery.lines[0].psnr[0])]
    assert gallery.lines[0].psnr[0][5] == pytest.approx(float(-10 * mse.log10()), abs=0.01)
    _, _, words = read(folder)
    assert "2 of 2 batches are recognisable" in words
    assert "No intermediate pictures were saved" in words


def test_only_some_of_many_targets_are_shown_with_a_note(tmp_path, monkeypatch):
    folder = Made(targets=20).write(tmp_path / "run")
    text, _, words = read(folder)
    assert len(data_of(text)["columns"]) == 16
    assert "first 16 of 20 targets" in words
    monkeypatch.setattr(sheets, "BUDGET", 4000)
    gallery = read_gallery(read_audit(folder))
    assert sum(line.frames.size for line in gallery.lines) + gallery.truth.size <= 4000
    assert (
        gallery.lines[0].frames[-1, 0] == load_tensors(folder / "cells/000.safetensors")["images"][0, 0].numpy()
    ).all()


def test_missing_or_broken_images_give_a_note(tmp_path):
    folder = Made().write(tmp_path / "run")
    (folder / "cells" / "000.safetensors").unlink()
    (folder / "cells" / "001.safetensors").write_bytes(b"not whole")
    save_tensors(folder / "cells" / "002.safetensors", {"images": torch.zeros(1)})
    _, _, words = read(folder)
    for name in ("000", "001", "002"):
        assert f"cells/{name}.safetensors is missing or broken" in words
    (folder / "truth.safetensors").unlink()
    _, _, words = read(folder)
    assert "truth.safetensors is missing" in words
    assert "There are no pictures yet" in words


def test_failed_cells_are_listed_with_their_reasons(tmp_path):
    folder = Made().write(tmp_path / "run")
    rows = [
        privacy_row("soteria", target=n, psnr=None, ssim=None, failed=True, why="no memory <left>", cell="f")
        for n in (0, 1)
    ]
    with (folder / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in [*rows, utility_row("soteria", None, failed=True, why="NaN")])
    text, _, words = read(folder)
    assert "3 rows are of cells that failed" in words
    assert "soteria, gs: no memory <left> (2 rows)" in words
    assert "no memory &lt;left&gt;" in text
    assert "soteria: NaN" in words


def test_a_truncated_last_line_is_skipped_with_a_note_and_read_from_its_cell(tmp_path):
    folder = Made(accuracy={}).write(tmp_path / "run")
    path = folder / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    _, _, words = read(folder)
    assert "1 broken line of rows.jsonl" in words
    assert len(read_audit(folder).rows) == 12
    (folder / "cells" / "002.json").write_text("[{")
    assert len(read_audit(folder).rows) == 11
    assert "cells/002.json is broken" in read(folder)[2]


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    folder = Made().write(tmp_path / "run")
    (folder / "rows.jsonl").unlink()
    for path in (folder / "cells").iterdir():
        path.unlink()
    _, _, words = read(folder)
    assert "No attack has finished yet." in words
    assert "0 of 5 cells are done" in words
    assert "there are no utility rows yet" in words
    (folder / "plan.json").unlink()
    assert "plan.json is missing" in read(folder)[2]
    (folder / "plan.json").write_text('{"cells": [{"name": "../../x"}]}')
    assert "plan.json is broken" in read(folder)[2]


NASTY = "own/<img src=x onerror=alert(1)>.py:D:x=</script><script>alert('2')</script>&\"'"


def test_texts_of_the_user_are_escaped(tmp_path):
    made = Made(
        let_through={("none", False): 0.9, (NASTY, False): 0.5},
        accuracy={"none": 0.9, NASTY: 0.8},
        attacks=(f"gs{NASTY}",),
        settings={"dataset": NASTY, "model": NASTY, "other": [NASTY]},
    )
    folder = made.write(tmp_path / "run")
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(privacy_row(NASTY, "x", failed=True, why=NASTY + "\ud800", knows=[NASTY])) + "\n")
    text, checker, words = read(folder)
    assert not checker.handlers
    assert "<img" not in text
    assert text.count("<script") == 2 + 1 + 2  # the data, the page's script; the truth's sheet and two lines'
    assert words.count("<script>alert('2')</script>") >= 8
    assert NASTY in unescape(text)
    assert data_of(text)["lines"][1]["defence"] == NASTY


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda folder: None, "got no such folder"),
        (lambda folder: folder.mkdir(), "got a folder without settings.toml"),
        (lambda folder: folder.write_text("x"), "got no such folder"),
        (lambda folder: settings(folder, b'dataset = "mnist"'), "got that of another run"),
        (lambda folder: settings(folder, b'kind = "reproduce"'), "got kind = 'reproduce'"),
        (lambda folder: settings(folder, b"kind = "), "can't be read"),
        (lambda folder: settings(folder, b"\xff\xfe"), "can't be read"),
    ],
)
def test_other_folders_are_refused_in_a_sentence(tmp_path, make, got):
    make(tmp_path / "run")
    with pytest.raises(RunFolderError, match=re.escape(got)) as error:
        write_report(tmp_path / "run")
    assert "must be the folder of an audit" in str(error.value)
    assert str(error.value).endswith("Name the --out folder of gradveil audit.")


def settings(folder, content):
    folder.mkdir()
    (folder / "settings.toml").write_bytes(content)


def test_the_command_repeats_the_settings():
    text = command_of(
        {
            "kind": "audit",
            "dataset": "my data/x.npz",
            "defences": ["none", "prune:fraction=0.7,seed=1"],
            "tap": [0, 1],
            "lr": 0.05,
            "adaptive": True,
            "resume": False,
            "batch_size": 8,
            "weights": "-odd",
        },
        {"batch_size": 8},
    )
    assert shlex.split(text) == [
        "gradveil", "audit", "--dataset", "my data/x.npz", "--defences", "none,prune:fraction=0.7,seed=1",
        "--tap", "0/1", "--lr", "0.05", "--adaptive", "--weights=-odd", "--out", "DIR",
    ]  # fmt: skip


@pytest.mark.parametrize("raw", [None, 3, [], {}, {"defence": 1}, {"defence": "a", "kind": "other"}])
def test_invalid_rows_are_skipped(raw):
    assert clean(raw) is None


def test_figures_that_are_not_numbers_count_as_missing():
    row = clean({"defence": "a", "psnr": float("inf"), "ssim": "0.5", "mse": True, "lpips": 10**400, "seed": "x"})
    assert [row[key] for key in ("psnr", "ssim", "mse", "lpips")] == [None] * 4
    assert row["seed"] == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"head": 0}, {"help": ["x"]}, {"format": None}, {"tables": []}, {"tables": "x"}, {"mean": False},
        {"type": "text"},
        {"key": "defence"}, {"key": "renamed"}, {"leakier": "no"}, {"shown": {}}, {"later": 1},
    ],
)  # fmt: skip
def test_damaged_metrics_of_a_plan_are_a_note(tmp_path, damage):
    folder = Made(targets=1, iterates=False).write(tmp_path / "run")
    plan = json.loads((folder / "plan.json").read_text())
    metrics = to_plain(schema_of().metrics)
    (folder / "plan.json").write_text(json.dumps(plan | {"metrics": metrics}))
    assert "plan.json is" not in read(folder)[2]
    metrics[0] |= damage
    (folder / "plan.json").write_text(json.dumps(plan | {"metrics": metrics}))
    assert "plan.json is broken" in read(folder)[2]
