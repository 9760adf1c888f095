"""A request to stop, from Ctrl-C or a scheduler: the step under way is finished and saved first."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_SAME_PRESS_S = 2.0
"""A launcher passes on the Ctrl-C that its ranks got from the terminal as well."""


class StopRequest:
    """Remembers SIGINT and SIGTERM while entered, and passes the first on; Ctrl-C once more interrupts at once."""

    def __init__(self, pass_on: Callable[[], None] | None = None) -> None:
        self.is_made = False
        self._made_s = 0.0
        self._pass_on = pass_on
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, *failure: object) -> None:
        for number, receive in self._previous.items():
            signal.signal(number, receive)

    def make(self) -> None:
        """Ask to stop from within the run."""
        self.is_made = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self.is_made:
            self.is_made, self._made_s = True, time.monotonic()
            if self._pass_on is not None:
                self._pass_on()
        elif number == signal.SIGINT and time.monotonic() - self._made_s > _SAME_PRESS_S:
            raise KeyboardInterrupt
