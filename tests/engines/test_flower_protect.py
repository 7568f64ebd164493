"""The mod for somebody's own Flower app: values by hand, what it refuses, and that errors carry no weights."""

import logging
import secrets
import stat
from dataclasses import dataclass, replace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gradveil.catalogue import catalogue
from gradveil.defences import Defence, build_defence
from gradveil.defences.base import HOOKS
from gradveil.engines.flower_protect import hide_errors, private_folder, protect
from gradveil.errors import ConfigError
from gradveil.secret_stream import SecretStream
from tests.engines.flower_apps import OwnGrid, _a_task, app_that_adds, asked  # noqa: F401 - a fixture

START = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0]), "b": torch.tensor(0.5), "seen": torch.tensor(3)}
CHANGE = {"w": torch.tensor([0.1, -0.4, 0.2, 0.3]), "b": torch.tensor(0.25), "seen": torch.tensor(2)}


def answer(mods, start=START, change=CHANGE, extra=None, message=None, **node):
    grid = OwnGrid(app_that_adds(change, mods, extra), **node)
    return grid.answer(message or asked(start)), grid


def weights(reply):
    assert not reply.has_error()
    return reply.content["arrays"].to_torch_state_dict()


@dataclass(frozen=True)
class Remember(Defence):
    """Error feedback: send half of the update, and the rest with the next one."""

    def on_update(self, update, client):
        owed = {name: t + client.state.get(name, torch.zeros(())) for name, t in update.tensors.items()}
        client.state.update({name: tensor / 2 for name, tensor in owed.items()})
        return replace(update, tensors={name: tensor / 2 for name, tensor in owed.items()})


@dataclass(frozen=True)
class Look(Defence):
    """A defence that reads what a mod does not have."""

    what: str = "model"

    def on_update(self, update, client):
        getattr(client, self.what).labels  # noqa: B018
        return update


@dataclass(frozen=True)
class Grow(Defence):
    """A defence that sends other shapes."""

    def on_update(self, update, client):
        return replace(update, tensors={name: t.expand(2, *t.shape) for name, t in update.tensors.items()})


def test_pruning_by_hand_keeps_types_order_and_metrics():
    reply, _ = answer([protect("prune:fraction=0.5")])
    sent = weights(reply)
    assert list(sent) == ["w", "b", "seen"]
    assert sent["w"].tolist() == pytest.approx([1.0, 1.6, 3.0, 4.3])  # the two larger changes are left
    assert sent["w"][0] == 1.0  # exactly the received weight
    assert sent["seen"].dtype == torch.int64
    assert sent["seen"].item() == 5  # integers pass
    assert sent["b"].shape == ()
    assert reply.content["metrics"] == {"num-examples": 5, "loss": 0.5}


def test_noise_is_drawn_from_the_system_and_added_to_the_change(monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda count: 99)
    reply, _ = answer([protect("gaussian:std=0.1")])
    change = {name: START[name] + CHANGE[name] - START[name] for name in ("w", "b")}
    wanted = build_defence("gaussian:std=0.1").perturb(change, SecretStream(99, "protect"))
    assert all(torch.equal(weights(reply)[name], START[name] + wanted[name]) for name in ("w", "b"))


def test_noise_differs_each_time():
    first, second = (weights(answer([protect("gaussian:std=0.1")])[0])["w"] for _ in range(2))
    assert not torch.equal(first, second)


def test_a_scalar_counts_as_a_vector_of_one(monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda count: 99)
    as_scalar, as_vector = (
        weights(answer([protect("gaussian:std=0.1")], {"b": like}, {"b": like / 2})[0])["b"]
        for like in (torch.tensor(0.5), torch.tensor([0.5]))
    )
    assert as_scalar.shape == ()
    assert as_scalar == as_vector[0]


def test_half_precision_stays():
    reply, _ = answer([protect("clip:norm=0.1")], {"w": START["w"].half()}, {"w": CHANGE["w"]})
    assert weights(reply)["w"].dtype == torch.float16
    assert (weights(reply)["w"] - START["w"].half()).float().norm() == pytest.approx(0.1, rel=0.05)


def test_a_reply_with_a_part_of_the_model_is_protected():
    reply, _ = answer([protect("clip:norm=1e-9")], START, {"w": CHANGE["w"]})
    assert list(weights(reply)) == ["w"]
    assert torch.allclose(weights(reply)["w"], START["w"])


