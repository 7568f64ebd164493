"""Filters for NVFlare: weights leave protected or not at all, and the server's tap stores what an attack can read."""

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.shareable import make_reply

from gradveil.errors import ConfigError, DefenceError, RefusedError
from gradveil.nvflare import Protect, Remember, Tap
from gradveil.runs.update_spec import read_spec
from gradveil.storage import load_tensors

START = {"a.weight": torch.zeros(2, 2), "a.bias": torch.tensor([1.0, 2.0]), "n.num_batches_tracked": torch.tensor(3)}


class FakeContext:
    """What a filter asks NVFlare's context for."""

    def __init__(self, site="site-1", job="job"):
        self.site, self.job = site, job

    def get_job_id(self):
        return self.job

    def get_identity_name(self):
        return self.site

    def get_peer_context(self):
        return self

    def get_prop(self, key, default=None):
        return default

    def get_engine(self):
        return None


def trained(change, kind=np.asarray):
    """Return START with some entries changed, as one kind of array."""
    values = {name: tensor.clone() for name, tensor in START.items()}
    for name, value in change.items():
        values[name] = values[name] + torch.tensor(value)
    return {name: value if kind is None else kind(value) for name, value in values.items()}


def sent_by(protect, data, kind=DataKind.WEIGHTS, meta=None, site="site-1", remember=True):
    """Return the DXO that leaves a site."""
    context = FakeContext(site)
    if remember:
        Remember().process(DXO(DataKind.WEIGHTS, dict(START)).to_shareable(), context)
    return from_shareable(protect.process(DXO(kind, data, meta or {}).to_shareable(), context))


@pytest.mark.parametrize("kind", [None, lambda tensor: tensor.numpy()])
def test_the_change_of_weights_is_protected(kind):
    data = trained({"a.weight": [[4.0, 0.1], [0.2, -0.3]], "a.bias": [0.5, -8.0]}, kind)
    sent = sent_by(Protect("prune:fraction=0.75"), data).data
    assert {type(value) for value in sent.values()} == {type(value) for value in data.values()}
    assert np.asarray(sent["a.weight"]).tolist() == [[4.0, 0.0], [0.0, 0.0]]
    assert np.asarray(sent["a.bias"]).tolist() == [1.0, -6.0]
    assert int(sent["n.num_batches_tracked"]) == 3
    assert data["a.weight"].ravel()[1] == pytest.approx(0.1)  # its input is left alone


def test_a_difference_needs_no_model():
    change = {"a.weight": np.array([[3.0, 4.0]], np.float32)}
    sent = sent_by(Protect("clip:norm=1.0"), change, DataKind.WEIGHT_DIFF, remember=False, site="other")
    assert sent.data["a.weight"] == pytest.approx(np.array([[0.6, 0.8]]))


def test_noise_is_fresh():
    protect, data = Protect("gaussian:std=0.1"), trained({})
    one, other = (sent_by(protect, dict(data)).data["a.weight"] for _ in range(2))
    assert np.abs(one).min() > 0
    assert not np.array_equal(one, other)


def test_weights_without_a_received_model_do_not_leave():
    with pytest.raises(DefenceError, match="Remember"):
        sent_by(Protect("prune"), trained({}), remember=False, site="never asked")


@pytest.mark.parametrize("name", ["dp-sgd", "soteria", "mixup", "fedkl", "dcs2", "veil", "none"])
def test_defences_that_need_more_than_updates_are_refused(name):
    with pytest.raises(ConfigError, match="works on updates alone"):
        Protect(name)


@pytest.mark.parametrize(
    ("kind", "data", "meta"),
    [
        (DataKind.APP_DEFINED, {"anything": 1}, {}),
        (DataKind.METRICS, {"accuracy": list(range(2000))}, {}),
        (DataKind.METRICS, {"images": np.zeros(5000)}, {}),
        (DataKind.WEIGHTS, trained({}), {"images": torch.zeros(5000)}),
        (DataKind.WEIGHTS, {"a.weight": "text"}, {}),
        (DataKind.WEIGHTS, {"new": np.zeros(2)}, {}),
        (DataKind.WEIGHTS, {"a.weight": np.zeros(3, np.float32)}, {}),
        (DataKind.WEIGHTS, trained({"a.bias": [float("nan"), 0.0]}), {}),
        (DataKind.WEIGHT_DIFF, {"count": np.array([7])}, {}),
        (DataKind.WEIGHT_DIFF, {"n.running_mean": np.array([7.0], np.float32)}, {}),
    ],
)
def test_what_cannot_be_protected_does_not_leave(kind, data, meta):
    with pytest.raises(Exception, match=r"must|can't|protected"):
        sent_by(Protect("prune"), data, kind, meta)


def test_metrics_pass_and_errors_lose_their_data():
    assert sent_by(Protect("prune"), {"accuracy": 0.5}, DataKind.METRICS).data == {"accuracy": 0.5}
    failed = make_reply("EXECUTION_EXCEPTION")
    failed["extra"] = "pixels"
    reply = Protect("prune").process(failed, FakeContext())
    assert reply.get_return_code() == "EXECUTION_EXCEPTION"
    assert "extra" not in reply


