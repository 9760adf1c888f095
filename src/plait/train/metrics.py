"""What is measured at every step, and where it is written."""

import json
import math
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from plait.config.parallel import ParallelConfig
from plait.config.run import AnyRun, FineTuneConfig, RunConfig
from plait.contract.step import sum_flops
from plait.contract.training import derive_run_model
from plait.errors import ConfigError
from plait.parallel.apply import ownership_of
from plait.sharding import Ownership

Record = Mapping[str, float | int | None]

_PEAK_BF16_FLOPS_PER_S = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
}
"""Dense bfloat16 peak by the start of the device's name, from NVIDIA's datasheets; of nothing else is a peak known."""


def find_peak_flops_per_s(device: torch.device, compute: str) -> float | None:
    """The device's peak where it is known, else None: then no MFU is given rather than a guess."""
    if device.type != "cuda" or compute != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    known = [prefix for prefix in _PEAK_BF16_FLOPS_PER_S if name.startswith(prefix)]
    return _PEAK_BF16_FLOPS_PER_S[max(known, key=len)] if known else None


def measure_peak_memory_bytes(device: torch.device) -> int:
    """Most memory this rank has held so far: of the accelerator, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def derive_step_flops(run: RunConfig) -> int:
    """FLOPs of the GEMMs of one step of all ranks, forward and backward, by the contract of the unsharded model."""
    contract = derive_run_model(run.model_copy(update={"parallel": ParallelConfig()}))
    micro_batch = sum(sum_flops(op.forward) + sum_flops(op.backward) for op in contract.ops)
    return micro_batch * run.train.gradient_accumulation * run.parallel.dp


def count_step_flops(run: RunConfig | FineTuneConfig, model: nn.Module) -> int:
    """FLOPs of the GEMMs of one step of all ranks; those of a Hugging Face model are counted by its matrices.

    Each matrix is multiplied once forward and once for the gradient of its input, and once more for its own if it is
    trained; each token attends to all tokens of its sequence, as in the contract of our models.
    """
    if isinstance(run, RunConfig):
        return derive_step_flops(run)
    per_token = sum(
        (6 if param.requires_grad else 4) * prod(ownership.shape) for ownership, param in _list_matrices(model)
    )
    shape = run.model
    attention = 12 * run.seq_len * shape.num_heads * shape.head_width * shape.num_layers
    return run.tokens_per_step * (per_token + attention)


def _list_matrices(model: nn.Module) -> Iterator[tuple[Ownership, nn.Parameter]]:
    """What tokens are multiplied with, whole; a table that rows are looked up in only if it is the head as well."""
    ownership = ownership_of(model)
    multiplied = {
        param
        for module in model.modules()
        if "Embedding" not in type(module).__name__
        for param in module.parameters(recurse=False)
    }
    for name, param in model.named_parameters():
        if param.dim() == 2 and param in multiplied:
            yield ownership[name], param


@dataclass(frozen=True)
class Rates:
    """How much a step of a run is: what turns its time into rates."""

    tokens: int
    flops_per_rank: float
    peak_flops_per_s: float | None
    device: torch.device

    @classmethod
    def build(cls, run: AnyRun, step_flops: int, device: torch.device) -> Self:
        """Those of a step of `run`, which is so many FLOPs on all ranks together."""
        flops_per_rank = step_flops / run.parallel.mesh_shape.world_size
        return cls(run.tokens_per_step, flops_per_rank, find_peak_flops_per_s(device, run.precision.compute), device)

    def measure(self, elapsed_s: float) -> Record:
        """The rates of a step that took `elapsed_s`."""
        flops_per_s = self.flops_per_rank / elapsed_s
        return {
            "step_s": elapsed_s,
            "tokens_per_s": self.tokens / elapsed_s,
            "flops_per_s_per_rank": flops_per_s,
            "mfu": flops_per_s / self.peak_flops_per_s if self.peak_flops_per_s else None,
            "peak_memory_bytes": measure_peak_memory_bytes(self.device),
        }


class MetricsFile:
    """One JSON object a line and step, in `metrics.jsonl`; optionally the same for TensorBoard.

    A resumed run goes on behind the step it resumes from: what an interrupted run wrote beyond it is dropped, so that
    every step is in the file once.
    """

    def __init__(self, path: Path, *, resumed_step: int, tensorboard: bool = False) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _keep_until(path, resumed_step)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})", hint="set out_dir and name") from error
        self._board = _build_board(path.parent / "tensorboard", resumed_step) if tensorboard else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, record: Record) -> None:
        """Append one step; a value that is not finite, which JSON cannot say, is null."""
        finite = {key: value if value is None or math.isfinite(value) else None for key, value in record.items()}
        try:
            self._append(json.dumps(finite, allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written ({error.strerror})") from error
        if self._board is not None:
            for key, value in finite.items():
                if key != "step" and value is not None:
                    self._board.add_scalar(key, value, record["step"])

    def _append(self, line: bytes) -> None:
        """Write all of a line or none of it: of a line for which there is not enough room the system writes a part."""
        size_bytes = self._file.tell()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(size_bytes)
            raise


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; they end at a line that is none, as is a last one cut off in the middle."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            break
        records.append(record)
    return records


def _keep_until(path: Path, step: int) -> None:
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    beside = path.with_name(f".writing-{path.name}")
    try:
        beside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _build_board(folder: Path, resumed_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise ConfigError(
            f"train.tensorboard = true needs the tensorboard package ({error})", hint="pip install 'plait[tensorboard]'"
        ) from error
    return SummaryWriter(str(folder), purge_step=resumed_step + 1)
