"""One site of a training over Flower: its own images, its private folder, its policy; answers the server's messages.

A site's policy (`gradveil.engines.site_policy`) says who it is and what it agrees to; it comes from the site's node
config or its own TOML file, never from the run. Its ledger (`gradveil.engines.site_ledger`) makes sure that each round
is answered once and that only weights of such rounds are scored (`gradveil.engines.site_scores`). Digests of what it
received stand in a file that sites can compare (`gradveil.engines.site_broadcasts`).

What leaves a site: the update after ``on_update``, the number of images behind it, the numbers of its images and of its
marked images; of its test images the number of correct answers, also per class, and the rounded loss; of its training
images the number of correct answers with noise, if its policy allows that; whether its tripwire found a trap; short
codes in place of errors (`gradveil.engines.site_codes`); and the defence's reports, if its policy allows them.

Private state never is in Flower's ``Context.state`` or in a message. Unless the policy says ``repeatable``, every
message is answered with fresh system randomness, as noise that is drawn again for another model can be subtracted.

Trust: Flower ships the app's code from whoever starts the run, and a site runs it. The checks here stop a curious
server and a wrong setting, but not a server that sends other code: install gradveil at the site, read the app, and
confine its process.
"""

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradveil.data import Dataset
from gradveil.defences import Budget
from gradveil.engines import site_sums
from gradveil.engines.devices import Devices, chunks
from gradveil.engines.messages import finite, listed, read_arrays, read_config, whole
from gradveil.engines.site import MOST_ROUNDS, Site, open_site
from gradveil.engines.site_broadcasts import Heard, note
from gradveil.engines.site_budget import require_affordable
from gradveil.engines.site_codes import code_of, refused
from gradveil.engines.site_kinds import app_of
from gradveil.engines.site_ledger import digest, weights_digest
from gradveil.engines.site_policy import read_policy
from gradveil.engines.site_scores import as_given, require_allowed
from gradveil.engines.site_sum_state import Part
from gradveil.engines.sum_masks import word_bits
from gradveil.engines.training import single_thread
from gradveil.engines.tripwire import TripwireWarning, hearing
from gradveil.errors import DivergedError, GradveilError, MessageError, RefusedError
from gradveil.federated.client import Broadcast, Score
from gradveil.federated.secure_sum import Quantiser
from gradveil.federated.server import ScoreRequest, learning_rate
from gradveil.limits import parse_json
from gradveil.storage import load_tensors, make_folder, read_metadata, save_tensors
from gradveil.types import Tensors, Update

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
except ImportError as error:
    raise ImportError("gradveil over Flower needs Flower. Run `pip install 'gradveil[flower]'`.") from error

LOG = logging.getLogger("flwr")
MOST_REQUESTS, MOST_PUBLIC = 10_000, 4
"""Largest number of scores per message; largest broadcast beside the model, in entries per entry of the model."""


def client_app(data: Callable[[Context], Dataset] | None = None) -> ClientApp:
    """Return a ClientApp for one site.

    Args:
        data: returns this site's images: it trains on the training split, and its own model is scored on the test
            split. By default the policy names them.
    """

    def reply(kind: str, message: Message, context: Context) -> Message:
        return Message(answered(kind, message.content, context, data), reply_to=message)

    return app_of(reply)


def answered(
    kind: str, content: RecordDict, context: Context, data: Callable[[Context], Dataset] | None = None
) -> RecordDict:
    """Return a site's answer to a message. An error is answered with its code; the text stays in the site's log."""
    steps = {"query.keys": site_sums.keys, "query.shares": site_sums.shares, "query.unmask": site_sums.unmask}
    work = ({"query": _introduce, "train": _train, "evaluate": _score} | steps)[kind]
    try:
        with single_thread(), open_site(context, data) as site:
            return work(site, content)
    except Exception as error:  # its text may hold private values
        if isinstance(error, GradveilError):
            LOG.error("The site sent nothing. %s", error)
        else:
            LOG.exception("The site sent nothing.")
        return RecordDict({"error": ConfigRecord({"code": code_of(error), "number": _own_number(context)})})


def _own_number(context: Context) -> int:
    """Return the number of this client by its node config or policy file, or -1 if neither can be read."""
    try:
        return read_policy(context.node_config).partition_id
    except GradveilError:
        number = context.node_config.get("partition-id")
        return number if isinstance(number, int) else -1


