"""Component specs: components are found by file, built with typed settings, and written back as the same spec."""

import dataclasses
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.data import NamedSet, Partition
from gradveil.defences import Defence
from gradveil.errors import ConfigError, UnknownNameError
from gradveil.models import Model
from gradveil.registry import FOLDERS, build, components, convert, load_own, parse_spec, split_specs

BASES = {"datasets": NamedSet, "partitions": Partition, "models": Model, "defences": Defence}
NAME = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
KEY = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True)
VALUE = st.from_regex(r"[A-Za-z0-9./+-]{1,8}", fullmatch=True)
SPEC = st.builds(
    lambda name, pairs: name + (":" + ",".join(f"{k}={v}" for k, v in pairs.items()) if pairs else ""),
    NAME,
    st.dictionaries(KEY, VALUE, max_size=3),
)


@dataclass(frozen=True)
class Kinds:
    """One field of each type that settings may have."""

    flag: bool = False
    count: int = 1
    share: float = 0.5
    text: str = "a"
    widths: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    limit: int | None = None
    either: int | str = 3


def one(**settings):
    return convert(Kinds, settings, owner="test")


def test_every_kind_has_its_components_under_the_names_of_the_design():
    assert BASES.keys() <= FOLDERS.keys()
    models = "convnet densenet121 lenet-dlg lenet5 logistic mlp resnet18 resnet20 resnet32 resnet34 vgg16"
    assert set(models.split()) <= components("models").keys()
    assert {"chain", "none"} <= components("defences").keys()
    assert list(components("partitions")) == ["by-class", "dirichlet", "iid", "label-parts"]
    sets = "celeba cifar10 cifar100 fashion-mnist mnist mnist-5k svhn tiny-imagenet"
    assert set(sets.split()) <= components("datasets").keys()


@pytest.mark.parametrize("kind", BASES)
def test_every_component_builds_from_its_name_and_writes_it_back(kind):
    for name, cls in components(kind).items():
        built = build(BASES[kind], name)
        assert type(built) is cls
        assert built.spec == name
        assert not dataclasses.is_dataclass(built) or built == build(BASES[kind], built.spec)


@given(
    images=st.one_of(st.none(), st.integers(1, 10**9)),
    alpha=st.floats(1e-9, 1e9),
    least=st.integers(1, 99),
    hidden=st.lists(st.integers(1, 999), max_size=3),
    activation=st.sampled_from(["relu", "tanh"]),
)
def test_a_component_written_and_built_again_is_the_same(images, alpha, least, hidden, activation):
    iid = build(Partition, "iid" if images is None else f"iid:images={images}")
    dirichlet = build(Partition, f"dirichlet:alpha={alpha},min_images={least}")
    mlp = build(Model, f"mlp:hidden={'/'.join(map(str, hidden))},activation={activation}")
    assert (iid.images, dirichlet.alpha, dirichlet.min_images) == (images, alpha, least)
    assert (mlp.hidden, mlp.activation) == (tuple(hidden), activation)
    for base, made in ((Partition, iid), (Partition, dirichlet), (Model, mlp)):
        assert build(base, made.spec) == made
        assert build(base, made.spec).spec == made.spec


def test_a_spec_shows_only_what_differs_from_the_default():
    assert build(Partition, "by-class:classes=2,per-class=none").spec == "by-class:per_class=none"
    assert build(Model, "mlp:hidden=").spec == "mlp:hidden="


@given(st.lists(SPEC, min_size=1, max_size=5))
def test_a_joined_list_of_components_splits_again(specs):
    assert split_specs(",".join(specs)) == specs


def test_split_specs_by_hand():
    assert split_specs("") == []
    assert split_specs(" a , b:x=1, y=2 ,,c") == ["a", "b:x=1, y=2", "c"]
    assert split_specs("x=1") == ["x=1"]


@given(NAME, st.dictionaries(KEY, VALUE, max_size=4))
def test_parsing_is_the_inverse_of_writing(name, settings):
    pairs = ",".join(f"{key}={value}" for key, value in settings.items())
    assert parse_spec(f"{name}:{pairs}") == (name, settings)
    assert parse_spec(f"some dir/{name}.py:Some_Name:{pairs}") == (f"some dir/{name}.py:Some_Name", settings)


def test_values_may_hold_equals_signs_and_spaces_around():
    assert parse_spec(" iid : images = 3 ") == ("iid", {"images": "3"})
    assert parse_spec("x:key=a=b") == ("x", {"key": "a=b"})


@pytest.mark.parametrize("spec", ["iid:images", "iid:=3", "iid:3", "iid:images=3,7", "iid:a:b"])
def test_settings_that_are_not_key_value_pairs_are_refused(spec):
    with pytest.raises(ConfigError, match="must be key=value pairs"):
        parse_spec(spec)


@pytest.mark.parametrize(
    ("base", "spec", "message"),
    [
        (Model, "lenet6", "Unknown model 'lenet6'. Did you mean 'lenet5'?"),
        (Partition, "idd", "Unknown partition 'idd'. Did you mean 'iid'?"),
        (NamedSet, "mnist5k", "Unknown dataset 'mnist5k'. Did you mean 'mnist-5k'?"),
        (Defence, "non", "Unknown defence 'non'. Did you mean 'none'?"),
        (Partition, "iid:image=3", "Partition 'iid' has no setting 'image'. Did you mean 'images'?"),
        (Partition, "iid:images=x", "Setting images of partition 'iid' must be of type"),
        (Partition, "iid:images=2.5", "Setting images of partition 'iid' must be of type"),
        (Partition, "dirichlet:alpha=big", "Setting alpha of partition 'dirichlet' must be of type float, got 'big'"),
        (Partition, "dirichlet:alpha=nan", "alpha must be more than 0, got nan"),
        (Partition, "iid:images=-1", "images must be at least 1, got -1"),
        (Model, "mlp:hidden=3/x", "hidden of model 'mlp' must be of type int, or several separated by slashes"),
        (Model, "", "Unknown model ''"),
    ],
)
def test_bad_components_are_named_with_a_way_out(base, spec, message):
    with pytest.raises(ConfigError) as caught:
        build(base, spec)
    assert message in str(caught.value)


