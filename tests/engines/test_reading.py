import pytest

from gradveil.engines.reading import no_foreign_error, of_client
from gradveil.errors import ConfigError, MessageError


def test_an_error_about_a_message_names_the_client():
    with pytest.raises(MessageError, match=r"The answer of client 7 was not used\. Too long"), of_client(7):
        raise MessageError("Too long")


def test_other_errors_of_gradveil_stay_as_they_are():
    with pytest.raises(ConfigError, match=r"^wrong$"), of_client(7), no_foreign_error():
        raise ConfigError("wrong")


def test_an_error_that_no_check_foresaw_is_one_about_the_message_without_its_values():
    with pytest.raises(MessageError, match=r"client 2 .* KeyError") as caught, of_client(2), no_foreign_error():
        raise KeyError("secret value")
    assert "secret value" not in str(caught.value)
