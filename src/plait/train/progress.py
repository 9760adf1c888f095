"""The live display of a run, on stderr."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from plait.units import format_seconds, format_si

_LINE_EVERY_S = 5.0
"""How often a log that is not a terminal gets a line, beside the first and the last step."""

_TABLE_COLUMNS = 120
"""Width of a table in a log that is not a terminal."""


def describe_step(record: Mapping[str, float | int | None]) -> str:
    """`loss 4.231  lr 2.9e-04  12.3 k tokens/s`, with MFU where it is known."""
    parts = [f"loss {record['loss']:.3f}", f"lr {record['learning_rate']:.1e}"]
    parts.append(f"{format_si(record['tokens_per_s'] or 0.0, 'tokens/s')}")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    return "  ".join(parts)


class ProgressDisplay:
    """A bar in a terminal, lines elsewhere, silent where `is_shown` is false (all ranks but one)."""

    def __init__(self, name: str, steps: int, done: int, *, is_shown: bool) -> None:
        self._console = Console(stderr=True, quiet=not is_shown, soft_wrap=True, highlight=False)
        self._steps = steps
        self._bar: Progress | None = None
        self._next_line_s = 0.0
        self._started, self._done_before = time.monotonic(), done
        if is_shown and self._console.is_terminal:
            columns: tuple[ProgressColumn | str, ...] = (
                name, BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[latest]}"), TimeRemainingColumn(),
                "left",
            )  # fmt: skip
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(name, total=steps, completed=done, latest="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        sys.stderr.flush()

    def show(self, step: int, record: Mapping[str, float | int | None]) -> None:
        """Show step number `step`, counted from 1."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, latest=describe_step(record))
            return
        now = time.monotonic()
        if now >= self._next_line_s or step == self._steps:
            self._next_line_s = now + _LINE_EVERY_S
            self._console.print(f"step {step}/{self._steps}  {describe_step(record)}{self._describe_left(step, now)}")

    def _describe_left(self, step: int, now: float) -> str:
        left_s = (now - self._started) / max(1, step - self._done_before) * (self._steps - step)
        return f"  {format_seconds(round(left_s) or 1)} left" if step < self._steps else ""

    def say_table(self, table: RenderableType) -> None:
        """Print a table, above the bar where there is one; a file has room for all of it."""
        room = self._console.width if self._console.is_terminal else max(self._console.width, _TABLE_COLUMNS)
        self._console.print(table, width=room)

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self._console.print(text)
