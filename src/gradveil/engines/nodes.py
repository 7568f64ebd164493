"""The server's connection to the sites' nodes over Flower: who is there, and their answers or why there is none."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gradveil.engines.messages import read_config, whole
from gradveil.engines.site_codes import named
from gradveil.errors import ConfigError, GradveilError, MessageError, WorkerError

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict  # isort: skip - messages says if it is missing
from flwr.serverapp import Grid  # isort: skip

LOG = logging.getLogger("flwr")


@dataclass(frozen=True)
class Introduction:
    """What a node says about its site: its client's number, and how many images it has and how many are marked."""

    node: int
    number: int
    images: int
    sensitive: int


@dataclass(frozen=True)
class Failure:
    """A message that was not answered, with Flower's reason."""

    reason: str


@dataclass(frozen=True)
class Refusal:
    """A node without an introduction: why, and the number of the client that it states, or -1."""

    number: int
    error: GradveilError


@dataclass(frozen=True)
class Nodes:
    """All nodes that are connected to the server.

    Attributes:
        grid: Flower's connection.
        timeout: seconds to wait for an answer; None waits as long as Flower does.
        wait: seconds to wait until the nodes of all clients are there.
    """

    grid: Grid
    timeout: float | None = None
    wait: float = 600.0

    def ask(
        self,
        kind: str,
        contents: Mapping[int, Mapping[str, ArrayRecord | ConfigRecord]],
        timeout: float | None = None,
    ) -> dict[int, RecordDict | Failure]:
        """Return each node's answer, or why there is none, in the order of ``contents``."""
        records = {node: RecordDict(dict(content)) for node, content in contents.items()}
        messages = [Message(record, dst_node_id=node, message_type=kind) for node, record in records.items()]
        answers, reasons = dict[int, RecordDict](), dict[int, str]()
        wait = timeout if self.timeout is None else self.timeout
        for reply in self.grid.send_and_receive(messages, timeout=wait) if messages else ():
            if reply.has_content():
                answers[reply.metadata.src_node_id] = reply.content
            else:  # the node's own error, or the SuperLink's, which names no node
                reasons[reply.metadata.src_node_id] = _printable(reply.error.reason or "")
        rest = " ".join(filter(None, reasons.values())) or "nothing came in time."
        return {node: answers.get(node, Failure(reasons.get(node) or rest)) for node in contents}

    def introduced(self, clients: int, max_images: int, *, stop: bool) -> dict[int, Introduction]:
        """Wait until every client's node has introduced its site; return the introductions by client.

        Nodes that belong to no client are left out. If ``stop``, a client's node that refuses ends the waiting. Two
        nodes with one number are an error, because the server can't know which of them is the site.
        """
        until, asked = time.monotonic() + self.wait, set[int]()
        known, refusals = dict[int, Introduction](), list[Refusal]()
        while True:
            new = [node for node in self.grid.get_node_ids() if node not in asked]
            asked.update(new)
            for node, answer in self.ask("query", {node: {} for node in new}, self.wait).items():
                found = _introduction(node, answer, clients, max_images)
                if isinstance(found, Refusal):
                    LOG.warning("%s", found.error)
                    refusals.append(found)
                elif found.number in known:
                    raise _twice(clients, known[found.number], found)
                else:
                    known[found.number] = found
            if len(known) == clients:
                return known
            for refusal in refusals:
                if stop and 0 <= refusal.number < clients and refusal.number not in known:
                    raise refusal.error
            if time.monotonic() > until:
                reasons = " ".join(str(refusal.error) for refusal in refusals)
                raise WorkerError(
                    f"All {clients} nodes must be there within {self.wait:g} seconds, got {len(known)}. "
                    f"Start the missing nodes, or set the run's clients. {reasons}".rstrip()
                )
            time.sleep(1)


def _printable(reason: str) -> str:
    """Return the beginning of a text of another machine, without characters that move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in reason[:200])


def _twice(clients: int, one: Introduction, other: Introduction) -> ConfigError:
    return ConfigError(
        f"The nodes' numbers must be 0..{clients - 1}, each once, got {one.number} from nodes {one.node} and "
        f"{other.node}. Start each node with its own partition-id, and admit known nodes only "
        "(flower-superlink --enable-supernode-auth)."
    )


def _introduction(node: int, answer: RecordDict | Failure, clients: int, max_images: int) -> Introduction | Refusal:
    """Return what a node says about its site, or why that can't be used."""
    name = f"Node {node}"
    try:
        facts = read_config(content_of(answer, name), "facts")
        number = whole(facts, "number", 0, clients - 1)
        images = whole(facts, "images", 1, max_images)
        return Introduction(node, number, images, whole(facts, "sensitive", 0, images))
    except MessageError as error:
        return Refusal(-1, MessageError(f"{name} must introduce its site. {error}"))
    except GradveilError as error:
        return Refusal(_stated_number(answer), error)


def content_of(answer: RecordDict | Failure, name: str) -> RecordDict:
    """Return a node's answer. Raise if there is none, or if it is an error of the site."""
    if isinstance(answer, Failure):
        raise WorkerError(
            f"{name} must answer, got: {answer.reason} Look at its SuperNode; with an out folder, the same run "
            "continues from its last checkpoint."
        )
    if "error" in answer.config_records:
        raise named(name, answer.config_records["error"].get("code"))
    return answer


def _stated_number(answer: RecordDict | Failure) -> int:
    """Return the client's number that a node states in its error, or -1."""
    if isinstance(answer, Failure) or "error" not in answer.config_records:
        return -1
    number = answer.config_records["error"].get("number")
    return number if isinstance(number, int) else -1
