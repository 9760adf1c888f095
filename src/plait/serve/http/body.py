"""What may be sent to the server: JSON, of a bounded size, in a bounded time."""

import asyncio

from starlette.requests import Request

from plait.serve.form.refusal import Refusal

MAX_BYTES = 2 * 2**20
PATIENCE_S = 60.0
"""From the headers of a request to the end of its body."""


async def read_body(request: Request) -> bytes:
    """The body of a request, as it was sent.

    Raises:
        Refusal: it is not declared as JSON, is too large, or does not come.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        # A page in a browser can send other types to a server on loopback without asking, but not this one.
        raise Refusal(415, f"the body is to be JSON, with Content-Type: application/json, not {kind!r}")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        _check_size(int(declared))
    body = bytearray()
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for chunk in request.stream():
                body += chunk
                _check_size(len(body))
    except TimeoutError as error:
        raise Refusal(408, f"the body did not come within {PATIENCE_S:.0f} s") from error
    return bytes(body)


def _check_size(size_bytes: int) -> None:
    if size_bytes > MAX_BYTES:
        raise Refusal(413, f"the body is {size_bytes} bytes or more, over the limit of {MAX_BYTES}", code="too_large")
