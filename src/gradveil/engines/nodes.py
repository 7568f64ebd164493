"""The server's connection to the sites' nodes over Flower: who plays which client now, and their answers.

Nodes come and go. A site whose node was killed and restarted has a new node with the same number, while the old one
stays on Flower's list for about a minute and answers nothing. So the list is read again and again: new nodes are asked
who they are, even in the middle of a round, and take over the open question of their client.
"""

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gradveil.engines.introductions import (
    Failure,
    Introduction,
    Refusal,
    introduction_of,
    printable_reason,
    two_nodes,
)
from gradveil.engines.questions import Content, Patience, Question
from gradveil.errors import MessageError, WorkerError

from flwr.app import Message, RecordDict  # isort: skip - messages says if it is missing
from flwr.serverapp import Grid  # isort: skip

LOG = logging.getLogger("flwr")


@dataclass(frozen=True)
class _Sent:
    """A message on its way: the question's client, or -1 for the question who a node is."""

    node: int
    client: int = -1


class Nodes:
    """All nodes that are connected to the server.

    Args:
        grid: Flower's connection.
        clients: number of clients of the run.
        max_images: largest number of images that a site may state.
        patience: how long to wait for whom.

    Attributes:
        known: what the node of each client said about its site; clients that never were there are missing.
    """

    def __init__(self, grid: Grid, clients: int, max_images: int, patience: Patience) -> None:
        self.known: dict[int, Introduction] = {}
        self._grid, self._clients, self._max_images, self._patience = grid, clients, max_images, patience
        self._here: set[int] = set()
        self._asked: set[int] = set()
        self._replaced: set[int] = set()
        self._started = False
        self._sent: dict[str, _Sent] = {}
        self._rivals: dict[int, tuple[Introduction, float]] = {}
        self._refusals: list[Refusal] = []
        self._question = Question("", {})
        self._spoke = time.monotonic()

    def gather(self, *, stop: bool, fewest: int, needed: Collection[int]) -> None:
        """Wait until every client's node has introduced its site.

        After the waiting time, ``fewest`` clients are enough if they are more than 0 and all ``needed`` are there. If
        ``stop``, a client's node that refuses ends the waiting.
        """
        start = time.monotonic()
        until = start + self._patience.back
        while not self._started:
            self._turn()
            missing = [client for client in range(self._clients) if client not in self.known]
            for refusal in self._refusals:
                if stop and refusal.number in missing:
                    raise refusal.error
            enough = 0 < fewest <= len(self.known) and not set(missing) & set(needed)
            if self._rivals:
                self._pause("Two nodes state one number; waiting for the answer of the older one.", start)
            elif not missing:
                self._started = True
            elif time.monotonic() <= until:
                self._pause(f"Waiting for the nodes of {_clients(missing)}; {len(self.known)} are there.", start)
            elif enough:
                LOG.warning("Starting without %s, whose nodes are not there.", _clients(missing))
                self._started = True
            else:
                raise self._too_few()

    def _too_few(self) -> WorkerError:
        reasons = " ".join(str(refusal.error) for refusal in self._refusals)
        return WorkerError(
            f"All {self._clients} nodes must be there within {self._patience.back:g} seconds, got {len(self.known)}. "
            f"Start the missing nodes, or set the run's clients. {reasons}".rstrip()
        )

    def ask(
        self, kind: str, contents: Mapping[int, Content], needed: Collection[int] = (), fewest: int = 0
    ) -> dict[int, RecordDict | Failure]:
        """Return each client's answer, or why there is none, in the order of ``contents``.

        A client without a node is given up at once, unless it is ``needed`` or fewer than ``fewest`` would answer:
        then there is time for it to come back.
        """
        start = time.monotonic()
        self._question = asked = Question(kind, contents)
        self._turn()
        for client in asked.awaited():
            self._put(client)
        while asked.awaited():
            self._turn()
            asked.give_up(self._patience, time.monotonic() - start, needed, fewest)
            if not asked.awaited():
                break
            who = ", ".join(self._called(client) for client in asked.awaited())
            self._pause(f"Waiting for the answer of {who} ({kind}), {time.monotonic() - start:.0f} s so far.", start)
        self._question = Question("", {})
        self._sent = {key: sent for key, sent in self._sent.items() if sent.client < 0}
        return {client: asked.answers[client] for client in contents}

    def _called(self, client: int) -> str:
        there = f"node {self.known[client].node}" if client in self.known else "no node yet"
        return f"client {client} ({'lost' if client in self._question.lost else there})"

    def _pause(self, awaited: str, start: float) -> None:
        """Wait before the next look for answers to a question of a time; say now and then who is awaited."""
        if time.monotonic() - self._spoke >= self._patience.speak:
            self._spoke = time.monotonic()
            LOG.info("%s", awaited)
        time.sleep(self._patience.pause(time.monotonic() - start))

    def _turn(self) -> None:
        """Ask new nodes who they are, and take in all that has arrived."""
        self._here = set(self._grid.get_node_ids())
        for node in sorted(self._here - self._asked):
            self._asked.add(node)
            self._push("query", {}, _Sent(node))
        pulled = self._grid.pull_messages(list(self._sent)) if self._sent else ()
        replies = {reply.metadata.reply_to_message_id: reply for reply in pulled}
        for key in [key for key in self._sent if key in replies]:
            self._arrived(self._sent.pop(key), replies[key])
        for number, (rival, until) in list(self._rivals.items()):
            if self.known[number].node not in self._here or time.monotonic() > until:
                self._take(rival)

    def _put(self, client: int) -> None:
        """Send the open question to a client's node."""
        asked = self._question
        if client in self.known and self.known[client].node in self._here:
            asked.lost.pop(client, None)
            self._push(asked.kind, asked.contents[client], _Sent(self.known[client].node, client))
        else:
            asked.lost[client] = "its node is not there."

    def _push(self, kind: str, content: Content, sent: _Sent) -> None:
        message = Message(RecordDict(dict(content)), dst_node_id=sent.node, message_type=kind)
        (key,) = tuple(self._grid.push_messages([message])) or (None,)
        if key:
            self._sent[key] = sent
        elif sent.client >= 0:
            self._question.lost[sent.client] = "Flower could not send the message; it may be too large."

    def _arrived(self, sent: _Sent, reply: Message) -> None:
        answer = reply.content if reply.has_content() else Failure(printable_reason(reply.error.reason or "an error."))
        if sent.client < 0:
            self._met(sent.node, answer)
        elif isinstance(answer, Failure):
            if self.known[sent.client].node == sent.node:  # not yet replaced
                self._question.lost[sent.client] = answer.reason
        else:
            self._question.answers.setdefault(sent.client, answer)

    def _met(self, node: int, answer: RecordDict | Failure) -> None:
        """Take in what a node says about itself: a new one, or an old one whose number a new one claims."""
        old = next((known for known in self.known.values() if known.node == node), None)
        if old is not None:
            self._heard_again(old, answer)
        elif node not in self._replaced:
            found = introduction_of(node, answer, self._clients, self._max_images)
            found = self._same_site(found) if isinstance(found, Introduction) else found
            if isinstance(found, Refusal):
                LOG.warning("%s", found.error)
                self._refusals.append(found)
            elif found.number in self.known and self.known[found.number].node in self._here:
                self._rivals[found.number] = found, time.monotonic() + self._patience.rival
                self._push("query", {}, _Sent(self.known[found.number].node))
            else:
                self._take(found)

    def _heard_again(self, old: Introduction, answer: RecordDict | Failure) -> None:
        """Settle whose number it is: the newer node's only if the older one no longer answers."""
        rival, _ = self._rivals.get(old.number, (None, 0.0))
        if rival is None:
            return
        if isinstance(answer, Failure):
            self._take(rival)
        elif not self._started:
            raise two_nodes(self._clients, old, rival)
        else:
            LOG.warning("%s It is ignored.", two_nodes(self._clients, old, rival))
            self._rivals.pop(old.number)

    def _same_site(self, found: Introduction) -> Introduction | Refusal:
        """Refuse a node that comes back with other numbers of images than its client had."""
        old = self.known.get(found.number)
        if old is None or (old.images, old.sensitive) == (found.images, found.sensitive):
            return found
        return Refusal(-1, MessageError(
            f"Node {found.node} must have the images of client {found.number}, whose number it states, got another "
            f"number of them: {found.images:,} instead of {old.images:,}."
        ))  # fmt: skip

    def _take(self, found: Introduction) -> None:
        """Let a node play its client from now on; it gets the open question too."""
        if found.number in self.known:
            LOG.info("Client %s is back as node %s.", found.number, found.node)
            self._replaced.add(self.known[found.number].node)
        self._rivals.pop(found.number, None)
        self.known[found.number] = found
        if found.number in self._question.awaited():
            self._put(found.number)


def _clients(numbers: Collection[int]) -> str:
    return f"client{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"
