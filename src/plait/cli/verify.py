"""`plait verify`: compare a sharded model with the unsharded one."""

import json
import sys
from collections.abc import Sequence

import click
from rich.console import Console

from plait.cli.arguments import json_option, overrides_argument, source_argument
from plait.comm.launch import LocalRanks
from plait.config.load import load_training_config
from plait.config.recipe import NAMES
from plait.config.run import AnyRun, FineTuneConfig, RunConfig
from plait.errors import ConfigError
from plait.train.build import check_model
from plait.verify.finetune.parity import check_directory_parity
from plait.verify.finetune.twin import run_twin
from plait.verify.report import Report
from plait.verify.runtime.memory import check_directory_memory, check_memory
from plait.verify.runtime.parity import build_reference, check_parity
from plait.verify.table import build_table

_DEFAULTS = (
    "precision.compute=float32",
    "train.micro_batch_size=2",
    "parallel.dp_replicate=1",
)
"""What a verification runs unless overridden: small, and in a precision in which errors cannot hide."""

_ANY_MICRO_BATCHES = ("pipeline.schedule=gpipe", "pipeline.stages_per_rank=1")
"""A pipeline that takes any number of micro-batches, as long as it is not known how many ranks it has."""

_DEFAULT_TP = 2

_DEFAULT_SEQ_LEN = 32

_TABLE_COLUMNS = 120
"""Width of the table where stdout is not a terminal."""


@click.command("verify")
@source_argument
@overrides_argument
@click.option("--tp", type=int, help="Tensor-parallel degree [default: that of the run; of a run on one rank 2]")
@click.option("--no-sequence-parallel", is_flag=True, help="Keep all tokens on every rank between the linears")
@click.option("--quantization", type=click.Choice(NAMES), help="Precision recipe [default: that of the run]")
@json_option
def command(
    source: str,
    overrides: Sequence[str],
    tp: int | None,
    no_sequence_parallel: bool,
    quantization: str | None,
    as_json: bool,
) -> int:
    """Run the step of `plait train` on local ranks and compare every number with the unsharded model in float64.

    Every rank of the mesh runs here, and the unsharded model is given the sequences of all of them. Logits, loss,
    every gradient, the gradient norm and the updated parameters must be within a stated error budget; linear regions
    on small integers and replicas must be equal bit for bit; the collectives issued must be those of the contract, and
    the messages moved those of the schedules. Runs in float32, on micro-batches of 2 sequences of at most 32 tokens, of
    which each data-parallel rank takes one, or as many as the pipeline has ranks, unless overridden. Exit status 0 only
    if all holds.

    Under a precision recipe the unsharded model has it too, and both compute in float64 but for the quantizers:
    sharding may change no quantized value. What the recipe does, against the unquantized model, is stated beside it.

    With model.path=DIR the step is the first of a fine-tuning of that Hugging Face directory: its weights have to be
    loaded bit for bit, the unsharded model is that of transformers, and the collectives compared are those over every
    axis but tp.
    """
    recipe = [f"quantization.recipe={quantization}"] if quantization is not None else []
    config = _load_config(source, [*overrides, *recipe], tp, no_sequence_parallel)
    report = _verify_directory(config) if isinstance(config, FineTuneConfig) else _verify(config)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else _TABLE_COLUMNS).print(build_table(report))
    return 0 if report.passed else 1


def _verify(config: RunConfig) -> Report:
    check_memory(config)
    with _start_ranks(config) as ranks:
        _tell("running the unsharded model, in float64 and reordered")
        reference = build_reference(config)
        _tell("running the sharded model")
        return check_parity(config, ranks, reference)


def _verify_directory(config: FineTuneConfig) -> Report:
    if config.quantization.resolved is not None:
        raise ConfigError(
            f"verify: quantization.recipe = {config.quantization.recipe!r}: a directory is verified without one",
            hint="leave it out, or verify a model of our own under it",
        )
    check_model(config)
    check_directory_memory(config)
    with _start_ranks(config) as ranks:
        _tell("running the model as transformers does, in float64 and reordered")
        twin = run_twin(config)
        _tell("running the sharded model")
        return check_directory_parity(config, ranks, twin)


def _start_ranks(config: AnyRun) -> LocalRanks:
    world_size = config.parallel.mesh_shape.world_size
    _tell(f"starting {world_size} ranks")
    return LocalRanks(world_size, timeout_s=config.train.timeout_s, device_type="cpu")


def _load_config(
    source: str, overrides: Sequence[str], tp: int | None, no_sequence_parallel: bool
) -> RunConfig | FineTuneConfig:
    asked = [*_DEFAULTS, *overrides]
    asked += [f"parallel.tp={tp}"] if tp is not None else []
    asked += ["parallel.sequence_parallel=false"] if no_sequence_parallel else []
    config = load_training_config(source, [*asked, *_ANY_MICRO_BATCHES])
    asked.insert(0, f"train.gradient_accumulation={config.parallel.pp}")
    if "tp" not in config.parallel.model_fields_set and config.parallel.mesh_shape.world_size == 1:
        asked.append(f"parallel.tp={_DEFAULT_TP}")
    if not any(override.startswith("train.seq_len=") for override in overrides):
        asked.append(f"train.seq_len={min(config.seq_len, _DEFAULT_SEQ_LEN)}")
    config = load_training_config(source, asked)
    return config if "name" in config.model_fields_set else config.model_copy(update={"name": source})


def _tell(what: str) -> None:
    click.echo(what, err=True)
