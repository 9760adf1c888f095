"""`plait explain linear MxKxN`: one linear at several degrees, cut by columns and by rows."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

import click

from plait.cli.arguments import json_option
from plait.cli.explain.show import (
    Heading,
    Part,
    Table,
    format_moves,
    format_owners,
    format_payloads,
    format_shape,
    print_all,
)
from plait.config.recipe import NAMES
from plait.contract.op import Op
from plait.contract.report.linear import (
    DeclaredLayout,
    LinearCase,
    LinearKind,
    LinearShape,
    derive_linear_cases,
    list_declarations,
)
from plait.contract.report.precision import derive_intensity
from plait.contract.report.record import build_op_record
from plait.contract.report.tally import count_collectives
from plait.contract.report.tile import list_tile_problems, summarize_tile_problems
from plait.contract.step import list_gemms, list_moves, sum_flops
from plait.dtype import DType, width_bytes
from plait.errors import ConfigError
from plait.sharding import MAX_TP
from plait.units import format_bytes, format_flops

if TYPE_CHECKING:
    from plait.config.quantization import QuantizationConfig

_LAYOUTS = click.Choice([layout.value for layout in DeclaredLayout])
_FLOATS = [dtype for dtype in get_args(DType) if "float" in dtype]
_SIZE = r"0*[1-9]\d{0,8}"


class _Shape(click.ParamType[LinearShape]):
    """`8192x8192x32768`."""

    name = "MxKxN"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> LinearShape:
        """Three positive sizes."""
        if not re.fullmatch(rf"{_SIZE}x{_SIZE}x{_SIZE}", str(value)):
            raise ConfigError(
                f'"{value}" is not a shape MxKxN of three positive sizes of at most 9 digits',
                hint="X[M, K] @ W[K, N]: plait explain linear 8192x8192x32768",
            )
        return LinearShape(*map(int, value.split("x")))


class _Degrees(click.ParamType[list[int]]):
    """`1,2,4,8`."""

    name = "degrees"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Distinct positive numbers."""
        if not re.fullmatch(rf"{_SIZE}(,{_SIZE})*", str(value)):
            raise ConfigError(f'--degrees "{value}" is not a list of degrees', hint="as in --degrees 1,2,4,8")
        degrees = list(dict.fromkeys(map(int, value.split(","))))
        if max(degrees) > MAX_TP:
            raise ConfigError(f"--degrees {max(degrees)} is more than the {MAX_TP} ranks that may share a layer")
        return degrees


@click.command("linear")
@click.argument("shape", type=_Shape(), metavar="MxKxN")
@click.option("--degrees", type=_Degrees(), default="1,2,4,8", show_default=True, help="Tensor-parallel degrees")
@click.option("--dtype", type=click.Choice(_FLOATS), default="bfloat16", show_default=True)
@click.option("--input", "source", type=_LAYOUTS, help="How X arrives [default: as between transformer layers]")
@click.option("--output", "target", type=_LAYOUTS, help="How Y leaves [default: as between transformer layers]")
@click.option("--quantization", type=click.Choice(NAMES), default="none", show_default=True, help="Precision recipe")
@json_option
def command(
    shape: LinearShape,
    degrees: list[int],
    dtype: DType,
    source: str | None,
    target: str | None,
    quantization: str,
    as_json: bool,
) -> None:
    """Explain Y[M, N] = X[M, K] @ W[K, N] over M tokens, with W cut by columns and by rows.

    For each degree: local shapes, who owns what, the collective at each boundary forward and backward with its bytes,
    FLOPs, arithmetic intensity, and whether the local GEMMs still fill efficient tiles. A column-parallel linear leaves
    Y feature-sharded for a row-parallel one to take, unless --input or --output say otherwise.
    """
    ends = DeclaredLayout(source) if source else None, DeclaredLayout(target) if target else None
    recipe = _load_recipe(quantization)
    cases = {
        kind: [
            derive_linear_cases(shape, degrees, declared, dtype, recipe) for declared in list_declarations(kind, *ends)
        ]
        for kind in LinearKind
    }
    if as_json:
        listed = [case for each in cases.values() for row in each for case in row]
        click.echo(json.dumps({"quantization": quantization} | _build_record(shape, dtype, listed)))
        return
    print_all(_describe(shape, dtype, cases))


def _load_recipe(name: str) -> "QuantizationConfig | None":
    """Sections are only imported for a recipe: without one, that would take most of the time."""
    if name == "none":
        return None
    from plait.config.quantization import QuantizationConfig  # noqa: PLC0415

    return QuantizationConfig.model_validate(name)