def _introduce(site: Site, content: RecordDict) -> RecordDict:
    site.require_guarantee()
    marked = site.data.count("sensitive", None)
    return _facts({"number": site.number, "images": len(site.data.train), "sensitive": marked})


def _train(site: Site, content: RecordDict) -> RecordDict:
    """Answer a round: train, or give the stored answer if the server repeats the very same request."""
    number, lr = _round_and_rate(site, content)
    devices = site.devices(content)
    model, public = _received(devices, content), _public(devices, content)
    weights = weights_digest(model)
    _note(site, content, Heard(site.run, number, "train", weights, weights_digest(public) if public else ""))
    request = digest(number, lr, weights, weights_digest(public))
    told = digest(request, sorted(read_config(content, "network").items()))
    part = site_sums.join(site, content, told) if site_sums.is_secure(site) else None
    if not (site.book.ledger.run(site.run).repeats(number, request) and site.answer_path.exists()):
        site.require_state(devices, content)
        _train_anew(site, devices, Broadcast(devices.net.shared_vector(model), lr, number, public), request, weights)
    return _stored(site.answer_path) if part is None else _masked(site, part)


def _train_anew(site: Site, devices: Devices, sent: Broadcast, request: str, weights: str) -> None:
    """Train on what the server sent, and save the answer; the ledger is written before and after."""
    begun = site.begin(devices, sent.round, request)
    site.book.write(begun)
    with _logged_alarms() as alarms:
        played = devices.train(site.number, sent)
    _store(site.answer_path, played.update, len(alarms), played.reports if site.policy.reports else {})
    site.note(sent.round, "train", weights, begun.run(site.run).cost)
    site.book.write(begun.with_run(site.run, begun.run(site.run).answer(weights)))


def _masked(site: Site, part: Part) -> RecordDict:
    """Return the answer that was saved last, with its update weighted, as whole numbers and under masks."""
    facts, parts = _kept(site.answer_path)
    how = Quantiser(site.settings.sum_bits, site.settings.sum_range)
    scaled = [tensors[name].double() * part.weight for tensors in parts for name in sorted(tensors)]
    codes = torch.cat([how.encode(one).reshape(-1) for one in scaled]).numpy().astype(np.uint64)
    words = site_sums.masked(site, part, codes)
    signed = words.astype(np.uint32).view(np.int32) if word_bits(how, len(part.members)) == 32 else words.view(np.int64)
    opened = [] if part.opened is None else list(part.opened[0])
    answer = _facts(facts | {"transcript": part.request, "opened": opened})
    answer["masked"] = ArrayRecord({"masked": torch.from_numpy(signed)})
    return answer


def _note(site: Site, content: RecordDict, heard: Heard) -> None:
    """Note digests of what the server sent, whatever becomes of it, so that sites can compare them."""
    heard = replace(heard, network=digest(sorted(read_config(content, "network").items())))
    if note(site.broadcasts_path, heard):
        LOG.info("Received for %s in round %s of run %s: model %s, public %s, network %s.", heard.work, heard.round,
                 heard.run, heard.model, heard.public or "none", heard.network)  # fmt: skip


@contextmanager
def _logged_alarms() -> Iterator[list[str]]:
    """Collect what the tripwire announces within the ``with`` block, for this site's log only."""
    with warnings.catch_warnings(action="ignore", category=TripwireWarning), hearing() as alarms:
        yield alarms
    for alarm in alarms:
        LOG.warning("%s", alarm)


def _round_and_rate(site: Site, content: RecordDict) -> tuple[int, float]:
    """Return a round's number and rate. Raise unless they are those that the run's settings announce."""
    try:
        round_number = whole(read_config(content, "round"), "number", 1, site.settings.rounds)
    except MessageError as error:
        raise refused("round", str(error)) from error
    lr = finite(read_config(content, "step"), "lr")
    agreed = learning_rate(site.settings, round_number)
    if lr != agreed or lr > site.policy.max_rate:
        raise refused("rate", f"The learning rate of round {round_number} must be {agreed:g}, got {lr:g}.")
    return round_number, lr


def _received(devices: Devices, content: RecordDict) -> dict[str, Tensor]:
    """Return the model that the server sent, which must fit the network and be finite."""
    net = devices.net
    model = read_arrays(content, "model", net.shared_tensors(net.values[net.shared]), 0)
    if not all(bool(tensor.isfinite().all()) for tensor in model.values()):
        raise MessageError("A received model must be finite, got NaN or infinity.")
    return model