def test_more_than_a_dxo_does_not_leave():
    shareable = DXO(DataKind.METRICS, {"accuracy": 0.5}).to_shareable()
    shareable["extra"] = "pixels"
    with pytest.raises(DefenceError, match="got extra"):
        Protect("prune").process(shareable, FakeContext())


def test_statistics_are_sent_only_if_asked():
    change = {"n.running_mean": np.array([7.0], np.float32)}
    for choice, wanted in (("received", 0.0), ("send", 7.0)):
        sent = sent_by(Protect("prune", statistics=choice), dict(change), DataKind.WEIGHT_DIFF)
        assert float(sent.data["n.running_mean"][0]) == wanted


def asked(protect, told, site="site-9"):
    """Return what leaves a site that was asked for a round (counted from 0) by the server, and trained."""
    task = DXO(DataKind.WEIGHTS, dict(START)).to_shareable()
    if told is not None:
        task.set_header("current_round", told)
    Remember().process(task, FakeContext(site))
    result = DXO(DataKind.WEIGHTS, trained({"a.bias": [1.0, 2.0]}), {"current_round": 77}).to_shareable()
    return from_shareable(protect.process(result, FakeContext(site))).data


def test_with_a_folder_each_round_is_answered_once(tmp_path):
    protect = Protect("gaussian:std=0.1", str(tmp_path))
    asked(protect, 0)
    for again in (0, 0):
        with pytest.raises(RefusedError, match="answered once"):
            asked(protect, again)
    asked(protect, 5)
    with pytest.raises(RefusedError, match="answered once"):
        asked(Protect("gaussian:std=0.1", str(tmp_path)), 3)  # the site was restarted
    asked(protect, 0, site="site-8")
    assert (tmp_path / "job/site-9/answered").read_text() == "6"
    asked(Protect("gaussian:std=0.1"), 0)  # without a folder nothing is counted


def test_with_a_folder_a_task_without_a_round_is_not_answered(tmp_path):
    protect = Protect("prune", str(tmp_path))
    change = {"a.weight": np.array([[3.0, 4.0]], np.float32)}
    with pytest.raises(DefenceError, match="needs to know the round"):
        sent_by(protect, dict(change), DataKind.WEIGHT_DIFF, site="site-7")
    assert sent_by(protect, change, DataKind.WEIGHT_DIFF, {"current_round": 2}, "site-7").data.keys() == {"a.weight"}


def test_arguments_are_attributes_as_nvflare_expects():
    protect = Protect("prune", "/srv/keys", "send")
    assert (protect.defence, protect.folder, protect.statistics) == ("prune", "/srv/keys", "send")


def tap_at(folder, chain, **more):
    tap = Tap(str(folder), "logistic", [1, 2, 2], 3, 0.1, {"num_examples": 4}, **more)
    tap.set_prop(FilterContextKey.CHAIN_TYPE, chain)
    return tap


def test_the_tap_stores_each_update_with_its_specification(tmp_path):
    data = tap_at(tmp_path / "t", FilterChainType.TASK_DATA_CHAIN)
    result = tap_at(tmp_path / "t", FilterChainType.TASK_RESULT_CHAIN, rounds=2)
    for number in (1, 2, 3):
        data.process(DXO(DataKind.WEIGHTS, dict(START)).to_shareable(), FakeContext())
        for site in ("site-1", "../site"):
            came = DXO(DataKind.WEIGHTS, trained({"a.bias": [float(number), 0.0]})).to_shareable()
            assert from_shareable(result.process(came, FakeContext(site))).data["a.bias"][0] == number + 1
    files = sorted(path.relative_to(tmp_path / "t").as_posix() for path in (tmp_path / "t").rglob("*.*"))
    each = ["___site.safetensors", "___site.toml", "model.safetensors", "site-1.safetensors", "site-1.toml"]
    assert files == [f"round-{number}/{name}" for number in (1, 2) for name in each]
    assert load_tensors(tmp_path / "t/round-2/site-1.safetensors")["a.bias"].tolist() == [2.0, 0.0]
    assert load_tensors(tmp_path / "t/round-2/model.safetensors")["a.bias"].tolist() == [1.0, 2.0]
    spec = read_spec(tmp_path / "t/round-1/site-1.toml")
    assert (spec.model, spec.kind, spec.lr, spec.num_examples) == ("logistic", "change", 0.1, 4)
    assert (tmp_path / "t/round-1/site-1.toml").stat().st_mode & 0o777 == 0o600


def test_a_tap_that_is_full_or_misplaced_stops_no_training(tmp_path, caplog):
    alone = tap_at(tmp_path / "alone", FilterChainType.TASK_RESULT_CHAIN)
    alone.process(DXO(DataKind.WEIGHTS, trained({})).to_shareable(), FakeContext())
    assert "task_data_filters" in caplog.text
    tap_at(tmp_path / "full", FilterChainType.TASK_DATA_CHAIN).process(
        DXO(DataKind.WEIGHTS, dict(START)).to_shareable(), FakeContext()
    )
    full = tap_at(tmp_path / "full", FilterChainType.TASK_RESULT_CHAIN, max_bytes=10)
    full.process(DXO(DataKind.WEIGHTS, trained({})).to_shareable(), FakeContext())
    assert "max_bytes is reached" in caplog.text
    with pytest.raises(ConfigError):
        Tap(str(tmp_path), "logistic", [1, 2], 3, 0.1)
