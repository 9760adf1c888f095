"""`plait explain MODEL`: a block and the ends of a model, with and without sequence parallelism."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from plait.cli.arguments import json_option, overrides_argument, source_argument
from plait.cli.explain import tables
from plait.cli.explain.context import build_context_record, describe_context
from plait.cli.explain.ops import build_op_table
from plait.cli.explain.pipeline import build_stage_record, build_stage_table, list_stage_notes
from plait.cli.explain.precision import build_sent_table, describe_precision, list_sent_notes
from plait.cli.explain.show import Heading, Part, print_all
from plait.config.load import load_run_config
from plait.config.recipe import NAMES
from plait.config.run import RunConfig
from plait.contract.model import ModelContract
from plait.contract.report.pipeline import build_pipeline_report
from plait.contract.report.precision import MASTER
from plait.contract.report.record import build_count_record, build_op_record, build_tally_record
from plait.contract.report.sent import build_sent
from plait.contract.report.tally import build_tally
from plait.contract.report.training import build_step_tally
from plait.contract.training import derive_run_model
from plait.errors import ConfigError
from plait.sharding import AXES


@click.command("model")
@source_argument
@overrides_argument
@click.option("--tp", type=int, help="Tensor-parallel degree [default: parallel.tp of the run]")
@click.option("--block", type=int, help="Explain this block alone")
@click.option("--quantization", type=click.Choice(NAMES), help="Precision recipe [default: that of the run]")
@json_option
def command(
    source: str, overrides: Sequence[str], tp: int | None, block: int | None, quantization: str | None, as_json: bool
) -> None:
    """Explain a model: what one rank holds, computes and sends.

    For each operation of a block and of the model's ends: layouts in and out, the weight of a rank, the collectives
    forward and backward with their bytes; then who owns which indices, FLOPs, arithmetic intensity, tile sizes, and
    totals with and without sequence parallelism. Overrides set the batch: train.micro_batch_size=4 train.seq_len=2048.

    Under a precision recipe also: in which number format each GEMM reads, sums and writes and each collective carries,
    what scales weigh, and what is saved.
    """
    options = {"parallel.tp": tp, "quantization.recipe": quantization}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    run = load_run_config(source, [*overrides, *given])
    if block is not None and not 0 <= block < run.model.num_layers:
        raise ConfigError(
            f"--block {block} is not a block of {source}", hint=f"blocks are 0 to {run.model.num_layers - 1}"
        )
    name = run.name if "name" in run.model_fields_set else source
    modes = _list_modes(run)
    if as_json:
        click.echo(json.dumps(_build_record(name, modes, block)))
        return
    flops = _list_rank_flops(run, block)
    busiest = flops.index(max(flops))
    print_all(_describe(name, [(mode, _derive(mode, busiest, block)) for mode in modes], block))
    print_all(tables.list_balance_notes(flops))


def _list_modes(run: RunConfig) -> list[RunConfig]:
    """The run, and the same in the other mode; a single rank has no modes."""
    other = run.parallel.model_copy(update={"sequence_parallel": not run.parallel.sequence_parallel})
    return [run] if run.parallel.tp == 1 else [run, run.model_copy(update={"parallel": other})]


def _derive(run: RunConfig, rank: int, block: int | None) -> ModelContract:
    return derive_run_model(run, rank, block=block or 0)


def _list_rank_flops(run: RunConfig, block: int | None) -> list[int]:
    """FLOPs of every rank in the block, or in a micro-batch of the whole model."""
    first = _derive(run, 0, block)
    splits = [output.layout.split for op in (*first.block, *first.exit) for output in op.outputs]
    if all(split is None or split.is_even for split in splits):
        return [0] * run.parallel.tp
    steps = [build_step_tally(run, _derive(run, rank, block)) for rank in range(run.parallel.tp)]
    return [step.micro_batch.flops if block is None else step.block.flops for step in steps]


def _describe(name: str, modes: Sequence[tuple[RunConfig, ModelContract]], block: int | None) -> Iterator[Part]:
    setting = modes[0][1].setting
    where = f"rank {setting.rank} of {setting.tp}, {setting.batch} x {setting.seq_len} tokens, {setting.dtype}"
    if setting.sum_dtype != setting.dtype:
        where += f", sums in {setting.sum_dtype}"
    if setting.sequences is not None:
        where += f", cp rank 0 of {setting.sequences.order.degree} with {setting.num_own_tokens} of each sequence"
    if setting.recipe is not None:
        where += f", {setting.recipe.name}"
    part = name if block is None else f"{name}, block {block}"
    for mode, contract in modes if block is None else modes[:1]:
        yield Heading(f"{part}: {tables.name_mode(mode)}, {where}\n")
        yield build_op_table(contract, block)
        yield ""
    run, contract = modes[0]
    ops = (*contract.block, *contract.exit) if block is None else contract.find_block(block)
    yield tables.build_dims_table(contract, block)
    yield ""
    if any(op.recipe for op in ops):
        yield from describe_precision(run, contract, ops)
        yield ""
    yield from describe_context(run, contract)
    if block is None:
        yield tables.build_gemm_table(contract)
        yield from tables.list_notes(ops)
        yield ""
        report = build_pipeline_report(run, contract)
        tallies = [(mode, build_step_tally(mode, each, report.busiest)) for mode, each in modes]
        yield tables.build_step_table(tallies, report.busiest)
        yield from tables.list_step_notes(run, contract, report.busiest)
        yield from tables.list_checkpoint_notes(run, tallies[0][1].num_parameters)
        if run.parallel.pp > 1:
            yield ""
            yield build_stage_table(report)
            yield from list_stage_notes(report)
        if setting.recipe is not None:
            yield ""
            yield build_sent_table(run, contract)
            yield from list_sent_notes(run)
    else:
        yield tables.build_block_table([(mode, build_tally(each.find_block(block))) for mode, each in modes])
        yield from tables.list_notes(ops)


def _build_record(name: str, modes: Sequence[RunConfig], block: int | None) -> dict[str, Any]:
    run = modes[0]
    return {
        "model": name,
        "config": run.model.model_dump(),
        **{axis: getattr(run.parallel, axis) for axis in reversed(AXES)},
        "micro_batch_size": run.train.micro_batch_size,
        "seq_len": run.seq_len,
        "gradient_accumulation": run.train.gradient_accumulation,
        "dtype": run.precision.compute,
        "reduce_dtype": run.precision.reduce_dtype,
        "master_dtype": MASTER,
        "quantization": _build_recipe_record(run),
        "context": build_context_record(_derive(run, 0, None)),
        "num_layers": run.model.num_layers,
        "block": block,
        "modes": [
            {
                "sequence_parallel": mode.parallel.sequence_parallel,
                "ranks": [_build_rank_record(mode, rank, block) for rank in range(mode.parallel.tp)],
            }
            for mode in modes
        ],
    }


def _build_recipe_record(run: RunConfig) -> dict[str, Any] | None:
    """The recipe in full, and which blocks it does not hold for."""
    recipe, contract = run.quantization.resolved, _derive(run, 0, None)
    if recipe is None:
        return None
    kept = [index for index in range(run.model.num_layers) if contract.is_kept(index)]
    return asdict(recipe) | {"layers": run.quantization.layers, "head": run.quantization.head, "kept_blocks": kept}


def _build_rank_record(run: RunConfig, rank: int, block: int | None) -> dict[str, Any]:
    contract = _derive(run, rank, block)
    setting = contract.setting
    ops = contract.block if block is None else contract.find_block(block)
    record = {
        "rank": rank,
        "block": [build_op_record(op, setting) for op in ops],
        "block_totals": build_tally_record(build_tally(ops)),
    }
    if block is not None:
        return record
    report = build_pipeline_report(run, contract)
    step = build_step_tally(run, contract, report.busiest)
    if setting.recipe is not None:
        record["kept_block"] = [build_op_record(op, setting) for op in contract.kept_block]
    return record | {
        "entry": [build_op_record(op, setting) for op in contract.entry],
        "exit": [build_op_record(op, setting) for op in contract.exit],
        "loss": build_op_record(contract.loss, setting),
        "micro_batch_totals": build_tally_record(step.micro_batch),
        "step": {
            "num_parameters": step.num_parameters,
            "state_bytes": step.state_bytes,
            "flops": step.flops,
            "collectives": build_count_record(step.collectives),
            "saved_bytes_per_block": step.block.saved_bytes,
            "saved_bytes": step.micro_batch.saved_bytes,
            "sent_bytes": asdict(build_sent(run, contract, report.busiest)),
        },
        **({"pipeline": build_stage_record(report)} if run.parallel.pp > 1 else {}),
    }