def _public(devices: Devices, content: RecordDict) -> dict[str, Tensor]:
    return read_arrays(content, "public", None, MOST_PUBLIC * len(devices.net.values) + 1024)


def _store(path: Path, update: Update, alarms: int, reports: Mapping[str, float]) -> None:
    """Save an answer before it is sent. Raise if the update is not finite, as the server would not use it."""
    tensors = {f"tensors.{name}": tensor for name, tensor in update.tensors.items()}
    tensors |= {f"buffers.{name}": tensor for name, tensor in update.buffers.items()}
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise DivergedError("The update must be finite, got NaN or infinity. Lower the learning rate.")
    facts = {
        "images": update.num_examples,
        "alarms": alarms,
        "report-names": list(reports),
        "report-values": [value if math.isfinite(value) else 0.0 for value in reports.values()],
    }
    make_folder(path.parent, 0o700)
    save_tensors(path, tensors, {"facts": json.dumps(facts)}, mode=0o600)


def _stored(path: Path) -> RecordDict:
    """Return the answer that was saved last."""
    facts, (tensors, buffers) = _kept(path)
    answer = _facts(facts)
    answer["tensors"], answer["buffers"] = ArrayRecord(tensors), ArrayRecord(buffers)
    return answer


def _kept(path: Path) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """Return the plain values, and the tensors and buffers, of the answer that was saved last."""
    kept = load_tensors(path)
    parts = [{key.removeprefix(f"{kind}."): tensor for key, tensor in kept.items() if key.startswith(f"{kind}.")}
             for kind in ("tensors", "buffers")]  # fmt: skip
    return parse_json(read_metadata(path)["facts"]), parts


def _score(site: Site, content: RecordDict) -> RecordDict:
    """Give the scores that this site agrees to; in place of each other one, the code that says why not."""
    devices = site.devices(content)
    after = whole(read_config(content, "round"), "number", 0, MOST_ROUNDS)
    model, asked = _received(devices, content), read_config(content, "requests")
    _note(site, content, Heard(site.run, after, "score", weights_digest(model)))
    images, own = listed(asked, "images", str, MOST_REQUESTS), listed(asked, "own", bool, MOST_REQUESTS)
    if len(images) != len(own):
        raise MessageError("Requests must have as many kinds of images as owners, got other numbers.")
    if any(own):
        site.require_state(devices, content)
    given, scores = list[str](), list[Score]()
    for kind, mine in zip(images, own, strict=True):
        try:
            scores.append(_one_score(site, devices, ScoreRequest(kind, site.number if mine else None), after, model))
            given.append("exact" if kind == "test" else "noised")
        except RefusedError as error:
            LOG.info("%s", error)
            scores.append(Score())
            given.append(error.code)
    return _facts({
        "given": given,
        "correct": [score.correct for score in scores],
        "loss-sum": [score.loss_sum for score in scores],
        "count": [score.count for score in scores],
        "classes": [len(score.class_count) for score in scores],
        "class-correct": [number for score in scores for number in score.class_correct],
        "class-count": [number for score in scores for number in score.class_count],
    })  # fmt: skip


def _one_score(site: Site, devices: Devices, request: ScoreRequest, after: int, model: Tensors) -> Score:
    """Return a score as it leaves the site: from the ledger if it was given before, otherwise computed and noted."""
    require_allowed(site.policy, request, has_private=devices.net.has_private)
    ledger, weights = site.book.ledger, weights_digest(model)
    key = f"{weights} {request.images} {request.client}"
    record = ledger.run(site.run)
    if key in record.scores:
        return record.scores[key]
    admitted = record.admit(after, weights)
    ledger = ledger.with_run(site.run, admitted)
    site.book.write(ledger)  # before anything is computed, so that a failure does not admit other weights
    vector = devices.net.shared_vector(model)
    if request.images != "test":
        with _logged_alarms():
            devices.inspect(site.number, after, vector)
    parts = (devices.score(request, start, after, vector) for start in chunks(site.data, request))
    score, spent = as_given(site.policy, ledger, request.images, sum(parts, Score()))
    require_affordable(site.policy, spent)
    site.note(after, f"score {request.images}", weights, Budget(spent.epsilon - ledger.epsilon, 0.0))
    site.book.write(spent.with_run(site.run, admitted.with_score(key, score)))
    return score


def _facts(values: dict[str, Any]) -> RecordDict:
    return RecordDict({"facts": ConfigRecord(values)})
