"""A Flower client mod that protects the updates of an app that somebody else wrote.

The mod reads the weights that the server sent, lets the app train, and takes the difference to what the app replies:
the update. The defence's ``on_update`` replaces it, and the reply gets the received weights plus the protected update.
If anything fails, the reply is an error without weights; the error's text stays in the site's log.

A mod sees nothing but messages. A defence that works on gradients, batches, images or the network can't run here, and
is refused when the mod is made; `gradveil.flower.train` plays those.
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gradveil.defences import Defence, build_defence
from gradveil.engines.answered import answer_once
from gradveil.engines.messages import read_arrays
from gradveil.engines.own_ledger import AskedUpdate, count_update
from gradveil.engines.site_codes import code_of
from gradveil.engines.site_ledger import weights_digest
from gradveil.engines.update_protection import (
    MOST_METRICS,
    ProtectionPlace,
    change_of,
    others_than_update,
    protected_update,
)
from gradveil.errors import ConfigError, DefenceError, MessageError
from gradveil.storage import PrivateFolder
from gradveil.types import Tensors, Update
from gradveil.validate import one_of

from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict  # isort: skip - as in messages
from flwr.clientapp.typing import ClientAppCallable  # isort: skip

LOG = logging.getLogger("gradveil")
_MOST_ENTRIES = 2**40
_CODE = 6
"""Flower's code for a mod that can't do its work (ErrorCode.MOD_FAILED_PRECONDITION)."""


def protect(
    defence: str | Defence,
    *,
    statistics: str = "refuse",
    record: str = "",
    allow: Iterable[str] = (),
    folder: str | Path | None = None,
    site: str | Path | None = None,
) -> "ProtectMod":
    """Return a Flower mod that protects what a client's train function replies.

    Example::

        app = ClientApp(mods=[gradveil.flower.protect("gaussian:std=0.01")])

    Place it first in the list, so that it sees the reply last. Only ``train`` messages are changed; replies to
    ``evaluate`` and ``query`` pass as they are. If the site has a private folder, each round is answered once.

    Args:
        defence: a defence that works on updates alone: clip, gaussian, laplace, prune, quantise, your own, or a chain.
        statistics: what happens to running statistics of BatchNorm, which no defence here covers: ``refuse`` sends
            nothing if training changed them, ``received`` sends back those of the server, ``send`` sends the new ones
            unprotected. They are recognised by their names in a state dict.
        record: name of the model's ArrayRecord in the server's message, if it has several.
        allow: names of further ArrayRecords and ConfigRecords of the reply that may leave unprotected.
        folder: private folder for state and the rounds answered, unless the node config names ``private-folder``.
        site: folder of the site with its ``policy.toml``, and a ledger of all updates in all runs: its ``defence`` must
            be agreed to, and ``max-rounds`` is kept. No ε is known of a training that a mod does not see, so that a
            policy with ``max-epsilon`` refuses every update.

    Raises:
        ConfigError: the defence needs more than updates, or protects no updates at all.
    """
    chosen = build_defence(defence) if isinstance(defence, str) else defence
    _check_hooks(chosen)
    one_of("statistics", statistics, ["refuse", "received", "send"])
    places = (None if place is None else Path(place).expanduser() for place in (folder, site))
    return ProtectMod(chosen, statistics, record, frozenset(allow), *places)


def _check_hooks(defence: Defence) -> None:
    """Raise ConfigError unless the defence works on updates and on nothing else."""
    others = others_than_update(defence)
    if others:
        raise ConfigError(
            f"protect() takes defences that work on updates alone, got {defence.spec!r}, which also needs "
            f"{', '.join(others)}: a mod would send updates without that protection. Train with "
            f"gradveil.flower.train(model, loader, {defence.spec!r}, ...) inside your train function; if the server "
            "takes part in the defence, use gradveil's own app (docs/flower.md)."
        )
    if not defence.overrides("on_update"):
        raise ConfigError(
            f"protect() takes a defence that changes updates, got {defence.spec!r}, which would send them as they are. "
            "Choose one (such as gaussian:std=0.01), or leave the mod out."
        )


@dataclass(frozen=True)
class ProtectMod:
    """The mod that `protect` returns; its attributes are the arguments of that function."""

    defence: Defence
    statistics: str = "refuse"
    record: str = ""
    allow: frozenset[str] = frozenset()
    folder: Path | None = None
    site: Path | None = None

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message; a train reply leaves protected, or as an error without weights."""
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        try:
            received = read_arrays(message.content, self._model_name(message.content), None, _MOST_ENTRIES)
            told, place = _told_round(message.content), self._place(context)
            self._count(context, told, received)
            if place is not None and told:
                answer_once(place / f"answered-{message.metadata.message_type}", told)
            reply = call_next(message, context)
            if reply.has_error():
                return reply
            self._replace(reply.content, received, context, max(told, 1))
        except Exception as error:
            return _failed(message, error)
        return reply

    def _count(self, context: Context, told: int, received: Tensors) -> None:
        """Note the update in the site's ledger, if it has one. Raise if its policy does not allow it."""
        if self.site is not None:
            number = context.node_config.get("partition-id")
            weights, spec = weights_digest(received), self.defence.spec
            asked = AskedUpdate(f"run-{context.run_id}", told, weights, spec, lambda updates: None)
            count_update(self.site, number if isinstance(number, int) else 0, asked)

    def _model_name(self, content: RecordDict) -> str:
        """Return the name of the record with the model that the server sent."""
        names = list(content.array_records)
        if self.record:
            return self.record
        if len(names) != 1:
            raise MessageError(
                f"A train message must hold one ArrayRecord, got {len(names)}. Name the model's: protect(record=...)."
            )
        return names[0]

    def _replace(self, content: RecordDict, received: Tensors, context: Context, told: int) -> None:
        """Replace the trained weights in a reply by protected ones."""
        name = self._only_model(content)
        trained = read_arrays(content, name, None, _MOST_ENTRIES)
        counted = _examples(content)
        change = change_of(received, trained, counted, self.statistics)
        start = {key: received[key] for key in trained}
        update = self._protected(change, start, context, told)
        moved = {**update.tensors, **update.buffers}
        content[name] = ArrayRecord({
            key: start[key] + moved[key] if key in moved else tensor for key, tensor in trained.items()
        })  # fmt: skip
        if update.num_examples != counted:
            for metrics in content.metric_records.values():
                if "num-examples" in metrics:
                    metrics["num-examples"] = update.num_examples

    def _only_model(self, content: RecordDict) -> str:
        """Return the name of the only record of the reply that must be protected. Raise if others would leave."""
        arrays = [name for name in content.array_records if name not in self.allow]
        configs = [name for name in content.config_records if name not in self.allow]
        if len(arrays) != 1 or configs:
            found = ", ".join(map(repr, arrays + configs)) or "none"
            raise DefenceError(
                "A train reply must hold one ArrayRecord, the model, beside its metrics, as nothing else is protected, "
                f"got {found}. Take others out, or let them leave unprotected: protect(allow=[NAME])."
            )
        numbers = sum(_count(value) for record in content.metric_records.values() for value in record.values())
        if numbers > MOST_METRICS:
            raise DefenceError(f"The metrics must hold at most {MOST_METRICS} numbers, got {numbers}. Send fewer.")
        return arrays[0]

    def _protected(self, update: Update, start: Tensors, context: Context, told: int) -> Update:
        """Return the update after the defence, whose state is read from the private folder and saved there."""
        number = context.node_config.get("partition-id")
        number = number if isinstance(number, int) else 0
        name_one = "Name one in the node config: --node-config \"private-folder='/srv/gradveil' partition-id=0\"."
        place = self._place(context)
        folder = None if place is None else PrivateFolder(place / "private")
        return protected_update(self.defence, update, start, ProtectionPlace(number, told, folder, name_one))

    def _place(self, context: Context) -> Path | None:
        """Return the folder of this run and client, or None if the site has named none."""
        if not (context.node_config.get("private-folder") or self.folder):
            return None
        number = context.node_config.get("partition-id")
        owner = f"mod-{number}" if isinstance(number, int) else f"mod-node-{context.node_id}"
        return private_folder(context, self.folder) / owner


