"""Training into a folder: the files that it writes, and the same result however often it is interrupted."""

import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gradveil.runs.train
from gradveil import cli
from gradveil.config import TrainSettings, make_train_settings, read_settings
from gradveil.errors import DivergedError, RunFolderError
from gradveil.report.training import rewrite_page
from gradveil.runs.train import train
from gradveil.storage import read_metadata

DEFENCES = '''
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradveil.defences import Defence


@dataclass(frozen=True)
class Counting(Defence):
    """Sends its update times the number of rounds that this client has trained: a state advanced twice shows."""

    reports: ClassVar = {"counting_times": "rounds that the client has trained"}

    def on_data(self, data, client):
        client.state["times"] = torch.zeros(())
        return replace(data, images=data.images.flip(-1))

    def on_batch(self, batch, client):
        client.state["batches"] = client.state.get("batches", torch.zeros(())) + 1
        return batch

    def on_update(self, update, client):
        client.state["times"] = client.state["times"] + 1
        client.report("counting_times", float(client.state["times"]))
        noise = 1 + 0.01 * client.rng.uniform((1,))
        return update.map(lambda tensor: tensor * noise * (0.5 + client.state["times"] / 50))

    def on_server(self, update, server):
        server.state["seen"] = server.state.get("seen", torch.zeros(())) + 1
        return update * (1 / (1 + float(server.state["seen"]) / 100))


@dataclass(frozen=True)
class Growing(Defence):
    """Keeps more every round, on the server or on the device, until the disk is full."""

    where: str = "server"

    def on_update(self, update, client):
        if self.where == "device":
            client.state["log"] = torch.ones(len(client.state.get("log", [])) + 150)
        return update

    def on_server(self, update, server):
        if self.where == "server":
            server.state["log"] = torch.ones(len(server.state.get("log", [])) + 40)
        return update
'''
MODELS = """
from torch import nn


def dropout(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.LazyLinear(num_classes))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a small data set and a user's own files."""
    folder = tmp_path_factory.mktemp("own")
    rng = np.random.default_rng(0)
    labels = np.arange(100) % 3
    images = (rng.random((100, 8, 8)) * 60 + labels[:, None, None] * 60).astype(np.uint8)
    arrays = {"x_train": images[:80], "y_train": labels[:80], "x_test": images[80:], "y_test": labels[80:]}
    np.savez(folder / "small.npz", **arrays)
    (folder / "defences.py").write_text(DEFENCES)
    (folder / "models.py").write_text(MODELS)
    return folder


@pytest.fixture(scope="module")
def small(place):
    return TrainSettings(
        dataset=str(place / "small.npz"), model="logistic", clients=3, sampled=2, rounds=4, batch_size=8, momentum=0.0
    )


@pytest.fixture(scope="module")
def counting(small, place):
    return replace(small, defence=f"{place / 'defences.py'}:Counting")


@pytest.fixture
def no_pictures(monkeypatch):
    """Skip the figure and the page, which take longer than the small runs themselves."""
    monkeypatch.setattr(gradveil.runs.train, "draw_curves", lambda rows, out: None)
    monkeypatch.setattr(gradveil.runs.train, "write_page", lambda *args: None)


def rows_of(out):
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


def result(out):
    """Return all that must not depend on interruptions: every file except figures, pages and times."""
    timeless = [{key: value for key, value in row.items() if key != "seconds"} for row in rows_of(out)]
    files = {"rows": timeless}
    for path in sorted(out.rglob("*.safetensors")):
        tensors = {key: tensor.numpy().tobytes() for key, tensor in load_file(path).items()}
        files[str(path.relative_to(out))] = (tensors, read_metadata(path))
    for name in ("clients.jsonl", "settings.toml"):
        files[name] = (out / name).read_bytes()
    return files


def same_weights(one, two):
    a, b = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(tensor, b[key]) for key, tensor in a.items())