def test_chains_of_update_defences_work():
    reply, _ = answer([protect("prune:fraction=0.5+clip:norm=1e-9")])
    assert torch.allclose(weights(reply)["w"], START["w"])


def test_evaluation_passes_as_it_is():
    reply, _ = answer([protect("gaussian:std=9")], message=asked(START, "evaluate"))
    assert weights(reply)["w"].item() == 1.0


def test_it_works_for_a_single_function():
    app = ClientApp()

    @app.train("other", mods=[protect("clip:norm=1e-9")])
    def train(message, context):
        new = {"w": message.content["arrays"].to_torch_state_dict()["w"] + 1}
        return Message(RecordDict({"arrays": ArrayRecord(new)}), reply_to=message)

    reply = OwnGrid(app).answer(asked(START, "train.other"))
    assert torch.allclose(weights(reply)["w"], START["w"])


UPDATE_ONLY = {"clip", "gaussian", "laplace", "prune", "quantise"}


@pytest.mark.parametrize("name", sorted(catalogue("defences").entries))
def test_every_defence_with_another_hook_is_refused_when_the_mod_is_made(name):
    defence = build_defence(name)
    others = [hook for hook in HOOKS if hook != "on_update" and defence.overrides(hook)]
    if name in UPDATE_ONLY:
        assert not others
        assert protect(name).defence == defence
    else:
        message = "gradveil.flower.train" if others else "would send them as they are"
        with pytest.raises(ConfigError, match=message):
            protect(name)


@pytest.mark.parametrize("spec", ["gaussian:where=gradient", "gaussian+soteria", "prune+fedkl", "none+none"])
def test_settings_and_chains_with_other_hooks_are_refused(spec):
    with pytest.raises(ConfigError, match=r"protect\(\) takes"):
        protect(spec)


def test_a_bad_setting_is_named():
    with pytest.raises(ConfigError, match="Unknown statistics"):
        protect("prune", statistics="keep")


PRIVATE = "patient 12"


def failing(message, context, call_next):
    raise ValueError(PRIVATE)


@pytest.mark.parametrize(
    ("mods", "options", "code"),
    [
        ([protect("prune"), failing], {}, "internal"),
        ([protect(Look("model"))], {}, "protection"),
        ([protect(Look("data"))], {}, "protection"),
        ([protect(Grow())], {}, "protection"),
        ([protect(Remember())], {}, "config"),  # no folder
        ([protect("prune")], {"extra": {"more": ArrayRecord({"w": torch.ones(3)})}}, "protection"),
        ([protect("prune")], {"extra": {"more": ConfigRecord({"raw": b"12"})}}, "protection"),
        ([protect("prune")], {"extra": {"more": MetricRecord({"many": [0.5] * 2000})}}, "protection"),
        ([protect("prune")], {"extra": {"arrays": ConfigRecord({})}}, "protection"),  # no model in the reply
        ([protect("prune")], {"extra": {"arrays": ArrayRecord({"v": torch.ones(3)})}}, "protection"),  # unknown name
        ([protect("prune")], {"change": {"w": torch.full((4,), float("nan"))}}, "diverged"),
        ([protect("prune")], {"change": {"w": torch.ones(2, 4)}}, "message"),
        ([protect("prune", record="other")], {}, "message"),
        ([protect("prune")], {"more": ArrayRecord(START)}, "message"),  # two models arrive
    ],
)
def test_an_error_is_a_reply_without_weights_and_without_its_text(mods, options, code, caplog):
    if "more" in options:
        options = {"message": asked(START, **options)}
    with caplog.at_level(logging.ERROR, "gradveil"):
        reply, grid = answer(mods, **options)
    assert reply.has_error()
    assert not reply.has_content()
    assert f"code {code!r}" in reply.error.reason
    assert PRIVATE.encode() not in grid.came[0]
    assert START["w"].numpy().tobytes()[:12] not in grid.came[0]
    assert "The site sent nothing." in caplog.text


def test_an_error_of_the_app_itself_passes():
    app = ClientApp(mods=[protect("prune")])

    @app.train()
    def train(message, context):
        return Message(Error(3, "no data"), reply_to=message)

    assert OwnGrid(app).answer(asked(START)).error == Error(3, "no data")


