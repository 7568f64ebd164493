"""No text of a folder becomes a tag, a handler, an address or a script of its page, whatever field it is in."""

import json
import re
from dataclasses import fields
from html.parser import HTMLParser

import pytest
import tomli_w

from gradveil.config import TrainSettings
from gradveil.errors import GradveilError
from gradveil.metrics import schema_of
from gradveil.report import audit, membership
from gradveil.report.audit import write_report
from gradveil.report.training import write_page
from gradveil.report.training_folder import read_training
from gradveil.rows import to_plain
from tests.report.folders import Made, privacy_row, utility_row

NASTY = (
    "own </script><script>alert(1)</script><img src=x onerror=alert(2)> \"' onload='alert(3)' \" "
    "href=javascript:alert(4) --><!-- ]]> </title></style></pre></td><svg/onload=alert(5)> ${alert(6)} `"
)
WORD = re.sub("[<>\"'`&]", "x", NASTY)
"""The same length, words and separators, and none of the characters that mean something on a page."""
ROW = {"round": 1, "accuracy": 0.5, "loss": 1.5, "lr": 0.05, "seconds": 0.1, "clients": 2}
CLIENT = {"client": 0, "images": 20, "accuracy_own": 0.5, "accuracy_test": 0.5}
MEMBERS = dict.fromkeys(schema_of().keys("membership")) | {
    "kind": "membership", "defence": "none", "attack": "boundary", "seed": 0, "round": 5, "client": 3, "auc": 0.6,
    "members": 5, "non_members": 5, "failed": False,
}  # fmt: skip


class Tags(HTMLParser):
    """Collect all tags with the names of their attributes, and all addresses."""

    def __init__(self, text):
        super().__init__()
        self.found, self.links = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag != "wbr":  # long texts may break there
            self.found.append((tag, *sorted(name for name, _ in attrs)))
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_comment(self, data):
        self.found.append("comment")


FORMS = {"text": lambda text: text, "texts": lambda text: [text], "mapping": lambda text: {text: 0.5}}


def made_or_refused(make, value):
    """Return a page, or nothing if a folder with this value is refused."""
    try:
        return make(value)
    except GradveilError:
        return ""


def check(make, form="text"):
    """Compare the page of a nasty text with that of a harmless one."""
    nasty, harmless = (Tags(made_or_refused(make, FORMS[form](text))) for text in (NASTY, WORD))
    assert nasty.found == harmless.found
    assert {link for link in nasty.links if not link.startswith(("#", "data:image/png;base64,"))} <= {"data:,"}


def training_page(folder, settings, row, client):
    (folder / "settings.toml").write_bytes(tomli_w.dumps(settings).encode())
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(ROW | {"round": 2}) + "\n")
    (folder / "clients.jsonl").write_text(json.dumps(client) + "\n")
    (folder / "curves.png").write_bytes(b"picture")
    read = read_training(folder)
    return write_page(folder, read.settings, read.rows, read.clients, " ".join(read.notes)).read_text(encoding="utf-8")


def columns(kind):
    """Return the fields of a table, each with the form in which it holds a text."""
    return [(kind, c.key, c.type if c.type in FORMS else "text") for c in schema_of().of(kind)]


TRAINING = [("settings", field.name, form) for field in fields(TrainSettings) for form in ("text", "texts")]
TRAINING += [("settings", None, "text"), ("round", None, "text"), *columns("round"), *columns("client")]


@pytest.mark.parametrize(("place", "key", "form"), TRAINING)
def test_no_script_through_a_field_of_a_training(tmp_path, place, key, form):
    def make(value):
        parts = {"settings": {"rounds": 2}, "round": ROW, "client": CLIENT}
        parts[place] = parts[place] | {key or value: value}
        return training_page(tmp_path, *parts.values())

    check(make, form)


ROWS = {"privacy": privacy_row(cell="000"), "utility": utility_row(), "membership": MEMBERS}
AUDIT = [place for kind in ROWS for place in (*columns(kind), (kind, None, "text"))]
AUDIT += [("settings", key, "text") for key in ("dataset", "model", "command", None)]
AUDIT += [("settings", key, "texts") for key in ("defences", "attacks", "knows", "metrics")]
AUDIT += [("cell", key, "text") for key in ("name", "kind", "defence", "attack", "needs")]
AUDIT += [("metric", key, "text") for key in ("key", "head", "help", "format")]
AUDIT += [("plan", "left_out", "mapping")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(targets=1, iterates=False).write(tmp_path_factory.mktemp("audit") / "run")


@pytest.mark.parametrize(("place", "key", "form"), AUDIT)
def test_no_script_through_a_field_of_an_audit(made, monkeypatch, place, key, form):
    for name in ("draw_figures", "save_figure"):
        monkeypatch.setattr(audit, name, lambda *_: [])
    monkeypatch.setattr(membership, "drawn", lambda *_: b"picture")
    files = {name: (made / name).read_bytes() for name in ("settings.toml", "plan.json", "rows.jsonl")}

    def make(value):
        name = key or value
        rows = {kind: row for kind, row in ROWS.items() if kind != "membership" or place == kind}  # it has a figure
        plan = json.loads(files["plan.json"]) | {"metrics": to_plain(schema_of().metrics)}
        settings = Made(targets=1).all_settings()
        if place in rows:
            rows[place] = rows[place] | {name: value}
        elif place == "settings":
            settings[name] = value
        else:
            {"cell": plan["cells"][0], "plan": plan, "metric": plan["metrics"][0]}[place][name] = value
        (made / "settings.toml").write_bytes(tomli_w.dumps(settings).encode())
        (made / "plan.json").write_text(json.dumps(plan))
        (made / "rows.jsonl").write_bytes(
            files["rows.jsonl"] + "".join(json.dumps(r) + "\n" for r in rows.values()).encode()
        )
        return write_report(made).read_text(encoding="utf-8")

    try:
        check(make, form)
    finally:
        for name, content in files.items():
            (made / name).write_bytes(content)


def test_the_comparison_finds_a_text_that_is_not_escaped():
    assert Tags(f"<p>{NASTY}</p>").found != Tags(f"<p>{WORD}</p>").found
    assert Tags(f'<p title="{NASTY}">').found != Tags(f'<p title="{WORD}">').found
    assert Tags(f"<script>{NASTY}</script>").found != Tags(f"<script>{WORD}</script>").found