def test_a_run_writes_everything_into_its_folder(small, tmp_path):
    seen = []
    made = train(small, tmp_path / "run", workers=0, progress=lambda done, row, *_: seen.append((done, row)))
    names = {path.name for path in (tmp_path / "run").iterdir()} - {".lock"}
    assert names == {
        "checkpoint.safetensors", "clients.jsonl", "curves.png", "curves.svg", "model.safetensors", "report.html",
        "rows.jsonl", "settings.toml",
    }  # fmt: skip
    rows = rows_of(tmp_path / "run")
    assert rows == made.rows
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert all({"accuracy", "loss", "seconds"} <= row.keys() for row in rows)
    assert all(0 <= row["accuracy"] <= 1 and row["loss"] > 0 and row["seconds"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert list(dict.fromkeys(done for done, _ in seen)) == [0, 1, 2, 3, 4]
    assert seen[0][1] is None
    assert seen[-1][1] == rows[-1]
    clients = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    assert clients == made.clients
    assert [row["client"] for row in clients] == [0, 1, 2]
    assert sum(row["images"] for row in clients) == 80
    assert make_train_settings(read_settings(tmp_path / "run" / "settings.toml")) == small
    assert read_metadata(tmp_path / "run" / "model.safetensors") == {"round": "4", "model": "logistic"}
    tensors, checkpoint = load_file(tmp_path / "run" / "model.safetensors"), tmp_path / "run" / "checkpoint.safetensors"
    assert {f"model.{key}" for key in tensors} == load_file(checkpoint).keys()
    assert f"{rows[-1]['accuracy']:.2%}" in (tmp_path / "run" / "report.html").read_text()


def test_the_figures_are_those_of_the_saved_model(small, tmp_path, no_pictures):
    made = train(replace(small, sensitive="0.5"), tmp_path, workers=0)
    model = load_file(tmp_path / "model.safetensors")
    with np.load(small.dataset) as data:
        images, labels = data["x_test"] / 255, torch.from_numpy(data["y_test"])
    scaled = torch.from_numpy((images - 0.5) / 0.5).float().flatten(1)
    logits = scaled @ model["linear.weight"].T + model["linear.bias"]
    assert made.rows[-1]["accuracy"] == (logits.argmax(1) == labels).double().mean().item()
    assert made.rows[-1]["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert 0 <= made.rows[-1]["accuracy_sensitive"] <= 1


def test_same_settings_same_bits_other_seed_other_bits(counting, tmp_path, no_pictures):
    for name in ("a", "b"):
        torch.rand(7)  # earlier runs in this process must not matter
        train(counting, tmp_path / name, workers=0)
    assert result(tmp_path / "a") == result(tmp_path / "b")
    train(replace(counting, seed=1), tmp_path / "c", workers=0)
    assert not same_weights(tmp_path / "a", tmp_path / "c")


def test_the_model_file_is_the_same_byte_by_byte(small, tmp_path, no_pictures):
    once = replace(small, rounds=1)
    for number in range(4):
        train(once, tmp_path / str(number), workers=0)
    assert len({(tmp_path / str(number) / "model.safetensors").read_bytes() for number in range(4)}) == 1


def test_saved_rounds_are_what_a_server_sees(small, tmp_path, no_pictures):
    """The received model plus the weighted sum of the saved updates is the model that the next round receives."""
    chosen = replace(small, save_rounds=(1, 2, 3, 4), lr_decay=0.5, lr=0.25)
    train(chosen, tmp_path, workers=0)
    sizes = [json.loads(line)["images"] for line in (tmp_path / "clients.jsonl").read_text().splitlines()]
    folders = [tmp_path / "rounds" / f"{number:06d}" for number in (1, 2, 3, 4)]
    after = [load_file(folder / "model.safetensors") for folder in folders[1:]] + [
        load_file(tmp_path / "model.safetensors")
    ]
    for number, (folder, then) in enumerate(zip(folders, after, strict=True), 1):
        updates = {int(path.stem.split("-")[1]): path for path in folder.glob("update-*.safetensors")}
        assert len(updates) == 2
        total = sum(sizes[client] for client in updates)
        for name, tensor in load_file(folder / "model.safetensors").items():
            moved = sum(load_file(path)[name].double() * (sizes[client] / total) for client, path in updates.items())
            assert moved.abs().max() > 0
            assert torch.allclose(tensor.double() + moved, then[name].double(), rtol=0, atol=1e-7)
        for client, path in updates.items():
            facts = read_metadata(path)
            assert (facts["client"], facts["round"]) == (str(client), str(number))
            assert int(facts["num_examples"]) == sizes[client]
            assert float(facts["lr"]) == 0.25 * 0.5 ** (number - 1)
            assert facts["defence"] == "none"


def test_only_chosen_rounds_are_saved(small, tmp_path, no_pictures):
    train(replace(small, save_rounds=(2,)), tmp_path, workers=0)
    assert [path.name for path in (tmp_path / "rounds").iterdir()] == ["000002"]


def test_private_files_are_only_in_the_private_folders(counting, tmp_path, no_pictures):
    train(replace(counting, save_rounds=(1, 4)), tmp_path / "run", workers=0)
    private = list((tmp_path / "run" / "clients").rglob("*.safetensors"))
    assert {path.parent.relative_to(tmp_path / "run").as_posix() for path in private} == {
        f"clients/{client}/private" for client in range(3)
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in private} == {0o700}
    times = 0
    for client in range(3):
        newest = max((tmp_path / "run" / "clients" / str(client) / "private").glob("state-*.safetensors"))
        times += int(load_file(newest)["state.times"])
    assert times == 4 * 2
    for path in (tmp_path / "run").rglob("*.safetensors"):
        if path not in private:
            assert not any("times" in key or "batches" in key or "images" in key for key in load_file(path)), path


def test_a_run_without_state_keeps_no_private_files(small, tmp_path, no_pictures):
    train(small, tmp_path, workers=0)
    assert not (tmp_path / "clients").exists()


def test_a_random_layer_of_the_model_draws_from_the_seed(small, place, tmp_path, no_pictures):
    """Dropout draws from torch's global generator, which must depend only on client, round and seed."""
    random_model = replace(small, model=f"{place / 'models.py'}:dropout", lr=0.5)
    train(random_model, tmp_path / "a", workers=0)
    torch.rand(3)
    train(random_model, tmp_path / "b", workers=0)
    assert result(tmp_path / "a") == result(tmp_path / "b")
    stop_after(random_model, tmp_path / "c", 2)
    torch.rand(5)
    train(random_model, tmp_path / "c", workers=0, resume=True)
    assert result(tmp_path / "a") == result(tmp_path / "c")


class Killed(BaseException):
    """An exception that simulates kill -9: no ordinary handler catches it."""


def stop_after(settings, out, rounds):
    def stop(done, *_):
        if done == rounds:
            raise Killed

    with pytest.raises(Killed):
        train(settings, out, workers=0, progress=stop)


@contextmanager
def killed_at(number, out):
    """Kill the run before (even) or after (odd) the n-th operation on a file below ``out``."""
    real = {name: getattr(os, name) for name in ("open", "fsync", "replace", "unlink")}
    count = 0

    def wrap(name):
        def act(*args, **kwargs):
            nonlocal count
            if name != "fsync" and not str(args[0]).startswith(str(out)):
                return real[name](*args, **kwargs)
            count += 1
            if 2 * count == number + 2:
                raise Killed
            try:
                done = real[name](*args, **kwargs)
            except FileNotFoundError:  # nothing was there to remove
                if 2 * count == number + 1:
                    raise Killed from None
                raise
            if 2 * count == number + 1:
                if name == "open":
                    os.close(done)
                raise Killed
            return done

        return act

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(os, name, wrap(name))
        yield


def test_a_run_killed_at_any_write_and_resumed_is_the_same(counting, tmp_path, no_pictures):
    settings = replace(counting, rounds=3, clients=2, sampled=0, save_rounds=(2,))
    train(settings, tmp_path / "whole", workers=0)
    wanted = result(tmp_path / "whole")
    number, kills = 0, 0
    while True:
        out = tmp_path / f"at-{number}"
        try:
            with killed_at(number, out):
                train(settings, out, workers=0)
        except Killed:
            kills += 1
        else:
            break
        if number % 3 == 0:  # and once more while resuming
            with suppress(Killed), killed_at(number % 17, out):
                train(settings, out, workers=0, resume=True)
        train(settings, out, workers=0, resume=True)
        assert result(out) == wanted, f"killed at {number}"
        number += 1
    assert kills > 100


def test_a_finished_run_resumed_does_nothing(small, tmp_path):
    first = train(small, tmp_path, workers=0)
    wanted, rows = result(tmp_path), (tmp_path / "rows.jsonl").read_bytes()
    seen = []
    again = train(small, tmp_path, workers=0, resume=True, progress=lambda done, *_: seen.append(done))
    assert set(seen) == {4}
    assert again.rows == first.rows
    assert again.clients == first.clients
    assert result(tmp_path) == wanted
    assert (tmp_path / "rows.jsonl").read_bytes() == rows


@pytest.mark.parametrize("lengths", [(1, 4), (2, 3, 4), (0, 4), (0, 2, 4), (0, 0, 1, 4)])
def test_rounds_may_grow_step_by_step(counting, tmp_path, no_pictures, lengths):
    train(counting, tmp_path / "whole", workers=0)
    for rounds in lengths:
        train(replace(counting, rounds=rounds), tmp_path / "grown", workers=0, resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "grown")
    grown = [row for row in result(tmp_path / "grown")["rows"] if row["round"]]
    assert grown == result(tmp_path / "whole")["rows"]


def test_zero_rounds_only_evaluate(small, tmp_path):
    made = train(replace(small, rounds=0), tmp_path, workers=0)
    assert [row["round"] for row in made.rows] == [0]
    assert made.rows == rows_of(tmp_path)
    assert "before any training" in (tmp_path / "report.html").read_text()
    assert train(replace(small, rounds=0), tmp_path, workers=0, resume=True).rows == made.rows


def test_a_run_shortened_to_where_it_was_killed_still_finishes(small, tmp_path):
    """Rounds between evaluations have no accuracy, but the last row of a finished run must have one."""
    rare = replace(small, rounds=9, eval_every=5)
    stop_after(rare, tmp_path, 3)
    with suppress(RunFolderError):  # refusing is also correct
        made = train(replace(rare, rounds=3), tmp_path, workers=0, resume=True)
        assert made.rows[-1]["accuracy"] is not None
    made = train(rare, tmp_path, workers=0, resume=True)
    assert made.rows[-1]["round"] == 9


def test_rounds_between_evaluations_have_no_accuracy(small, tmp_path):
    made = train(replace(small, rounds=5, eval_every=2), tmp_path, workers=0)
    assert [row["accuracy"] is not None for row in made.rows] == [False, True, False, True, True]
    assert [row["loss"] is not None for row in made.rows] == [False, True, False, True, True]


@pytest.mark.parametrize("lr", [1e20, 1e30, 1e37, 1e38])
def test_a_diverging_run_says_so_and_keeps_its_checkpoint(place, tmp_path, no_pictures, lr):
    settings = TrainSettings(
        dataset=str(place / "small.npz"), model="mlp:hidden=4", clients=2, rounds=6, lr=lr, batch_size=8
    )
    with pytest.raises(DivergedError, match="Lower --lr"):
        train(settings, tmp_path, workers=0)
    assert len(rows_of(tmp_path)) < 6
    with pytest.raises(DivergedError, match="Lower --lr"):
        train(settings, tmp_path, workers=0, resume=True)


def test_other_data_under_the_same_name_are_noticed(small, tmp_path, no_pictures):
    path = tmp_path / "data.npz"
    with np.load(small.dataset) as data:
        arrays = dict(data)
    np.savez(path, **arrays)
    moved = replace(small, dataset=str(path))
    stop_after(moved, tmp_path / "run", 2)
    np.savez(path, **arrays | {"y_train": arrays["y_train"][::-1]})
    with pytest.raises(RunFolderError, match="must have the data, weights and own files it began with"):
        train(moved, tmp_path / "run", workers=0, resume=True)
    np.savez(path, **arrays)
    train(moved, tmp_path / "run", workers=0, resume=True)
    train(moved, tmp_path / "whole", workers=0)
    assert same_weights(tmp_path / "run", tmp_path / "whole")


@contextmanager
def disk_of(limit):
    """Limit every file to ``limit`` bytes, as on a full disk: the write fails in the middle."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def options(settings):
    pairs = read_settings_of(settings)
    return [piece for key, value in pairs.items() for piece in (f"--{key.replace('_', '-')}", value)]


def read_settings_of(settings):
    default = TrainSettings()
    return {
        key: str(value) for key, value in vars(settings).items() if value != getattr(default, key) and value is not True
    }


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["gradveil", "train", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    captured = capsys.readouterr()
    return end.value.code or 0, captured.out, captured.err


@pytest.mark.parametrize("full", ["rows", "checkpoint", "private"])
def test_a_full_disk_ends_the_run_and_loses_nothing(small, place, tmp_path, monkeypatch, capsys, no_pictures, full):
    defence = {
        "rows": "none",
        "checkpoint": f"{place / 'defences.py'}:Growing",
        "private": f"{place / 'defences.py'}:Growing:where=device",
    }[full]
    settings = replace(small, rounds=40, defence=defence)
    train(settings, tmp_path / "whole", workers=0)
    out = tmp_path / "run"
    for _ in range(2):  # resuming on the same full disk fails in the same way
        with disk_of(5000):
            code, _, err = command(monkeypatch, capsys, *options(settings), "--out", out, "--workers", 0, "--resume")
        assert code == 2
        last = err.strip().splitlines()[-1]
        assert last.startswith("RunFolderError: ")
        assert "could not be written: File too large" in last
        assert last.endswith("run again with --resume.")
        finished = int(read_metadata(out / "checkpoint.safetensors")["round"])
        assert 2 < finished < 40
        assert not list(out.rglob(".*.part"))
    train(settings, out, workers=0, resume=True)
    assert result(out) == result(tmp_path / "whole")


def test_a_full_disk_for_scratch_files_is_a_clear_error(tmp_path, monkeypatch, capsys):
    with disk_of(200_000):  # the data for the workers are larger
        code, _, err = command(
            monkeypatch,
            capsys,
            "--model",
            "logistic",
            "--clients",
            4,
            "--rounds",
            1,
            "--workers",
            2,
            "--out",
            tmp_path / "r",
        )
    assert code == 2
    assert "must have room for the workers' data" in err.strip().splitlines()[-1]
    assert not (tmp_path / "r").exists()


SLOW = ["--model", "logistic", "--partition", "iid:images=100", "--clients", "4", "--epochs", "3", "--rounds", "80"]


def start(out, tmp_path, *arguments):
    (tmp_path / "tmp").mkdir(exist_ok=True)
    call = [sys.executable, "-m", "gradveil.cli", "train", "--out", str(out), "--resume", "--json", *arguments]
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    pipe = subprocess.PIPE
    return subprocess.Popen(call, stdout=pipe, stderr=pipe, text=True, env=environment, preexec_fn=_hear_interrupts)


def _hear_interrupts():
    """Restore the handling of Ctrl-C, which a background job ignores; the run under test must not inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_for(process, condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def finished(out):
    with suppress(Exception):
        return int(read_metadata(out / "checkpoint.safetensors")["round"])
    return 0


def kill(process):
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "defended"), [(0, False), (0, True), (2, True)])
def test_kill_9_at_any_moment_does_not_change_the_result(place, tmp_path, workers, defended):
    given = [*SLOW, "--workers", str(workers)]
    given += ["--defence", f"{place / 'defences.py'}:Counting"] if defended else []
    out, draw = tmp_path / "run", random.Random(workers + 10 * defended)
    moments = [
        lambda before: (out / ".lock").exists,  # in the set-up
        lambda before: lambda: (out / "rows.jsonl").exists() and (out / "rows.jsonl").stat().st_size > 0,
        lambda before: lambda: finished(out) > before + 3,
    ]
    if workers:  # the workers make it long
        del moments[1]
    elif not defended:
        moments.append(lambda before: lambda: finished(out) > before + draw.randint(1, 20))
    for moment in moments:
        process = start(out, tmp_path, *given)
        wait_for(process, moment(finished(out)))
        time.sleep(draw.uniform(0, 0.04))
        kill(process)
    assert 0 < finished(out) < 80
    process = start(out, tmp_path, "--workers", str(workers), "--trust-code")  # all else comes from the folder
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["rows"] == rows_of(out)
    settings = make_train_settings(read_settings(out / "settings.toml"))
    assert settings.rounds == 80
    train(settings, tmp_path / "whole", workers=0)
    assert result(out) == result(tmp_path / "whole")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_folder_in_use_is_refused_and_ctrl_c_ends_cleanly(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    process = start(out, tmp_path, *SLOW[:-1], "100000", "--workers", "0")
    try:
        wait_for(process, lambda: finished(out) > 0)
        code, stdout, err = command(monkeypatch, capsys, *SLOW[:-1], 100000, "--out", out, "--resume", "--workers", 0)
        assert (code, stdout) == (2, "")
        assert "must not be in use" in err.strip().splitlines()[-1]
        process.send_signal(signal.SIGINT)
        stdout, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert stdout == ""
    assert "Traceback" not in err
    assert "run again with --resume" in err
    assert finished(out) > 0
    assert Path(out / "settings.toml").exists()


def test_a_training_that_learns_nothing_says_so_in_rows_result_and_page(small, tmp_path):
    out = tmp_path / "run"
    still = replace(small, dataset="mnist-5k", partition="iid:images=20", rounds=6, lr=1e-9)
    found = train(still, out, workers=0)
    assert [row.get("at_chance") for row in rows_of(out)] == [None] * 4 + [True] * 2
    assert "another --lr (now 1e-09)" in found.warning
    assert found.warning in unescape((out / "report.html").read_text())
    assert "has not learned anything" in found._repr_html_()
    (out / "report.html").unlink()
    rewrite_page(out)
    assert found.warning in unescape((out / "report.html").read_text())


def test_a_training_that_learns_does_not_warn(small, tmp_path, no_pictures):
    learns = replace(small, dataset="mnist-5k", partition="iid:images=60", rounds=5)
    assert train(learns, tmp_path / "run", workers=0).warning == ""
    assert "at_chance" not in rows_of(tmp_path / "run")[-1]
