"""Where the server listens: a socket of its own, on loopback unless told otherwise."""

import errno
import ipaddress
import os
import socket

from plait.errors import ConfigError

_BACKLOG = 2048
"""Connections that wait to be accepted; the kernel may hold fewer."""


def check_address(host: str, port: int, api_key: str | None) -> None:
    """Refuse an address that cannot be listened at, or that others reach while no key is asked for.

    A server of a model that others can reach is found by them and used, so that there a key is not optional.

    Raises:
        ConfigError: why not.
    """
    if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ConfigError("the API key is empty, or has characters that a header cannot carry")
    if api_key is None and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and no API key is asked for",
            hint="set PLAIT_API_KEY or --api-key, or listen at 127.0.0.1 only",
        )
    listen(host, port).close()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`.

    Raises:
        ConfigError: no such host.
    """
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for _, address in _resolve(host))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at `port`, or at a free one if that is 0; connections wait until somebody accepts them.

    Raises:
        ConfigError: no such host, or the port is taken.
    """
    family, address = _resolve(host)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # For a server that is started again while connections of the last one are not yet forgotten.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _describe(host, port, error) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """`http://127.0.0.1:8000`."""
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if listener.family == socket.AF_INET6 else f"http://{address}:{port}"


def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Families and addresses of a host, in the order in which they are to be tried."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is not known: {error}", hint="give an address of this machine") from error
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _describe(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        hint = "choose another with --port, or a free one with --port 0"
        return ConfigError(f"port {port} of {host} is in use", hint=hint)
    why = os.strerror(error.errno) if error.errno is not None else str(error)
    return ConfigError(f"cannot listen at port {port} of {host}: {why}")
