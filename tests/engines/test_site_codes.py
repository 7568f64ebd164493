"""What leaves a site of an error is a short code, and the server has a sentence for each."""

import re
from pathlib import Path

import pytest

import gradveil
from gradveil.engines.site_codes import CODES, code_of, named, refused
from gradveil.errors import ConfigError, DataError, MessageError, RunFolderError, TripwireError, WorkerError

ENGINES = Path(gradveil.__file__).parent / "engines"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (refused("rounds", "No more of /srv/patients."), "rounds"),
        (ConfigError("/srv"), "config"),
        (DataError("/srv"), "data"),
        (RunFolderError("/srv"), "state"),
        (MessageError("/srv"), "message"),
        (TripwireError("/srv"), "tripwire"),
        (ZeroDivisionError("/srv"), "internal"),
        (MemoryError(), "internal"),
    ],
)
def test_an_error_becomes_its_code(error, code):
    assert code_of(error) == code
    assert isinstance(named("Client 1", code), CODES[code][0])
    assert "/srv" not in str(named("Client 1", code))


@pytest.mark.parametrize("code", ["none-such", "\x1b[2J", "", None, 3, ["state"], b"state"])
def test_an_unknown_code_is_not_repeated(code):
    error = named("Client 1", code)
    assert isinstance(error, WorkerError)
    assert str(error) == "Client 1 sent nothing. It answered with an unknown code. Look at its log."


def test_every_code_is_short_and_used():
    text = "".join(path.read_text() for path in ENGINES.glob("*.py"))
    assert all(re.fullmatch(r"[a-z-]{3,15}", code) for code in CODES)
    assert [code for code in CODES if f'"{code}"' not in text.replace(f'"{code}": (', "")] == []
    with pytest.raises(KeyError):
        refused("no-such-code", "")
