"""Streams of server-sent events, and clients that go away."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.serve.form.refusal import Refusal

PATIENCE_S = 60.0
"""For a client to take what it is sent, before it is given up."""

ResultT = TypeVar("ResultT")

END = b"data: [DONE]\n\n"


def build_event(data: Any) -> bytes:
    """One event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n".encode()


class EventStream(Response):
    """Sends chunks as they come; `on_end` is called whatever ends the stream.

    An error after the first chunk cannot be a status any more: it is sent as an event, and the stream ends without
    `[DONE]`. A client that goes away, or that takes nothing for `PATIENCE_S`, ends it too.
    """

    media_type = "text/event-stream"

    def __init__(self, batches: AsyncIterator[Iterable[Any]], on_end: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self._batches = batches
        self._on_end = on_end
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientDisconnect, TimeoutError):
            return
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = END
        try:
            async for batch in self._batches:
                await _send_body(send, b"".join(map(build_event, batch)), has_more=True)
        except Refusal as refusal:
            last = build_event(refusal.to_json())
        await _send_body(send, last, has_more=False)


async def _send_body(send: Send, body: bytes, *, has_more: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await send({"type": "http.response.body", "body": body, "more_body": has_more})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of `work`, which is given up when the client goes away.

    Raises:
        ClientDisconnect: it did.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
