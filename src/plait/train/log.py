"""What the first rank writes and shows of a run while it goes on."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from plait.comm.agree import together
from plait.comm.mesh import Mesh
from plait.config.run import AnyRun
from plait.errors import ConfigError
from plait.overlap.receipt import Receipt, build_receipt_table
from plait.overlap.stages import gather_receipt
from plait.train.faults.pace import Pace, SlowRanks
from plait.train.metrics import MetricsFile, Rates, Record
from plait.train.progress import ProgressDisplay
from plait.train.state import Position
from plait.train.step import StepResult

_RECEIPT = "receipt.json"


@dataclass(frozen=True)
class Done:
    """One step that was taken."""

    position: Position
    """After the step."""
    result: StepResult
    learning_rate: float
    elapsed_s: float
    pace: Pace | None = None
    """Of all ranks over the latest steps, where that was measured after this one."""


class RunLog:
    """Metrics, progress and the receipt; only the first rank has any, and every rank may call."""

    def __init__(
        self,
        run: AnyRun,
        mesh: Mesh,
        first_step: int,
        step_flops: int,
        receipt: Receipt | None = None,
        *,
        notes: Sequence[str] = (),
    ) -> None:
        folder = Path(run.out_dir) / run.name
        self.metrics_path = folder / "metrics.jsonl"
        self.receipt_path = None if receipt is None else folder / _RECEIPT
        self._receipt, self._notes = receipt, notes
        self._run, self._mesh, self._first_step = run, mesh, first_step
        self._is_writer = mesh.rank == 0
        self._has_written = False
        self._slow_ranks = SlowRanks()
        self._rates = Rates.build(run, step_flops, mesh.device)

    def __enter__(self) -> Self:
        run, step = self._run, self._first_step
        with together(self._mesh), ExitStack() as stack:
            if self._is_writer:
                if self.receipt_path is None:
                    # On another mesh the run may have had one, which tells of nothing that runs now.
                    self.metrics_path.with_name(_RECEIPT).unlink(missing_ok=True)
                self._metrics = stack.enter_context(
                    MetricsFile(self.metrics_path, resumed_step=step, tensorboard=run.train.tensorboard)
                )
            self._display = stack.enter_context(
                ProgressDisplay(run.name, run.train.steps, step, is_shown=self._is_writer)
            )
            self._stack = stack.pop_all()
        for note in self._notes:
            self._display.say(f"passed over: {note}")
        self._display.say(self._describe_start())
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        self._stack.close()
        if kind is None and self._has_written:
            self._save_receipt()

    def write(self, done: Done) -> None:
        """Write one step to the metrics, and show it."""
        step = done.position.step
        record: Record = {
            "step": step,
            "loss": done.result.loss,
            "grad_norm": done.result.grad_norm,
            "learning_rate": done.learning_rate,
            "tokens": done.position.consumed_sequences * self._run.seq_len,
            **self._rates.measure(done.elapsed_s),
            **(done.pace.to_record() if done.pace is not None else {}),
        }
        if self._is_writer:
            self._metrics.write(record)
        if step % self._run.train.log_every == 0 or done.result.is_stop_requested:
            self._display.show(step, record)
        if done.pace is not None and (change := self._slow_ranks.describe_change(done.pace)) is not None:
            self._display.say(f"step {step}: {change}")
        if done.result.is_stop_requested:
            self._display.say(f"asked to stop: saving step {step}")
        if not self._has_written:
            self._has_written = True
            receipt = self._save_receipt()
            is_asked = self._run.overlap.policy != "disabled" or self._run.quantization.resolved is not None
            if receipt is not None and is_asked:
                self._display.say_table(build_receipt_table(receipt))

    def _save_receipt(self) -> Receipt | None:
        """Write the receipt of all stages, which their ranks put together; None where there is none."""
        if self._receipt is None or self.receipt_path is None:
            return None
        receipt = gather_receipt(self._receipt, self._mesh.pp, self._mesh.device)
        with together(self._mesh):
            if self._is_writer:
                _replace_text(self.receipt_path, json.dumps(receipt.to_json(), indent=2) + "\n")
        return receipt

    def _describe_start(self) -> str:
        run, step = self._run, self._first_step
        if step >= run.train.steps:
            return f"{run.name}: nothing left to do, step {step} of {run.train.steps} is saved; more train.steps go on"
        begin = f"from step {step}" if step else "from the start"
        return f"{run.name}: {run.parallel.mesh_shape} on {self._mesh.device}, {begin} to step {run.train.steps}"


def _replace_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    beside = path.with_name(f".writing-{path.name}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
