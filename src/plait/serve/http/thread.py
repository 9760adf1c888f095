"""The HTTP side of rank 0: uvicorn in a thread of its own, beside the one that generates."""

import asyncio
import logging
import math
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

SETTLE_S = 5.0
"""For answers that are ready to be sent, once nothing is generated any more."""


class HttpThread(threading.Thread):
    """Runs `app` for the connections of `listener`, which it closes; `on_loss` is told why it ended by itself.

    From `stop_accepting` on nobody new is let in, and connections that wait for nothing are closed; those that wait for
    an answer have `grace_s` and a moment more.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, grace_s: float, on_loss: Callable[[str], None]) -> None:
        super().__init__(name="plait-http", daemon=True)
        self._listener = listener
        self._on_loss = on_loss
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=math.ceil(grace_s + SETTLE_S),
            )
        )

    def run(self) -> None:
        """Serve until told to stop."""
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        except BaseException as error:
            self._on_loss(f"{type(error).__name__}: {error}")
            raise
        if not self._server.should_exit:
            self._on_loss("uvicorn stopped")

    def stop_accepting(self) -> None:
        """Let nobody new in, and end when everybody has an answer."""
        self._server.should_exit = True

    def close(self, patience_s: float) -> None:
        """End, at the latest after `patience_s`."""
        self.stop_accepting()
        self.join(patience_s)
        if self.is_alive():
            # Whom uvicorn cuts off now is cut off on purpose: no traceback for it.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self._server.force_exit = True
            self.join(1.0)
