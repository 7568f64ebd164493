"""A run chooses neither how much an update is enlarged nor which of a site's images are unmarked."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict

from gradveil.engines.site import open_site
from tests.security.sites import CLASSES, RUN, SIDE, OneSite, code, private_set, shared, start

DATA = private_set(images=40)


@pytest.mark.parametrize(
    "asked",
    [{"weight_decay": 1e5}, {"weight_decay": 21.0}, {"momentum": 0.96}, {"momentum": 0.999, "nesterov": True}],
)
def test_a_run_cannot_enlarge_updates_by_weight_decay_or_momentum(tmp_path, asked):
    assert code(OneSite(tmp_path, replace(RUN, **asked)).train(1)) == "step"


def test_usual_weight_decay_and_momentum_are_accepted_and_a_site_may_allow_more(tmp_path):
    usual = replace(RUN, weight_decay=1e-3, momentum=0.9)
    assert code(OneSite(tmp_path / "a", usual).train(1)) == ""
    assert code(OneSite(tmp_path / "b", replace(usual, momentum=0.99), max_momentum=0.99).train(1)) == ""


def marked(folder, seed, sensitive):
    """Return the positions, in the site's own order, of the images that are marked in a run."""
    node = OneSite(folder, sensitive=sensitive).node
    run = {key.replace("_", "-"): value for key, value in asdict(replace(RUN, seed=seed)).items()}
    run = {key: "/".join(map(str, value)) if isinstance(value, tuple) else value for key, value in run.items()}
    with open_site(Context(1, 1, node, RecordDict(), run), lambda context: DATA) as site:
        images = site.data.train.images[site.data.sensitive]
    return sorted(int(np.flatnonzero((DATA.train.images == image).all((1, 2, 3)))[0]) for image in images)


def test_a_fraction_marks_the_same_secret_images_in_every_run(tmp_path):
    found = [marked(tmp_path / "a", seed, "0.5") for seed in range(4)]
    assert len(found[0]) == 20
    assert found == [found[0]] * 4
    assert marked(tmp_path / "b", 0, "0.5") != found[0]
    seeds = list((tmp_path / "a").glob("marks-0/*"))
    assert [path.stat().st_mode & 0o777 for path in seeds] == [0o600]


def test_positions_are_those_of_the_sites_own_images(tmp_path):
    assert [marked(tmp_path, seed, "0/7") for seed in range(3)] == [[0, 7]] * 3


@pytest.mark.parametrize(
    ("model", "classes"), [("mlp", 1_000_000), ("mlp:hidden=100000000", CLASSES), ("vgg16", 10**6)]
)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_message_that_describes_a_huge_model_reserves_nothing(tmp_path, monkeypatch, kind, model, classes):
    def unbuilt(*values):
        raise AssertionError("the model was built")

    monkeypatch.setattr("gradveil.engines.site.make_network", unbuilt)
    site = OneSite(tmp_path, replace(RUN, model=model))
    content = shared(1, start(), 0)
    content["network"] = ConfigRecord({"shape": [1, SIDE, SIDE], "num-classes": classes})
    more = {"public": ArrayRecord({}), "step": ConfigRecord({"lr": RUN.lr})}
    assert code(site.ask(kind, **content, **more)) == "message"


def test_a_run_with_a_huge_number_of_clients_is_refused(tmp_path):
    assert code(OneSite(tmp_path, replace(RUN, clients=10**8)).ask("query")) == "config"
