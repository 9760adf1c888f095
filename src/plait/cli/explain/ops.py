"""The table of operations of `plait explain MODEL`: layouts, weights, collectives, bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest

from plait.cli.explain.show import NOTHING, Table, format_moves, format_payloads, format_shape
from plait.contract.model import ModelContract
from plait.contract.op import Op
from plait.contract.parameter import Parameter
from plait.contract.setting import Tensor
from plait.contract.step import Messages, Move, list_moved


@dataclass(frozen=True)
class _Row:
    """An operation, or one member of a gather group; the group's collectives are shared out over its members."""

    name: str
    source: str = ""
    target: str = ""
    weights: Sequence[str] = ()
    forward: Sequence[Move | Messages] = ()
    backward: Sequence[Move | Messages] = ()

    @property
    def is_heading(self) -> bool:
        return not self.target


def build_op_table(contract: ModelContract, block: int | None) -> Table:
    """A row for each linear, norm, ...; in a narrow terminal forward and backward stand below each other."""
    rows = list(_list_rows(contract, block))
    return _build_wide(rows)


def _list_rows(contract: ModelContract, block: int | None) -> Iterator[_Row]:
    rank = contract.setting.rank
    if block is not None:
        yield from (row for op in contract.find_block(block) for row in _split_op(op, rank, ""))
        return
    yield from (row for op in contract.entry for row in _split_op(op, rank, ""))
    for title, ops in _list_kinds(contract):
        yield _Row(title)
        yield from (row for op in ops for row in _split_op(op, rank, "  "))
    yield from (row for op in (*contract.exit, contract.loss) for row in _split_op(op, rank, ""))


def _list_kinds(contract: ModelContract) -> Iterator[tuple[str, Sequence[Op]]]:
    """Blocks that promise the same, those that are quantized first."""
    last, setting = contract.config.num_layers - 1, contract.setting
    kept = [index for index in range(last + 1) if contract.is_kept(index)]
    if setting.recipe is None:
        yield f"layers.0 to {last}", contract.block
        return
    quantized = [index for index in range(last + 1) if index not in kept]
    if quantized:
        yield f"layers.{_format_indices(quantized)}: {setting.recipe.name}", contract.block
    if kept:
        yield f"layers.{_format_indices(kept)}: {setting.dtype}", contract.kept_block


def _format_indices(indices: Sequence[int]) -> str:
    """`0, 30 to 31`: runs of them."""
    runs = [[index for _, index in run] for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _split_op(op: Op, rank: int, indent: str) -> Iterator[_Row]:
    names = op.name.rpartition(".")[2].split("|")
    weights = _list_weights(op, rank) or [()]
    again = [replace(move, tensor=f"{move.tensor} again") for move in list_moved(op.again)]
    forward = _spread(list_moved(op.forward), names)
    backward = _spread([*again, *list_moved(op.backward)], names)
    for index, name in enumerate(names):
        target = _format_tensors(op.outputs[index : index + 1])
        yield _Row(indent + name, _format_tensors(op.inputs), target, weights[index], forward[index], backward[index])


def _spread(moves: Sequence[Move | Messages], names: Sequence[str]) -> list[Sequence[Move | Messages]]:
    """Share out what a group moves: to each member the sums of its own gradients, the rest row by row."""
    own = [[move for move in moves if move.tensor.startswith(f"d{name}")] for name in names]
    shared = [move for move in moves if not any(move in each for each in own)]
    if any(own) or len(shared) > len(names):
        return [shared + own[0], *own[1:]]
    return [shared[row : row + 1] for row in range(len(names))]


def _format_tensors(tensors: Sequence[Tensor]) -> str:
    if len(tensors) > 1 or not tensors[0].layout.dims:
        return ", ".join(tensor.name for tensor in tensors)
    return str(tensors[0].layout)


def _list_weights(op: Op, rank: int) -> list[Sequence[str]]:
    """Local shapes of the parameters of each module."""
    modules: dict[str, list[Parameter]] = {}
    for parameter in op.parameters:
        modules.setdefault(parameter.ownership.name.rpartition(".")[0], []).append(parameter)
    return [[format_shape(each.layout.local_shape(rank)) for each in both] for both in modules.values()]


def _build_wide(rows: Sequence[_Row]) -> Table:
    columns = ("op", "in -> out", "weight", "forward", "backward", "bytes")
    table = Table(columns, narrow=_build_narrow(rows))
    for row in rows:
        if row.is_heading:
            table.add_row(row.name)
            continue
        lines = list(zip_longest(row.forward, row.backward))
        table.add_row(
            row.name,
            f"{row.source} -> {row.target}",
            " + ".join(row.weights) or NOTHING,
            "\n".join(format_moves([move]) for move in row.forward) or NOTHING,
            "\n".join(format_moves([move]) for move in row.backward) or NOTHING,
            "\n".join(format_payloads(move for move in line if move) for line in lines) or NOTHING,
        )
    return table


def _build_narrow(rows: Sequence[_Row]) -> Table:
    table = Table(("op", "in\n-> out", "weight", "forward (fwd),\nbackward (bwd)", "bytes"), gap=1)
    for row in rows:
        if row.is_heading:
            table.add_row(row.name)
            continue
        moves = [*(("fwd", move) for move in row.forward), *(("bwd", move) for move in row.backward)]
        table.add_row(
            row.name,
            f"{row.source}\n-> {row.target}",
            "\n+ ".join(row.weights) or NOTHING,
            "\n".join(f"{phase} {format_moves([move])}" for phase, move in moves) or NOTHING,
            "\n".join(format_payloads([move]) for _, move in moves) or NOTHING,
        )
    return table