def hide_errors(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer a message as the app does; an error's text, which may hold private values, stays in the site's log.

    A mod for apps that call `gradveil.flower.train`: Flower itself would send the text of an exception to the server.
    """
    try:
        return call_next(message, context)
    except Exception as error:
        return _failed(message, error)


def _failed(message: Message, error: Exception) -> Message:
    """Return a reply with a short code in place of an error's text, which goes to the site's log."""
    LOG.error("The site sent nothing.", exc_info=error)
    return Message(
        Error(_CODE, f"The client sent nothing (code {code_of(error)!r}). Its log has more."), reply_to=message
    )


def private_folder(context: Context, otherwise: str | Path | None = None) -> Path:
    """Return the private folder of a run at this site: below ``private-folder`` of its node config, or ``otherwise``.

    Raises:
        ConfigError: neither is given.
    """
    named = context.node_config.get("private-folder") or otherwise
    if not named:
        raise ConfigError(
            "A site must name a folder for its private files, got none. Add it to the node config: "
            "--node-config \"private-folder='/srv/gradveil' partition-id=0\"."
        )
    return Path(str(named)).expanduser() / f"run-{context.run_id}"


def _told_round(content: RecordDict) -> int:
    """Return the round that the server states, or 0."""
    told = [record.get("server-round") for record in content.config_records.values()]
    return next((value for value in told if isinstance(value, int) and value >= 1), 0)


def _examples(content: RecordDict) -> int:
    """Return the number of images that the reply states, or 0."""
    stated = [_metric(record, "num-examples") for record in content.metric_records.values()]
    return next((int(value) for value in stated if value is not None and math.isfinite(value)), 0)


def _metric(record: MetricRecord, key: str) -> float | None:
    value = record.get(key)
    return value if isinstance(value, (int, float)) else None


def _count(value: object) -> int:
    return len(value) if isinstance(value, list) else 1
