"""``gradveil init`` writes settings that ``gradveil audit --config`` runs, with every setting explained."""

import dataclasses
import re
import tomllib

import numpy as np
import pytest

from gradveil.audits import make_audit_settings
from gradveil.audits.settings import AuditSettings
from gradveil.config import read_settings
from gradveil.data import load_dataset
from gradveil.runs.first_config import chosen_for, first_config


@pytest.fixture
def scans(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (60, 20, 20, 3), np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "scans.npz", x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])
    return tmp_path / "scans.npz"


def test_an_audit_reads_what_it_wrote(gradveil, scans, tmp_path):
    out = tmp_path / "audit.toml"
    assert gradveil("init", scans, "--out", out).code == 0
    made = make_audit_settings(read_settings(out))
    assert made.dataset == str(scans)
    assert made.adaptive
    assert "60 training and 9 test images of 3x20x20, 3 classes of 20 to 20" in out.read_text()
    assert str(out) in out.read_text()
    estimated = gradveil("audit", "--config", out, "--estimate", "--out", tmp_path / "x")
    assert estimated.code == 0, estimated.err
    assert "Estimate" in estimated.out + estimated.err


def test_it_explains_every_setting_and_the_comments_hold_the_defaults(scans):
    dataset = load_dataset(str(scans))
    text = first_config(dataset)
    commented = tomllib.loads("\n".join(re.findall(r"^# (\w+ = .*)$", text, re.MULTILINE)))
    defaults = {field.name: field.default for field in dataclasses.fields(AuditSettings)}
    assert {*tomllib.loads(text), *commented} == set(defaults)
    assert set(tomllib.loads(text)) == set(chosen_for(dataset))
    for name, value in commented.items():
        assert (tuple(value) if isinstance(value, list) else value) == defaults[name]


def test_it_overwrites_nothing_unless_forced(gradveil, scans, tmp_path):
    out = tmp_path / "audit.toml"
    out.write_text("mine")
    refused = gradveil("init", scans, "--out", out)
    assert refused.code == 2
    assert "--force" in refused.last
    assert out.read_text() == "mine"
    assert gradveil("init", scans, "--out", out, "--force", "--json").code == 0
    assert out.read_text() != "mine"


def test_a_class_without_images_is_named(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8), np.uint8)
    np.savez(tmp_path / "x.npz", x_train=images, y_train=[0, 0, 2, 2], x_test=images, y_test=[0, 0, 2, 2])
    assert "no training image" in first_config(load_dataset(str(tmp_path / "x.npz")))
