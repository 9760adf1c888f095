"""The tables of `plait explain MODEL` beside that of the operations: dims, GEMMs, totals."""

from collections.abc import Iterable, Iterator, Sequence

from plait.cli.explain.show import NOTHING, Table, format_owners
from plait.config.run import RunConfig
from plait.contract.axis.fsdp import count_moves
from plait.contract.model import ModelContract
from plait.contract.op import Op
from plait.contract.report.precision import derive_intensity
from plait.contract.report.tally import CollectiveTally, Tally, count_collectives
from plait.contract.report.tile import list_tile_problems, summarize_tile_problems
from plait.contract.report.training import StepTally
from plait.contract.step import Gemm, list_gemms
from plait.dtype import width_bytes
from plait.sharding import Shard
from plait.units import format_bytes, format_flops, format_si

_MEANINGS = {
    "T": "tokens",
    "D": "model width",
    "N*H": "query heads x head width",
    "K*H": "key/value heads x head width",
    "F": "MLP width",
    "V": "vocabulary",
    "S": "positions",
}

_SAVED_BYTES = 12
"""Of each parameter in a checkpoint: the float32 master and both moments."""


def name_mode(run: RunConfig) -> str:
    """What the run does with the tokens between the parallel regions."""
    if run.parallel.tp == 1:
        return "not parallel" if run.parallel.mesh_shape.world_size == 1 else "tp = 1"
    return "sequence parallel" if run.parallel.sequence_parallel else "all-reduce mode"


def build_dims_table(contract: ModelContract, block: int | None) -> Table:
    """The letters, and which indices of each dim the ranks own."""
    ops = contract.find_block(block) if block is not None else (*contract.entry, *contract.block, *contract.exit)
    layouts = [tensor.layout for op in ops for tensor in op.inputs]
    layouts += [parameter.layout for op in ops for parameter in op.parameters]
    sizes = {letter: size for layout in layouts for letter, size in zip(layout.dims, layout.shape, strict=True)}
    splits = {layout.dims[cut.dim]: layout.split for layout in layouts if isinstance(cut := layout.placement, Shard)}
    table = Table(("dim", "", "size", f"owned by ranks 0 to {contract.setting.tp - 1}"), right=("size",))
    for letter, meaning in _MEANINGS.items():
        if letter in sizes:
            table.add_row(letter, meaning, str(sizes[letter]), format_owners(splits.get(letter)))
    return table


def build_gemm_table(contract: ModelContract) -> Table:
    """Sizes, FLOPs and arithmetic intensity of what a rank multiplies."""
    numbers = ("forward", "backward", "FLOP/B")
    table = Table(("GEMM", "[m, k] @ [k, n]", *numbers, "tiles"), right=numbers)
    for op in (*contract.block, *contract.exit):
        for gemm in list_gemms(op.forward):
            backward = [each for each in list_gemms(op.backward) if each.name == gemm.name]
            table.add_row(
                gemm.name.rpartition(".")[2],
                f"{f'{gemm.count} x ' if gemm.count > 1 else ''}[{gemm.m}, {gemm.k}] @ [{gemm.k}, {gemm.n}]",
                format_flops(gemm.flops),
                format_flops(sum(each.flops for each in backward)),
                f"{derive_intensity(op, gemm, contract.setting.dtype):.4g}",
                _judge_tiles((gemm, *backward)) if op.parameters else NOTHING,
            )
    return table


def _judge_tiles(gemms: Iterable[Gemm]) -> str:
    return "below" if any(list_tile_problems(gemm) for gemm in gemms) else "ok"


def build_block_table(modes: Sequence[tuple[RunConfig, Tally]]) -> Table:
    """Totals of a block, mode beside mode."""
    table = Table(("block, per rank", *(name_mode(run) for run, _ in modes)))
    lines = {
        "forward": [str(tally.forward) for _, tally in modes],
        "backward": [str(tally.backward) for _, tally in modes],
        "sent": [format_bytes(tally.forward.sent_bytes + tally.backward.sent_bytes) for _, tally in modes],
        "kept for backward": [format_bytes(tally.saved_bytes) for _, tally in modes],
        "computed": [format_flops(tally.flops) for _, tally in modes],
    }
    for line, cells in lines.items():
        table.add_row(line, *cells)
    return table


