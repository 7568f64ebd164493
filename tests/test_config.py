"""Settings of a run: invalid ones are refused, and a TOML file restores the same settings."""

import dataclasses
import math
import tomllib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.config import TrainSettings, make_train_settings, read_settings, to_toml, with_absolute_paths
from gradveil.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SETTINGS = st.builds(
    TrainSettings,
    dataset=TEXT,
    model=TEXT,
    defence=TEXT,
    partition=TEXT,
    sensitive=TEXT,
    weights=TEXT,
    normalise=TEXT,
    device=TEXT,
    clients=st.integers(5, 10**9),
    sampled=st.integers(0, 5),
    rounds=st.integers(9, 10**9),
    epochs=st.integers(1, 10**9),
    batch_size=st.integers(0, 10**9),
    lr=st.floats(1e-12, 1e12),
    lr_decay=st.floats(1e-300, 1),
    lr_steps=st.lists(st.integers(1, 10**6), max_size=3).map(tuple),
    lr_factor=st.floats(1e-6, 1),
    momentum=st.floats(1e-9, 1, exclude_max=True),
    nesterov=st.booleans(),
    weight_decay=st.floats(0, 1e9),
    sampling=st.sampled_from(["uniform", "uniform-replace", "size-replace"]),
    weighting=st.sampled_from(["size", "uniform", "unbiased"]),
    algorithm=st.sampled_from(["fedavg", "fedsgd"]),
    batch_norm=st.sampled_from(["average", "local", "freeze"]),
    tripwire=st.sampled_from(["off", "warn", "refuse"]),
    eval_every=st.integers(1, 99),
    save_rounds=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    seed=st.integers(0, 2**63 - 1),
)


def read(tmp_path, text):
    path = tmp_path / "settings.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_settings(path)


@given(settings=SETTINGS)
def test_settings_survive_a_round_trip_through_toml(settings, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "settings.toml"
    path.write_bytes(to_toml(settings))
    assert make_train_settings(read_settings(path)) == settings


def test_toml_holds_every_setting_in_order():
    assert list(tomllib.loads(to_toml(TrainSettings()).decode())) == [f.name for f in dataclasses.fields(TrainSettings)]


def test_every_setting_has_a_help_text():
    assert all(len(field.metadata["help"]) > 10 for field in dataclasses.fields(TrainSettings))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("clients", [0, -1, math.nan, -(10**400)]),
        ("rounds", [-1, math.nan, math.inf]),
        ("sampled", [-1]),
        ("epochs", [0, -3]),
        ("batch_size", [-1]),
        ("lr", [0.0, -0.1, math.nan, math.inf, -math.inf]),
        ("lr_decay", [0.0, -1.0, 1.1, math.nan, math.inf]),
        ("lr_steps", [(0,), (5, -1)]),
        ("defended", [(-1,), (0, 10)]),
        ("lr_factor", [0.0, -1.0, math.nan, math.inf]),
        ("momentum", [-0.1, 1.0, 2.0, math.nan, math.inf]),
        ("weight_decay", [-0.1, math.nan, math.inf]),
        ("eval_every", [0, -1]),
        ("save_rounds", [(0,), (21,), (-1,), (3, 99)]),
        ("seed", [-1, 2**63, 10**400]),
    ],
)
def test_numbers_out_of_range_are_named(field, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"^{field} must be .*got "):
            TrainSettings(**{field: value})


@pytest.mark.parametrize(
    ("field", "wrong", "hint"),
    [
        ("sampling", "unifrom", "uniform"),
        ("weighting", "sizes", "size"),
        ("algorithm", "fedav", "fedavg"),
        ("batch_norm", "freez", "freeze"),
        ("tripwire", "refuze", "refuse"),
    ],
)
def test_choices_get_a_hint(field, wrong, hint):
    with pytest.raises(ConfigError, match=f"Unknown {field} '{wrong}'. Did you mean '{hint}'"):
        TrainSettings(**{field: wrong})