@given(st.booleans(), st.integers(), st.floats(allow_nan=False), st.lists(st.integers(), max_size=4))
def test_strings_and_values_convert_to_the_same(flag, count, share, widths):
    settings = {"flag": flag, "count": count, "share": share, "widths": widths}
    texts = {"flag": str(flag), "count": str(count), "share": repr(share), "widths": "/".join(map(str, widths))}
    wanted = {"flag": flag, "count": count, "share": share, "widths": tuple(widths)}
    for given_settings in (settings, texts):
        got = one(**given_settings)
        assert got == wanted
        assert {key: type(value) for key, value in got.items()} == {
            "flag": bool,
            "count": int,
            "share": float,
            "widths": tuple,
        }


def test_conversions_by_hand():
    assert one(flag="yes") == one(flag="1") == one(flag="TRUE") == {"flag": True}
    assert one(flag="no") == {"flag": False}
    assert one(count=3.0) == {"count": 3}
    assert type(one(share=1)["share"]) is float
    assert one(limit="none") == one(limit=None) == {"limit": None}
    assert one(limit="7") == {"limit": 7}
    assert one(either="7") == {"either": 7}
    assert one(either="x") == {"either": "x"}
    assert one(shares="1/2.5") == {"shares": (1.0, 2.5)}
    assert convert(Kinds, {"count": 1}, owner="test") == {"count": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"flag": "maybe"}, {"flag": 2}, {"flag": None}, {"count": "1.5"}, {"count": 1.5}, {"count": True},
        {"count": float("inf")}, {"count": float("nan")}, {"count": None}, {"count": [1]}, {"count": ""},
        {"share": "x"}, {"share": True}, {"share": []}, {"share": 10**400}, {"text": 3}, {"text": None},
        {"widths": 3}, {"widths": "1/x"}, {"widths": [1.5]}, {"widths": {"a": 1}}, {"limit": "x"}, {"limit": 1.5},
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_are_refused(settings):
    (key,) = settings
    with pytest.raises(ConfigError, match=f"^Setting {key} of test must be of type"):
        one(**settings)


def test_hyphens_stand_for_underscores_and_unknown_keys_get_a_hint():
    @dataclass(frozen=True)
    class Wide:
        batch_size: int = 1

    assert convert(Wide, {"batch-size": "3"}, owner="x") == {"batch_size": 3}
    with pytest.raises(UnknownNameError, match=r"X has no setting 'batchsize'. Did you mean 'batch_size'\?"):
        convert(Wide, {"batchsize": "3"}, owner="x")


MINE = """
from dataclasses import dataclass
from gradveil.defences import Defence
LOADED = []

@dataclass(frozen=True)
class Mine(Defence):
    strength: float = 1.0

class Stranger:
    pass
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    yield path
    for name in [name for name in sys.modules if name.startswith("gradveil_own_mine")]:
        del sys.modules[name]


def test_a_file_of_the_users_is_loaded_once_and_built_with_settings(mine):
    built = build(Defence, f"{mine}:Mine:strength=3")
    assert built.strength == 3
    assert load_own(f"{mine}:Mine") is type(built)


def test_a_users_component_writes_a_spec_that_builds_it_again(mine):
    built = build(Defence, f"{mine}:Mine:strength=3")
    assert build(Defence, built.spec) == built


def test_two_files_of_the_same_name_are_distinct(mine, tmp_path):
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_text(MINE.replace("1.0", "2.0"))
    assert build(Defence, f"{mine}:Mine").strength == 1
    assert build(Defence, f"{other}:Mine").strength == 2


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "Mine", "There is no file"),
        (MINE, "Mien", r"mine.py' defines no 'Mien'. Did you mean 'Mine'\? It defines: LOADED, Mine, Stranger\.$"),
        (MINE, "Stranger", "must be a subclass of gradveil's Defence"),
        (MINE, "LOADED", "must be a subclass of gradveil's Defence"),
        (MINE, "Mine:strenght=1", "Did you mean 'strength'"),
        ("def (", "Mine", "failed when imported: SyntaxError"),
        ("1 / 0", "Mine", "failed when imported: ZeroDivisionError: division by zero"),
        ("import no_such_module_at_all", "Mine", "failed when imported: ModuleNotFoundError"),
        ("raise SystemExit(0)", "Mine", "failed when imported: SystemExit"),
        ("\0", "Mine", "failed when imported"),
    ],
)
def test_unusable_files_of_the_user_are_refused(tmp_path, content, name, message):
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        build(Defence, f"{path}:{name}")


def test_a_failed_import_leaves_nothing_behind(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("1 / 0")
    with pytest.raises(ConfigError):
        build(Defence, f"{path}:Mine")
    path.write_text(MINE)
    assert build(Defence, f"{path}:Mine").strength == 1


def test_a_path_too_long_for_the_system_is_refused():
    with pytest.raises(ConfigError, match="There is no file"):
        load_own("x" * 5000 + ".py:Mine")
