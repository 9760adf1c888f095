"""What is noted of every request: its id, its status, how long it took; never what it says."""

import time
import uuid

import click
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.serve.metrics import Metrics

GONE = 499
"""The status noted for a client that went away before its answer, as nginx has it."""

_PATHS = ("/health", "/livez", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")


class AccessNotes:
    """Gives each request an id, counts it when its answer is sent, and prints a line of it if `is_logged`."""

    def __init__(self, app: ASGIApp, metrics: Metrics, is_logged: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._is_logged = is_logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_s, status = time.monotonic(), GONE
        scope["request_id"] = uuid.uuid4().hex

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = scope["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            status = 500  # which is sent further out
            raise
        finally:
            self._metrics.count_response(_name_path(scope["path"]), status)
            if self._is_logged:
                _log(scope, status, time.monotonic() - start_s)


def _name_path(path: str) -> str:
    """The path if there is one, so that strangers cannot fill the metrics."""
    return next((known for known in _PATHS if path == known or path.startswith(f"{known}/")), "other")


def _log(scope: Scope, status: int, took_s: float) -> None:
    usage = scope.get("usage")
    tokens = "" if usage is None else f" {usage['prompt_tokens']} + {usage['completion_tokens']} tokens"
    path = ascii(scope["path"])[1:-1]
    click.echo(f"{scope['request_id']} {scope['method']} {path} {status}{tokens} {took_s:.3f} s", err=True)
