import socket

import pytest

from plait.errors import ConfigError
from plait.serve.http.address import check_address, is_loopback, listen, url_of


@pytest.mark.parametrize(("host", "wanted"), [("127.0.0.1", True), ("127.8.8.8", True), ("0.0.0.0", False)])
def test_loopback_is_known(host: str, wanted: bool) -> None:
    assert is_loopback(host) is wanted


def test_an_address_that_others_reach_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="0.0.0.0 can be reached from other machines, and no API key"):
        check_address("0.0.0.0", 0, None)
    check_address("0.0.0.0", 0, "key")
    check_address("127.0.0.1", 0, None)


@pytest.mark.parametrize("key", ["", "two words", "caf\u00e9", "new\nline"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="the API key is empty, or has characters"):
        check_address("127.0.0.1", 0, key)


def test_a_port_in_use_is_refused() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            check_address("127.0.0.1", port, None)
    check_address("127.0.0.1", port, None)


def test_a_host_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="host 'no.such.host.invalid' is not known"):
        check_address("no.such.host.invalid", 0, "key")


def test_a_host_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen at port 0 of 192.0.2.1"):
        check_address("192.0.2.1", 0, "key")


def test_connections_wait_until_they_are_accepted() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
        with socket.create_connection(listener.getsockname(), timeout=10):
            listener.accept()[0].close()
