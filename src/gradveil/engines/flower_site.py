"""One site of a training over Flower: its own images, its private folder, its defence; answers the server's messages.

A site's node config says who it is and what it agrees to:

- ``partition-id``: its number among the clients, from 0. ``private-folder``: where keys, locks and all other state
  stay, mode 0600; never in Flower's ``Context.state``, never in a message.
- ``data``: its own images, an .npz file or a folder; by default the part of the run's data set that a simulation would
  give this client. ``sensitive``: which images are marked. ``data-root``: where to look for named data sets.
- ``defence``: the only defence that it trains under; a run with another one is refused. ``model``: the only network
  that it trains, by the same text, so that no unknown layers come in. ``tripwire``, ``device``: override the run's.
- ``reports=true``: sends the numbers that the defence's hooks record (`gradveil.defences.Client.report`). They are
  computed from private images, and no guarantee covers them, so by default they stay at the site.
- ``repeatable=true``: noise, batches and keys come from the run's seed, with the same bits as in a simulation; but then
  the server can draw them too. By default every message is answered with fresh system randomness, as noise that is
  drawn again for another model can be subtracted.

What leaves a site: the update after ``on_update``, the number of images behind it, the numbers of its images and of its
marked images, the number of correct answers and the loss of each score (for test images, the numbers of images and of
correct answers in each class too), the tripwire's findings, the text of gradveil's own errors, and the defence's
reports if the site allows them.

Trust: Flower ships the app's code from whoever starts the run, and a site runs it. The checks here stop a curious
server and a wrong setting, but not a server that sends other code: install gradveil at the site, read the app, and
confine its process.
"""

import logging
import secrets
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gradveil.config import TrainSettings, make_train_settings
from gradveil.data import Dataset, load_dataset
from gradveil.data.federated import FederatedData, federate
from gradveil.defences import Defence, build_defence
from gradveil.engines.devices import Devices, chunks, make_network
from gradveil.engines.run_folder import fingerprint, settings_hash
from gradveil.engines.simulation import check_choices, deal
from gradveil.engines.training import single_thread
from gradveil.engines.tripwire import TripwireWarning, hearing
from gradveil.errors import ConfigError, GradveilError, RunFolderError
from gradveil.federated.client import Broadcast, Score
from gradveil.federated.server import ScoreRequest
from gradveil.models import Normalisation
from gradveil.storage import write_atomic

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
except ImportError as error:
    raise ImportError("gradveil over Flower needs Flower. Run `pip install 'gradveil[flower]'`.") from error

LOG = logging.getLogger("flwr")
SERVER_KEYS = ("out", "data-root")
"""Keys of a run config that are not settings of the training but the server's own."""


def client_app(data: Callable[[Context], Dataset] | None = None) -> ClientApp:
    """Return a ClientApp for one site.

    Args:
        data: returns this site's images: it trains on the training split, and its own model is scored on the test
            split. By default the node config names them.
    """
    app = ClientApp()
    for register, work in ((app.query, _introduce), (app.train, _train), (app.evaluate, _score)):
        register()(_answering(work, data))
    return app


@dataclass(frozen=True)
class _Site:
    """One client as its node knows it."""

    number: int
    settings: TrainSettings
    defence: Defence
    data: FederatedData
    folder: Path
    seed: int | None
    tells_reports: bool

    def devices(self, content: RecordDict) -> Devices:
        """Return this client's side of a round, with the network that the server describes."""
        asked = config(content, "network")
        shape, num_classes = tuple(asked["shape"]), asked["num-classes"]
        normalisation = Normalisation(tuple(asked["mean"]), tuple(asked["std"])) if "mean" in asked else None
        largest = max(int(split.labels.max(initial=0)) for split in (self.data.train, self.data.test))
        if self.data.shape != shape or largest >= num_classes:
            raise ConfigError(
                f"A site's images must have the run's shape {shape} and labels below {num_classes}, got "
                f"{self.data.shape} and labels up to {largest}."
            )
        network = partial(make_network, self.settings, shape, num_classes, normalisation)
        return Devices(self.settings, self.data, self.defence, network, self.folder, self.seed)


def _open_site(context: Context, data: Callable[[Context], Dataset] | None) -> _Site:
    """Return the site that node config and run settings describe. Raise if the site does not agree to the run."""
    node, settings = context.node_config, run_settings(context)
    number, private = node.get("partition-id"), str(node.get("private-folder", ""))
    if not isinstance(number, int) or not 0 <= number < settings.clients:
        raise ConfigError(f"partition-id in a node's config must be in 0..{settings.clients - 1}, got {number!r}.")
    if not private:
        raise ConfigError("private-folder in a node's config must name a folder of the site, got none.")
    defence, agreed = build_defence(settings.defence), node.get("defence")
    left_out = bool(settings.defended) and number not in settings.defended
    if agreed is not None and (left_out or build_defence(str(agreed)).spec != defence.spec):
        raise _not_agreed("defence", agreed, "none" if left_out else defence.spec)
    if node.get("model", settings.model) != settings.model:
        raise _not_agreed("model", node["model"], settings.model)
    check_choices(settings, defence)
    folder = Path(private) / settings_hash(settings)
    own = _site_data(context, settings, defence, number, data)
    _refuse_other_data(folder / str(number) / "images-hash", fingerprint(own, []))
    if not left_out:
        defence.check_images(len(own.train), aux=bool(own.public))
    tripwire, device = str(node.get("tripwire", settings.tripwire)), str(node.get("device", settings.device))
    seed = None if node.get("repeatable") is True else secrets.randbits(256)
    settings, tells = replace(settings, tripwire=tripwire, device=device), node.get("reports") is True
    return _Site(number, settings, defence, own, folder, seed, tells)


