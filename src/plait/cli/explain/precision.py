"""The tables of `plait explain MODEL --quantization`: what is multiplied, moved and saved in which number format."""

from collections.abc import Iterator, Sequence

from plait.cli.explain.show import NOTHING, Heading, Part, Table
from plait.config.quantization import QuantizationConfig
from plait.config.recipe import Recipe
from plait.config.run import RunConfig
from plait.contract.linear import AMAX
from plait.contract.model import ModelContract
from plait.contract.op import Op
from plait.contract.report.precision import (
    MASTER,
    Factor,
    derive_accumulator,
    derive_wire,
    list_factors,
)
from plait.contract.report.sent import build_sent
from plait.contract.report.tally import build_tally
from plait.contract.step import Move, list_gemms, list_moves
from plait.contract.training import derive_history_collectives, derive_run_model
from plait.dtype import DType
from plait.units import format_bytes

_PASSES = ("forward", "dgrad", "wgrad")


def describe_precision(run: RunConfig, contract: ModelContract, ops: Sequence[Op]) -> Iterator[Part]:
    """Formats of the GEMMs of `ops`, and of what moves for those that are quantized."""
    recipe = contract.setting.recipe
    assert recipe is not None, contract.setting
    yield Heading(f"precision: {recipe.name}, {_describe_kept(run)}\n")
    yield _build_format_table(contract, ops)
    yield from _list_scale_notes(recipe)
    table = _build_wire_table(contract, ops)
    if table.rows:
        yield ""
        yield table


def build_sent_table(run: RunConfig, contract: ModelContract) -> Table:
    """What a rank sends and keeps in a step, beside the same without a recipe."""
    plain_run = run.model_copy(update={"quantization": QuantizationConfig()})
    plain = derive_run_model(plain_run, contract.setting.rank)
    sent, before = build_sent(run, contract), build_sent(plain_run, plain)
    kept, kept_before = (build_tally(each.ops).saved_bytes for each in (contract, plain))
    table = Table(("step, per rank", run.quantization.recipe, contract.setting.dtype, "saved"), right=("saved",))
    table.add_row("quantized numbers", _format_or_nothing(sent.numbers), NOTHING)
    table.add_row("scales of blocks", _format_or_nothing(sent.scales), NOTHING)
    table.add_row("largest magnitudes", _format_or_nothing(sent.magnitudes), NOTHING)
    table.add_row("all else", _format_or_nothing(sent.others), _format_or_nothing(before.others))
    for text, one, other in (("sent", sent.total, before.total), ("kept in all", kept, kept_before)):
        table.add_row(text, format_bytes(one), format_bytes(other), f"{1 - one / other:.1%}" if other else NOTHING)
    return table


def _format_or_nothing(size: float) -> str:
    return format_bytes(size) if size else NOTHING


def list_sent_notes(run: RunConfig) -> Iterator[str]:
    """What a first step does otherwise, and what is done once a step."""
    recipe = run.quantization.resolved
    if recipe is None or not recipe.is_delayed or run.parallel.tp == 1:
        return
    histories = ", ".join(map(str, derive_history_collectives(run)))
    yield f"magnitudes for delayed scales: {histories}, once a step; before the first there are current scales"


def _describe_kept(run: RunConfig) -> str:
    quantization, last = run.quantization, run.model.num_layers - 1
    which = "linears of MLPs" if quantization.layers == "mlp_only" else "linears"
    first, final = quantization.keep_first, last - quantization.keep_last
    blocks = f"block {first}" if first == final else f"blocks {first} to {final}"
    head = " and the head" if quantization.head else ""
    return f"{which} of {blocks}{head}" if first <= final else "the head"


def _build_format_table(contract: ModelContract, ops: Sequence[Op]) -> Table:
    dtype = contract.setting.dtype
    table = Table(("GEMM", "forward x, w", "dgrad dy, w", "wgrad dy, x", "summed in", "result", "master"))
    for op in ops:
        if op.parameters and list_gemms(op.forward):
            factors = [", ".join(map(_format_factor, list_factors(op, what, dtype))) for what in _PASSES]
            table.add_row(op.name.rpartition(".")[2], *factors, derive_accumulator(dtype), dtype, MASTER)
        elif gemms := list_gemms(op.forward):
            names = "|".join(gemm.name.rpartition(".")[2] for gemm in gemms)
            table.add_row(names, *[f"{dtype}, {dtype}"] * 2, NOTHING, derive_accumulator(dtype), dtype, NOTHING)
    return table


def _format_factor(factor: Factor) -> str:
    return factor.format


def _list_scale_notes(recipe: Recipe) -> Iterator[str]:
    """What holds for the scales of the three tensors, those alike together."""
    by_text: dict[str, list[str]] = {}
    for name, operand in recipe.operands.items():
        by_text.setdefault(_SCALES[operand.scaling], []).append(name)
    for text, names in by_text.items():
        yield f"{', '.join(names)}: {text}"
    if recipe.gradient.block is not None:
        yield "what dgrad and wgrad both read travels twice, in blocks along its features and along its tokens"
    if recipe.stochastic_rounding:
        yield "gradient: rounded stochastically"
    if recipe.hadamard:
        yield "wgrad: input and gradient mixed in sixteens of tokens by a random Hadamard matrix"


_SCALES = {
    "current": "one float32 scale, by the largest magnitude of the whole tensor",
    "delayed": "one float32 scale, by the largest magnitudes of earlier steps",
    "block32": "an e8m0 scale for every 32 numbers along what a GEMM contracts",
    "block16": "an e4m3 scale for every 16 numbers along what a GEMM contracts, under one float32 scale",
}


def _build_wire_table(contract: ModelContract, ops: Sequence[Op]) -> Table:
    """A line for each collective of a quantized linear; scales and magnitudes have lines of their own."""
    dtype = contract.setting.dtype
    columns = ("collective", "pass", "of", "carries", "bytes", f"in {dtype}", "saved")
    table = Table(columns, right=columns[-3:])
    for op in ops:
        if op.recipe is not None:
            of = op.name.rpartition(".")[2]
            for phase, steps in (("forward", op.forward), ("again", op.again), ("backward", op.backward)):
                for move in list_moves(steps):
                    _add_wire_rows(table, op, move, (phase, of), dtype)
    return table


def _add_wire_rows(table: Table, op: Op, move: Move, where: tuple[str, str], dtype: DType) -> None:
    collective, wire = move.collective, derive_wire(op, move, dtype)
    name, size = f"{collective.kind} {move.tensor}", format_bytes(collective.payload_bytes)
    if move.tensor == AMAX:
        table.add_row(name, *where, collective.dtype, size, NOTHING, NOTHING)
    elif wire is None:
        table.add_row(name, *where, collective.dtype, size, size, NOTHING)
    else:
        carries = f"{wire.copies} x {wire.operand.format}" if wire.copies > 1 else wire.operand.format
        saved = wire.plain_bytes - collective.payload_bytes
        sizes = [format_bytes(each) for each in (wire.number_bytes, wire.plain_bytes, abs(saved))]
        table.add_row(name, *where, carries, *sizes[:2], f"{'-' if saved < 0 else ''}{sizes[2]}")
        if wire.scale_bytes:
            kind = _SCALE_FORMATS[wire.operand.scaling]
            table.add_row("", "", "", f"{kind} scales", format_bytes(wire.scale_bytes), NOTHING, NOTHING)


_SCALE_FORMATS = {"block32": "e8m0", "block16": "e4m3"}
