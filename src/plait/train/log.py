"""What the first rank writes and shows of a run while it goes on."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from plait.comm.agree import together
from plait.comm.mesh import Mesh
from plait.config.run import RunConfig
from plait.train.metrics import MetricsFile, Rates, Record
from plait.train.progress import ProgressDisplay
from plait.train.state import Position
from plait.train.step import StepResult


@dataclass(frozen=True)
class Done:
    """One step that was taken."""

    position: Position
    """After the step."""
    result: StepResult
    learning_rate: float
    elapsed_s: float


class RunLog:
    """Metrics and progress; only the first rank has any, and every rank may call."""

    def __init__(self, run: RunConfig, mesh: Mesh, first_step: int) -> None:
        self.metrics_path = Path(run.out_dir) / run.name / "metrics.jsonl"
        self._run, self._mesh, self._first_step = run, mesh, first_step
        self._is_writer = mesh.rank == 0
        self._rates = Rates.build(run, mesh.device)

    def __enter__(self) -> Self:
        run, step = self._run, self._first_step
        with together(self._mesh), ExitStack() as stack:
            if self._is_writer:
                self._metrics = stack.enter_context(
                    MetricsFile(self.metrics_path, resumed_step=step, tensorboard=run.train.tensorboard)
                )
            self._display = stack.enter_context(
                ProgressDisplay(run.name, run.train.steps, step, is_shown=self._is_writer)
            )
            self._stack = stack.pop_all()
        self._display.say(self._describe_start())
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

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
        }
        if self._is_writer:
            self._metrics.write(record)
        if step % self._run.train.log_every == 0 or done.result.is_stop_requested:
            self._display.show(step, record)
        if done.result.is_stop_requested:
            self._display.say(f"asked to stop: saving step {step}")

    def _describe_start(self) -> str:
        run, step = self._run, self._first_step
        if step >= run.train.steps:
            return f"{run.name}: nothing left to do, step {step} of {run.train.steps} is saved; more train.steps go on"
        begin = f"from step {step}" if step else "from the start"
        return f"{run.name}: {run.parallel.mesh_shape} on {self._mesh.device}, {begin} to step {run.train.steps}"
