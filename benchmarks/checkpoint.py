"""Checkpoints of a training run on two ranks: time to save and to load, bytes, and how long training stands still.

What is measured, in one process group over the same tensors (float32 parameters and both moments, cut over tp):

* `stall_s`: how much longer some steps take with a save after the first of them than without, until all of it is on
  disk. For a save that goes on meanwhile that is what it takes from the steps, not only the call.
* `call_s`: how long the call takes that saves, or begins to.
* `save_s`: from the call until the checkpoint is complete.
* `load_s`: into the same ranks, from files that are still in the page cache; of plait with the sums of all files.

`plait` is `train.async_checkpoint = false` and true. `torch` is `dcp.save` and `dcp.async_save` of the same local
tensors under names of their own for each rank: the same bytes to the same disk, both flushed to it. torch does not sum
up files, checks nothing on load, and leaves half a folder where a save fails.

The modes are interleaved in rounds, and each stall is the difference within a round; medians over rounds are reported.

Run: `python benchmarks/checkpoint.py` (writes checkpoint.json beside itself).
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from plait.comm.launch import LocalRanks
from plait.comm.mesh import build_mesh
from plait.config.data import DataConfig
from plait.config.model import LlamaConfig
from plait.config.parallel import ParallelConfig
from plait.config.precision import PrecisionConfig
from plait.config.run import RunConfig
from plait.config.train import TrainConfig
from plait.train.build import build_trainer
from plait.train.corpus.windows import MicroBatch
from plait.train.saves import Saves
from plait.train.state import Position, checkpoint_folder, list_tensors, resume
from plait.train.step import Trainer

TP = 2
IDENTITY = {"benchmark": "checkpoint"}
Finish = Callable[[], object]
"""What waits for a save that was begun."""


def build_run(folder: Path, width: int, layers: int) -> RunConfig:
    """A run that is never started: its steps are taken one by one."""
    model = LlamaConfig(
        num_layers=layers,
        width=width,
        num_heads=8,
        num_kv_heads=8,
        mlp_width=4 * width,
        vocab_size=32_000,
        max_seq_len=64,
    )
    return RunConfig(
        name="benchmark", out_dir=str(folder), model=model, parallel=ParallelConfig(tp=TP),
        precision=PrecisionConfig(compute="float32"), data=DataConfig(kind="tokens", paths=("none",)),
        train=TrainConfig(seq_len=64, keep_checkpoints=1),
    )  # fmt: skip


class Bench:
    """One rank: a trainer, and the four ways to save it."""

    def __init__(self, folder: Path, width: int, layers: int) -> None:
        run = build_run(folder, width, layers)
        self.folder = folder
        self.mesh = build_mesh(run.parallel.mesh_shape)
        self.trainer = build_trainer(run, self.mesh)
        self.group = dist.new_group(backend="gloo")
        self.position = Position()
        rows = torch.randint(0, 32_000, (1, 65), generator=torch.Generator().manual_seed(1))
        self.batch = MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].flatten(), 0)
        tensors = list_tensors(self.trainer)
        self.local = {f"{self.mesh.rank}.{name}": owned.tensor for name, owned in tensors.items()}
        saves_at_once, saves_meanwhile = (Saves(self._with(is_async), IDENTITY) for is_async in (False, True))
        self.begin: dict[str, Callable[[], Finish]] = {
            "none": lambda: lambda: None,
            "plait": lambda: self._begin_ours(saves_at_once),
            "plait_async": lambda: self._begin_ours(saves_meanwhile),
            "torch": self._save_with_torch,
            "torch_async": self._begin_with_torch,
        }

    def _with(self, is_async: bool) -> Trainer:
        run = self.trainer.run
        changed = run.model_copy(update={"train": run.train.model_copy(update={"async_checkpoint": is_async})})
        return replace(self.trainer, run=changed)

    def step(self) -> None:
        """One optimizer step."""
        self.trainer.step([self.batch], 1e-4)

    def _begin_ours(self, saves: Saves) -> Finish:
        self.position = replace(self.position, step=self.position.step + 1)
        saves.save(self.position)
        return saves.finish

    def _save_with_torch(self) -> Finish:
        dcp.save(self.local, checkpoint_id=self.fresh())
        return lambda: None

    def _begin_with_torch(self) -> Finish:
        future = dcp.async_save(self.local, checkpoint_id=self.fresh(), process_group=self.group)
        return future.result  # type: ignore[union-attr]

    def fresh(self) -> Path:
        """An empty folder for torch, which overwrites what is there."""
        folder = self.folder / "torch"
        if self.mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
        return folder

    def time_steps(self, mode: str, steps: int) -> dict[str, float]:
        """Steps with a save after the first of them; the time of all, of the call, and until the save was over."""
        dist.barrier()
        start = time.perf_counter()
        self.step()
        begun = time.perf_counter()
        finish = self.begin[mode]()
        called = time.perf_counter()
        for _ in range(steps - 1):
            self.step()
        finish()
        dist.barrier()
        end = time.perf_counter()
        return {"all_s": end - start, "call_s": called - begun}

    def time_save(self, mode: str) -> float:
        """A save while nothing else is done."""
        dist.barrier()
        start = time.perf_counter()
        self.begin[mode]()()
        dist.barrier()
        return time.perf_counter() - start

    def time_load(self, mode: str) -> float:
        """A load of what was saved last."""
        newest = sorted(checkpoint_folder(self.trainer.run).iterdir())[-1]
        dist.barrier()
        start = time.perf_counter()
        if mode == "plait":
            resume(self.trainer, newest, IDENTITY)
        else:
            dcp.load(self.local, checkpoint_id=self.folder / "torch")
        dist.barrier()
        return time.perf_counter() - start


def measure(folder: Path, width: int, layers: int, rounds: int, steps: int) -> dict[str, Any]:
    """Measure all modes on this rank."""
    warnings.simplefilter("ignore")  # torch's, of folders that exist
    bench = Bench(folder, width, layers)
    for mode in bench.begin:  # memory for copies is made once
        bench.time_steps(mode, 2)
    found: dict[str, dict[str, list[float]]] = {mode: {} for mode in bench.begin}
    for _ in range(rounds):
        base_s = bench.time_steps("none", steps)["all_s"]
        found["none"].setdefault("step_s", []).append(base_s / steps)
        for mode in list(bench.begin)[1:]:
            times = bench.time_steps(mode, steps)
            values = {"stall_s": times["all_s"] - base_s, "call_s": times["call_s"], "save_s": bench.time_save(mode)}
            if mode in {"plait", "torch"}:
                values["load_s"] = bench.time_load(mode)
            for name, value in values.items():
                found[mode].setdefault(name, []).append(value)
    newest = sorted(checkpoint_folder(bench.trainer.run).iterdir())[-1]
    return {
        "checkpoint_bytes": sum(path.stat().st_size for path in newest.iterdir()),
        "tensor_bytes": sum(tensor.nbytes for tensor in bench.local.values()),
        "modes": {
            mode: {name: statistics.median(each) for name, each in times.items()} for mode, times in found.items()
        },
        "rounds": found,
    }


def main() -> None:
    """Measure, write the result and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="steps of each mode in a round")
    parser.add_argument("--folder", type=Path, help="where to save; on the disk that is to be measured")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    machine = describe_machine()  # first, so that the load average is that of others
    sizes = {"width": arguments.width, "layers": arguments.layers}
    counts = {"rounds": arguments.rounds, "steps": arguments.steps}
    with TemporaryDirectory(dir=arguments.folder) as folder, LocalRanks(TP, timeout_s=300, device_type="cpu") as ranks:
        results = ranks.call(measure, folder=Path(folder), **sizes, **counts)[0]
    head = {"what": __doc__.partition("\n")[0], "machine": machine, "model": {**sizes, "tp": TP}, **counts}
    arguments.out.write_text(json.dumps({**head, "results": results}, indent=2) + "\n")
    print(f"{results['checkpoint_bytes'] / 1e6:.0f} MB, a step takes {results['modes']['none']['step_s']:.3f} s")
    for mode, times in list(results["modes"].items())[1:]:
        print(f"{mode:12} " + ", ".join(f"{name} {value:.3f}" for name, value in times.items()))


def describe_machine() -> dict[str, Any]:
    """Where and when this was measured."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "cpu": cpu.partition(":")[2].strip() or platform.processor(),
        "cores": os.cpu_count(),
        "threads_per_process": 1,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "date": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main()