def build_step_table(modes: Sequence[tuple[RunConfig, StepTally]], pp_rank: int = 0) -> Table:
    """Totals of a step, mode beside mode; of a pipeline those of one pp rank."""
    which = f"pp rank {pp_rank}" if modes[0][0].parallel.pp > 1 else "per rank"
    table = Table((f"step, {which}", *(name_mode(run) for run, _ in modes)))
    tallies = [tally for _, tally in modes]
    lines = {
        "parameters": [_format_parameters(tally.num_parameters, modes[0][0]) for tally in tallies],
        "computed": [format_flops(tally.flops) for tally in tallies],
        "collectives": [str(tally.collectives) for tally in tallies],
        "carried": [format_bytes(tally.collectives.payload_bytes) for tally in tallies],
        "sent": [format_bytes(tally.collectives.sent_bytes) for tally in tallies],
        "kept per block": [format_bytes(tally.block.saved_bytes) for tally in tallies],
        "kept in all": [format_bytes(tally.micro_batch.saved_bytes) for tally in tallies],
        "state": [format_bytes(tally.state_bytes) for tally in tallies],
        "in memory": [format_bytes(tally.state_bytes + tally.micro_batch.saved_bytes) for tally in tallies],
    }
    for line, cells in lines.items():
        table.add_row(line, *cells)
    return table


def list_step_notes(run: RunConfig, contract: ModelContract, pp_rank: int = 0) -> Iterator[str]:
    """What is computed twice, what a step is made of, and what it moves of parameters that are shared out."""
    if run.train.recompute != "none":
        what = "the core of attention" if run.train.recompute == "selective" else "every block but its last linear"
        yield f"train.recompute = {run.train.recompute}: backward computes {what} again, which is counted"
    repeats, dp = run.train.gradient_accumulation, run.parallel.dp
    if repeats * dp > 1:
        where = f" on each of {dp} dp ranks" if dp > 1 else ""
        yield f"a step has {repeats} micro-batch{'es' if repeats > 1 else ''}{where}: {run.tokens_per_step} tokens"
    yield from _list_sharding_notes(run, contract, pp_rank)


def list_checkpoint_notes(run: RunConfig, num_parameters: int) -> Iterator[str]:
    """What a save that goes on while training does takes of the memory of the host, where there is one."""
    if run.train.async_checkpoint:
        shards = run.parallel.dp_shard * run.parallel.cp if run.parallel.dp_shard > 1 else 1
        copied = format_bytes(_SAVED_BYTES * num_parameters / shards)
        yield f"train.async_checkpoint: a save copies {copied} of a rank to memory of the CPU, which stays taken"


def _list_sharding_notes(run: RunConfig, contract: ModelContract, pp_rank: int) -> Iterator[str]:
    """What a rank keeps of parameters that are shared out, and what it moves for them over each axis."""
    shape = run.parallel.mesh_shape
    if shape.dp_shard == 1:
        return
    degree, over = shape.degree("dp_shard_cp"), "dp_shard and cp" if shape.cp > 1 else "dp_shard"
    yield f"parameters, gradients and optimizer state are shared out over {over}: between steps a rank keeps 1/{degree}"
    if shape.pp > 1:
        yield "its stages are gathered once a step, and whole until that is done, as are their gradients"
    by_axis: dict[str, CollectiveTally] = {}
    for collective, times in count_moves(run, contract, pp_rank):
        tally = count_collectives([collective]) * times
        by_axis[collective.axis] = by_axis[collective.axis] + tally if collective.axis in by_axis else tally
    for axis, tally in by_axis.items():
        yield f"for them a step moves over {axis}: {tally}, {format_bytes(tally.sent_bytes)} sent"


def _format_parameters(number: int, run: RunConfig) -> str:
    return f"{format_si(number, '')} ({format_bytes(number * width_bytes(run.precision.compute))})"


def list_balance_notes(flops: Sequence[int]) -> Iterator[str]:
    """How much the busiest rank does beyond its share."""
    total, most = sum(flops), max(flops)
    if most * len(flops) > total:
        yield f"rank {flops.index(most)} computes {most * len(flops) / total:.2f} times the average of the ranks"


def list_notes(ops: Iterable[Op]) -> Iterator[str]:
    """What keeps GEMMs of linears from efficient tiles."""
    for op in ops:
        if op.parameters:
            gemms = list_gemms((*op.forward, *op.backward))
            problems = [problem for gemm in gemms for problem in list_tile_problems(gemm)]
            yield from (f"{op.name.rpartition('.')[2]}: {note}" for note in summarize_tile_problems(problems))