def _not_agreed(what: str, agreed: object, asked: str) -> ConfigError:
    return ConfigError(
        f"The run's {what} must be the one that this site agreed to, {agreed!r}, got {asked!r}. "
        "Change the run, or ask the site."
    )


def _site_data(
    context: Context,
    settings: TrainSettings,
    defence: Defence,
    number: int,
    data: Callable[[Context], Dataset] | None,
) -> FederatedData:
    """Return this client's images: the site's own, or its part of the run's data set without the other clients'."""
    node = context.node_config
    root = Path(str(node["data-root"])) if "data-root" in node else None
    aux = load_dataset(settings.aux, root) if settings.aux else None
    if data is None and "data" not in node:
        return deal(load_dataset(settings.dataset, root), settings, defence, aux).only(number, number, settings.clients)
    own = data(context) if data is not None else load_dataset(str(node["data"]), root)
    marks = str(node.get("sensitive", settings.sensitive))
    return federate(own, "iid", 1, marks, settings.seed, aux, (), defence.aux_labels).only(0, number, settings.clients)


def _refuse_other_data(path: Path, found: str) -> None:
    """Raise if a site's images are not those that its training began with: its private state was made from them."""
    if not path.exists():
        write_atomic(path, found.encode(), mode=0o600)
    elif path.read_text() != found:
        raise RunFolderError(
            "A site must keep the images that its training began with, got others. Restore them; or, to begin with "
            f"new keys, empty {path.parent} and put an empty file begin-anew there."
        )


def _answering(
    work: Callable[[_Site, RecordDict], RecordDict], data: Callable[[Context], Dataset] | None
) -> Callable[[Message, Context], Message]:
    """Return the function that Flower calls. It answers with errors too; of unexpected ones only the class is sent."""

    def answer(message: Message, context: Context) -> Message:
        try:
            with single_thread():
                return Message(work(_open_site(context, data), message.content), reply_to=message)
        except GradveilError as error:
            LOG.error("%s", error)
            kind, text = type(error).__name__, str(error)
        except Exception as error:  # its text may hold private values
            LOG.exception("The site failed.")
            kind, text = "", f"{type(error).__name__} at the site; its log has the rest."
        number = str(context.node_config.get("partition-id"))
        failure = ConfigRecord({"kind": kind, "message": text, "number": number})
        return Message(RecordDict({"error": failure}), reply_to=message)

    return answer


def _introduce(site: _Site, content: RecordDict) -> RecordDict:
    marked = site.data.count("sensitive", None)
    return _facts({"number": site.number, "images": len(site.data.train), "sensitive": marked})


def _train(site: _Site, content: RecordDict) -> RecordDict:
    devices, number = site.devices(content), config(content, "round")["number"]
    if last := config(content, "before")["trained"]:
        devices.require_state(site.number, last)
    received = devices.net.shared_vector(tensors(content.array_records["model"]))
    public, lr = tensors(content.array_records["public"]), config(content, "step")["lr"]
    with warnings.catch_warnings(action="ignore", category=TripwireWarning), hearing() as alarms:
        played = devices.train(site.number, Broadcast(received, lr, number, public))
    for alarm in alarms:
        LOG.warning("%s", alarm)
    update, told = played.update, played.reports if site.tells_reports else {}
    answer = _facts({
        "images": update.num_examples,
        "alarms": alarms,
        "report-names": list(told),
        "report-values": list(told.values()),
    })  # fmt: skip
    answer["tensors"], answer["buffers"] = ArrayRecord(dict(update.tensors)), ArrayRecord(dict(update.buffers))
    return answer


def _score(site: _Site, content: RecordDict) -> RecordDict:
    devices, number = site.devices(content), config(content, "round")["number"]
    received = devices.net.shared_vector(tensors(content.array_records["model"]))
    asked = config(content, "requests")
    if (last := config(content, "before")["trained"]) and any(asked["own"]):
        devices.require_state(site.number, last)
    scores = []
    for images, own in zip(asked["images"], asked["own"], strict=True):
        request = ScoreRequest(images, site.number if own else None)
        parts = (devices.score(request, start, number, received) for start in chunks(site.data, request))
        scores.append(sum(parts, Score()))
    public = [score if images == "test" else Score() for images, score in zip(asked["images"], scores, strict=True)]
    return _facts({
        "correct": [score.correct for score in scores],
        "loss-sum": [score.loss_sum for score in scores],
        "count": [score.count for score in scores],
        "classes": [len(score.class_count) for score in public],
        "class-correct": [number for score in public for number in score.class_correct],
        "class-count": [number for score in public for number in score.class_count],
    })  # fmt: skip


def run_settings(context: Context) -> TrainSettings:
    """Return the settings of the run, from Flower's run config."""
    return make_train_settings({key: v for key, v in context.run_config.items() if key not in SERVER_KEYS})


def _facts(values: dict[str, Any]) -> RecordDict:
    return RecordDict({"facts": ConfigRecord(values)})


def config(content: RecordDict, name: str) -> dict[str, Any]:
    """Return a message's record of plain values."""
    return dict(content.config_records[name])


def tensors(arrays: ArrayRecord) -> dict[str, Tensor]:
    """Return a message's record of tensors by name."""
    return dict(arrays.to_torch_state_dict())