def _build_record(shape: LinearShape, dtype: DType, cases: Sequence[LinearCase]) -> dict[str, Any]:
    return {
        "m": shape.m,
        "k": shape.k,
        "n": shape.n,
        "dtype": dtype,
        "dims": {"T": shape.m, "K": shape.k, "N": shape.n},
        "cases": [
            {
                "cut": case.declaration.kind,
                "input": case.declaration.source,
                "output": case.declaration.target,
                "tp": case.tp,
                "ranks": [
                    {"rank": setting.rank, **build_op_record(op, setting)}
                    for setting, op in zip(case.settings, case.ops, strict=True)
                ],
            }
            for case in cases
        ],
    }


def _describe(shape: LinearShape, dtype: DType, cases: dict[LinearKind, list[list[LinearCase]]]) -> Iterator[Part]:
    sizes = {"X": shape.m * shape.k, "W": shape.k * shape.n, "Y": shape.m * shape.n}
    listed = ", ".join(f"{name} {format_bytes(size * width_bytes(dtype))}" for name, size in sizes.items())
    yield f"Y[M, N] = X[M, K] @ W[K, N], M {shape.m}, K {shape.k}, N {shape.n}, {dtype}: {listed}"
    recipe = cases[LinearKind.COLUMN][0][0].settings[0].recipe
    if recipe is not None:
        yield f"{recipe.name}: " + ", ".join(f"{name} {operand}" for name, operand in recipe.operands.items())
    for kind, layouts in cases.items():
        along = "N, the columns of Y" if kind is LinearKind.COLUMN else "K, over which Y is summed"
        yield Heading(f"\n{kind} parallel: W is cut along {along}\n")
        yield _build_rank_table(layouts[0])
        yield from _list_tile_notes(layouts[0])
        for row in layouts:
            yield Heading(f"\n{row[0].declaration}\n")
            yield _build_boundary_table(row)


def _build_rank_table(cases: Sequence[LinearCase]) -> Table:
    """What does not depend on the layouts outside; of rank 0, which holds the most."""
    numbers = ("tp", "forward", "backward", "FLOP/B")
    owned = f"{'columns' if cases[0].declaration.kind is LinearKind.COLUMN else 'rows'} of W owned"
    table = Table(("tp", "W per rank", owned, "forward", "backward", "FLOP/B", "tiles"), right=numbers)
    for case in cases:
        op = case.ops[0]
        own = op.parameters[0].ownership
        gemms = list_gemms((*op.forward, *op.backward))
        table.add_row(
            str(case.tp),
            format_shape(own.local_shape(0)[::-1]),
            format_owners(own.split),
            format_flops(sum_flops(op.forward)),
            format_flops(sum_flops(op.backward)),
            f"{derive_intensity(op, gemms[0], case.settings[0].dtype):.4g}",
            "below" if any(list_tile_problems(gemm) for gemm in gemms) else "ok",
        )
    return table


def _list_tile_notes(cases: Sequence[LinearCase]) -> Iterator[str]:
    for case in cases:
        gemms = list_gemms((*case.ops[0].forward, *case.ops[0].backward))
        notes = summarize_tile_problems(problem for gemm in gemms for problem in list_tile_problems(gemm))
        yield from (f"tp {case.tp}: {note}" for note in notes)


def _build_boundary_table(cases: Sequence[LinearCase]) -> Table:
    columns = ("tp", "X per rank", "Y per rank", "forward", "backward", "bytes", "sent/rank")
    table = Table(columns, right=("tp", "sent/rank"))
    for case in cases:
        op = case.ops[0]
        x, y = (tensor.layout.local_shape(0) for tensor in (op.inputs[0], op.outputs[0]))
        moves = list_moves((*op.forward, *op.backward))
        table.add_row(
            str(case.tp),
            format_shape(x),
            format_shape(y),
            *(_format_as_formula(op, phase) for phase in ("forward", "backward")),
            format_payloads(moves),
            format_bytes(count_collectives(move.collective for move in moves).sent_bytes),
        )
    return table


def _format_as_formula(op: Op, phase: str) -> str:
    """With X and Y as in the formula above the tables."""
    moves = format_moves(list_moves(getattr(op, phase)))
    return re.sub(r"\b(d?)([xy])\b", lambda found: found[1] + found[2].upper(), moves)
