"""A request to stop, from Ctrl-C or a scheduler: the step is finished and saved first."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Remembers SIGINT and SIGTERM while entered; the second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.is_made = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_made and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.is_made = True