def test_records_that_are_allowed_leave_as_they_are():
    extra = {"more": ArrayRecord({"u": torch.ones(3)}), "how": ConfigRecord({"batch": 8})}
    reply, _ = answer([protect("clip:norm=1e-9", allow=["more", "how"])], extra=extra)
    assert torch.allclose(weights(reply)["w"], START["w"])
    assert torch.equal(reply.content["more"].to_torch_state_dict()["u"], torch.ones(3))
    assert reply.content["how"]["batch"] == 8


NORM = {"bn.weight": torch.ones(2), "bn.running_mean": torch.zeros(2), "bn.num_batches_tracked": torch.tensor(0)}
MOVED = {"bn.weight": torch.ones(2), "bn.running_mean": torch.tensor([0.25, 0.5]), "bn.num_batches_tracked": 4}


def test_running_statistics_that_moved_are_refused_unless_the_user_decides():
    reply, _ = answer([protect("clip:norm=1e-9")], NORM, MOVED)
    assert "protection" in reply.error.reason
    found = {how: weights(answer([protect("clip:norm=1e-9", statistics=how)], NORM, MOVED)[0])
             for how in ("received", "send")}  # fmt: skip
    assert found["received"]["bn.running_mean"].tolist() == [0.0, 0.0]
    assert found["send"]["bn.running_mean"].tolist() == [0.25, 0.5]
    assert all(torch.allclose(each["bn.weight"], torch.ones(2)) for each in found.values())
    assert all(each["bn.num_batches_tracked"] == 4 for each in found.values())


def test_statistics_that_stayed_are_no_reason_to_refuse():
    reply, _ = answer([protect("prune")], NORM, {**MOVED, "bn.running_mean": torch.zeros(2)})
    assert weights(reply)["bn.running_mean"].tolist() == [0.0, 0.0]


def test_private_state_stays_in_the_private_folder_of_its_run(tmp_path):
    change, grid = {"w": torch.full((4,), 8.0)}, None
    sent = []
    for _ in range(3):  # each message meets a new process: nothing but the folder remembers
        reply, grid = answer([protect(Remember())], START, change, **{"private-folder": str(tmp_path)})
        sent.append(float(weights(reply)["w"][0] - 1))
    assert sent == [4.0, 6.0, 7.0]
    files = list(tmp_path.rglob("*.safetensors"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert private_folder(grid.context(10)) == tmp_path / "run-7"
    assert all(path.is_relative_to(tmp_path / "run-7" / "mod-0" / "private") for path in files)


def test_lost_state_is_noticed(tmp_path):
    node = {"private-folder": str(tmp_path)}
    answer([protect(Remember())], **node)
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    reply, _ = answer([protect(Remember())], **node)
    assert "code 'state'" in reply.error.reason


def test_the_app_can_name_a_folder_where_the_site_names_none(tmp_path):
    reply, _ = answer([protect(Remember(), folder=tmp_path)])
    assert weights(reply)["w"][0] == pytest.approx(1.05)
    with pytest.raises(ConfigError, match="private-folder"):
        private_folder(OwnGrid(None).context(10))


def test_a_site_with_a_private_folder_answers_a_round_once(tmp_path):
    node = {"private-folder": str(tmp_path)}
    found = []
    for number in (1, 1, 3, 2, 4):
        message = asked(START, config=ConfigRecord({"server-round": number}))
        reply, _ = answer([protect("gaussian:std=1")], message=message, **node)
        found.append("code 'round'" in reply.error.reason if reply.has_error() else "weights")
    assert found == ["weights", True, "weights", True, "weights"]


def test_the_text_of_an_error_of_the_app_stays_at_the_site(caplog):
    reply, grid = answer([hide_errors, failing])
    assert "code 'internal'" in reply.error.reason
    assert PRIVATE.encode() not in grid.came[0]
    assert PRIVATE in caplog.text
    assert weights(answer([hide_errors])[0])["w"][0] == pytest.approx(1.1)


def test_the_app_cannot_change_what_counts_as_received():
    app = ClientApp(mods=[protect("clip:norm=1e-9")])

    @app.train()
    def train(message, context):
        new = {"w": torch.full((4,), 5.0)}
        message.content["arrays"] = ArrayRecord(new)  # as if this had been received
        return Message(RecordDict({"arrays": ArrayRecord(new)}), reply_to=message)

    assert torch.allclose(weights(OwnGrid(app).answer(asked(START)))["w"], START["w"])
