"""`plait bench overlap`: how fast it is here, against the limit."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from plait.bench.drawing import check_can_draw, save_timeline
from plait.bench.machine import describe_machine
from plait.bench.overlap import compare
from plait.bench.report import build_report, describe_comparison
from plait.bench.variant import Variant
from plait.bench.workload import WHATS, What, build_workload
from plait.cli.arguments import json_option, overrides_argument, source_argument
from plait.cli.files import list_unwritable, write_file
from plait.comm.environment import check_world_size, detect_launch
from plait.comm.launch import LocalRanks, init_from_environment
from plait.config.load import load_run_config
from plait.config.run import RunConfig
from plait.errors import ConfigError
from plait.schedule.chart import Chart
from plait.schedule.trace_file import build_trace

_DEFAULTS = ("precision.compute=float32", "parallel.dp_replicate=1")

_DEFAULT_TP = 2

_DEFAULT_TOKENS = 1024

_TABLE_COLUMNS = 120
"""Width of the table where stdout is not a terminal."""


@click.command("overlap")
@source_argument
@overrides_argument
@click.option("--what", type=click.Choice(WHATS), default="block", show_default=True, help="Part of the model")
@click.option("--tp", type=int, help="Tensor-parallel degree [default: parallel.tp of the run, or 2]")
@click.option("--tokens", type=click.IntRange(1), help="Tokens of all ranks, one sequence [default: up to 1024]")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Interleaved rounds")
@click.option("--trace", "trace_path", type=Path, help="Write one step of each as a trace for Perfetto")
@click.option("--timeline", "timeline_path", type=Path, help="Draw one step of each (.svg, .png, .pdf)")
@click.option("--out", "out_path", type=Path, help="Write everything measured as JSON")
@json_option
def command(
    source: str, overrides: Sequence[str], what: What, tokens: int | None, rounds: int, as_json: bool, **options: Any
) -> None:
    """Compare the forward and backward of a part of MODEL overlapped with the same exposed.

    Overlapped is what the config asks for, overlap=full unless it says something. It runs beside the library's
    collectives, serial point to point, and the same local work with nothing moved. What would run the same as one of
    those without overlap is refused. The rest of the model is not built. Under a precision recipe all of them quantize,
    and the receipt says what multiplies. Starts ranks on this machine, unless torchrun or Slurm has.
    """
    config = _load_config(source, overrides, options["tp"])
    launch = detect_launch(os.environ)
    check_world_size(launch, config.parallel.mesh_shape)
    trace_path, timeline_path, out_path = (options[f"{name}_path"] for name in ("trace", "timeline", "out"))
    asked = {"--trace": trace_path, "--timeline": timeline_path, "--out": out_path}
    if problems := list_unwritable({option: path for option, path in asked.items() if path is not None}):
        raise ConfigError.from_problems("bench overlap", problems)
    if timeline_path is not None:
        check_can_draw(timeline_path)
    measure: dict[str, Any] = {
        "config": config, "what": what, "num_tokens": tokens or min(_DEFAULT_TOKENS, config.model.max_seq_len),
        "rounds": rounds, "draws": trace_path is not None or timeline_path is not None,
    }  # fmt: skip
    machine = describe_machine()  # first, so that the load is that of others
    if launch.kind == "alone":
        with LocalRanks(config.parallel.tp, timeout_s=config.train.timeout_s, device_type="cpu") as ranks:
            measured, charts = ranks.call(measure_rank, **measure)[0]
    else:
        with init_from_environment(launch, config.train.timeout_s):
            measured, charts = measure_rank(**measure)
    if launch.rank != 0:
        return
    record = {"tp": config.parallel.tp, "model": source, "machine": machine, **measured}
    if out_path is not None:
        write_file(out_path, json.dumps(record, indent=2) + "\n")
    if trace_path is not None:
        write_file(trace_path, json.dumps(build_trace(charts)) + "\n")
    if timeline_path is not None:
        save_timeline(charts, timeline_path)
    if as_json:
        click.echo(json.dumps(record, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else _TABLE_COLUMNS).print(build_report(record))


def measure_rank(
    config: RunConfig, what: What, num_tokens: int, rounds: int, draws: bool
) -> tuple[dict[str, Any], tuple[Chart, ...]]:
    """Measure on this rank of the world."""
    workload = build_workload(
        what, config.model, num_tokens,
        dtype=getattr(torch, config.precision.compute), reduce_dtype=getattr(torch, config.precision.reduce_dtype),
        sequence_parallel=config.parallel.sequence_parallel, quantization=config.quantization,
    )  # fmt: skip
    asked = Variant(f"overlap={config.overlap.asked}", config.overlap)
    comparison = compare(workload, [asked], config.parallel.tp, rounds=rounds, draws=draws)
    return describe_comparison(comparison), comparison.charts


def _load_config(source: str, overrides: Sequence[str], tp: int | None) -> RunConfig:
    asked = [*_DEFAULTS, *overrides]
    if any(override.startswith(("quantization=", "quantization.recipe=")) for override in overrides):
        # One block is measured, and it is one that is quantized.
        asked = ["quantization.keep_first=0", "quantization.keep_last=0", *asked]
    asked += [f"parallel.tp={tp}"] if tp is not None else []
    config = load_run_config(source, asked)
    if "tp" not in config.parallel.model_fields_set:
        asked.append(f"parallel.tp={_DEFAULT_TP}")
    if not config.overlap.model_fields_set:
        asked.append("overlap=full")
    config = load_run_config(source, asked)
    if config.parallel.dp != 1 or config.parallel.tp == 1:
        raise ConfigError(
            f"bench overlap: parallel.dp_replicate = {config.parallel.dp}, parallel.tp = {config.parallel.tp}: what is "
            "measured is one tp group of several ranks",
            hint="--tp 2",
        )
    return config
