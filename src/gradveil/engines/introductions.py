"""What a node says about its site, or why it says nothing."""

from dataclasses import dataclass

from gradveil.engines.messages import read_config, whole
from gradveil.engines.site_codes import named
from gradveil.errors import ConfigError, GradveilError, MessageError, WorkerError

from flwr.app import RecordDict  # isort: skip - messages says if it is missing


@dataclass(frozen=True)
class Introduction:
    """What a node says about its site: its client's number, and how many images it has and how many are marked."""

    node: int
    number: int
    images: int
    sensitive: int


@dataclass(frozen=True)
class Failure:
    """A message that was not answered, with the reason."""

    reason: str


@dataclass(frozen=True)
class Refusal:
    """A node without an introduction: why, and the number of the client that it states, or -1."""

    number: int
    error: GradveilError


def printable_reason(reason: str) -> str:
    """Return the beginning of a text of another machine, without characters that move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in reason[:200])


def two_nodes(clients: int, one: Introduction, other: Introduction) -> ConfigError:
    """Return the error about two nodes with one number."""
    first, second = sorted((one.node, other.node))
    return ConfigError(
        f"The nodes' numbers must be 0..{clients - 1}, each once, got {one.number} from nodes {first} and "
        f"{second}. Start each node with its own partition-id, and admit known nodes only "
        "(flower-superlink --enable-supernode-auth)."
    )


def introduction_of(node: int, answer: RecordDict | Failure, clients: int, max_images: int) -> Introduction | Refusal:
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