def test_more_sampled_than_clients_needs_replacement():
    with pytest.raises(ConfigError, match=r"sampled must be at most clients .* got 11 of 10"):
        TrainSettings(clients=10, sampled=11)
    assert TrainSettings(clients=10, sampled=11, sampling="uniform-replace").num_sampled == 11
    assert TrainSettings(clients=10).num_sampled == 10


def test_nesterov_needs_momentum():
    with pytest.raises(ConfigError, match="momentum must be more than 0 for nesterov"):
        TrainSettings(nesterov=True, momentum=0.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cleints": 3}, "A training has no setting 'cleints'. Did you mean 'clients'?"),
        ({"clients": "three"}, "Setting clients of a training must be of type int, got 'three'."),
        ({"clients": 2.5}, "Setting clients of a training must be of type int, got 2.5."),
        ({"clients": True}, "Setting clients of a training must be of type int, got True."),
        ({"lr": "fast"}, "Setting lr of a training must be of type float, got 'fast'."),
        ({"lr": 10**400}, "Setting lr of a training must be of type float, got 1000"),
        ({"clients": 0}, "clients must be at least 1, got 0. Change --clients."),
        ({"lr_decay": 2.0}, "lr_decay must be in (0, 1], got 2.0. Change --lr-decay."),
        ({"lr": "1e999"}, "lr must be"),
        ({"lr": "nan"}, "lr must be"),
        ({"dataset": 5}, "Setting dataset of a training must be of type str, got 5."),
        (
            {"lr_steps": "1/b"},
            "Setting lr_steps of a training must be of type int, or several separated by slashes such as 1/2, ",
        ),
        ({"nesterov": "maybe"}, "Setting nesterov of a training must be of type bool, got 'maybe'."),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(ConfigError) as caught:
        make_train_settings(values)
    assert str(caught.value).startswith(message)


def test_a_toml_table_names_a_component(tmp_path):
    text = """
    lr = 0.5
    [partition]
    name = "dirichlet"
    alpha = 0.1
    min_images = 3
    [defence]
    name = "none"
    """
    assert read(tmp_path, text) == {"lr": 0.5, "partition": "dirichlet:alpha=0.1,min_images=3", "defence": "none"}


def test_a_toml_table_may_hold_lists_and_booleans(tmp_path):
    assert read(tmp_path, '[model]\nname = "mlp"\nhidden = [20, 10]\n') == {"model": "mlp:hidden=20/10"}
    assert read(tmp_path, '[model]\nname = "x"\nflag = true\n') == {"model": "x:flag=true"}


@pytest.mark.parametrize("text", ["[defence]\nkeep = 3\n", "[defence]\nname = 3\n", "[defence]\n"])
def test_a_toml_table_needs_a_name(tmp_path, text):
    with pytest.raises(ConfigError, match=r"Table \[defence\] in .*settings.toml must have a name"):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["lr = ", "lr 3", "[a", b"\xff\xfe", b"\x00", "lr=1\nlr=2\n", "{}"])
def test_invalid_toml_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"settings.toml must be valid TOML, got: "):
        read(tmp_path, text)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="There is no settings file"):
        read_settings(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"must be valid TOML, got: .*directory"):
        read_settings(tmp_path)


@given(st.binary(max_size=60))
def test_any_bytes_are_settings_or_a_clear_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    with suppress(ConfigError):  # any other error would fail the test
        assert isinstance(make_train_settings(read_settings(path)), TrainSettings)


def test_own_files_get_absolute_paths(tmp_path, monkeypatch):
    for name in ("net.py", "own.npz", "weights.safetensors", "d.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    settings = TrainSettings(
        dataset="own.npz", model="net.py:make:width=3", defence="none+d.py:Mine:x=1", weights="weights.safetensors"
    )
    found = with_absolute_paths(settings)
    assert found.dataset == str(tmp_path / "own.npz")
    assert found.model == f"{tmp_path}/net.py:make:width=3"
    assert found.defence == f"none+{tmp_path}/d.py:Mine:x=1"
    assert found.weights == str(tmp_path / "weights.safetensors")
    assert with_absolute_paths(found) == found
    assert with_absolute_paths(TrainSettings()) == TrainSettings()
