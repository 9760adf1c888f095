"""What FSDP moves of a model: the parameters of each unit on the way in, its gradients on the way out."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from plait.config.run import RunConfig
from plait.contract.collective import Collective
from plait.contract.model import ModelContract
from plait.contract.op import Op
from plait.contract.pipeline.stage import list_ends
from plait.contract.pipeline.step import select_run_parts
from plait.contract.recompute import list_backward
from plait.contract.step import REDUCE, list_collectives
from plait.dtype import DType
from plait.sharding import Invariant, MeshShape, Ownership, Partial, Shard, derive_transition

_GATHER = derive_transition(Shard(0), Invariant()).forward
_SCATTER = derive_transition(Partial(), Shard(0)).forward


@dataclass(frozen=True)
class Unit:
    """A block, or all that is around the blocks: gathered together, and reduced together.

    Attributes:
        gather: its parameters, in the dtype of the computation.
        reduce: its gradients, over dp_shard and cp, then over dp_replicate.
    """

    gather: tuple[Collective, ...]
    reduce: tuple[Collective, ...]


@dataclass(frozen=True)
class Units:
    """The units of a run on one rank.

    Attributes:
        block: any of the blocks: their parameters are alike.
        root: around them, as far as the rank has it; what it gathers it keeps until backward is through.
        num_blocks: of the rank.
        gathers_again: whether blocks are freed between forward and backward.
    """

    block: Unit
    root: Unit
    num_blocks: int
    gathers_again: bool


def derive_units(run: RunConfig, contract: ModelContract, pp_rank: int = 0) -> Units:
    """What is gathered and reduced as one, where `dp_shard` is more than one; of a pipeline on pp rank `pp_rank`."""
    parts = select_run_parts(run, pp_rank)
    block, root = (_derive_unit(run, contract, ops) for ops in (contract.block, list_ends(contract, parts)))
    return Units(block, root, sum(len(part.layers) for part in parts), run.parallel.frees_blocks)


def derive_shared_collectives(run: RunConfig, contracts: Sequence[ModelContract]) -> tuple[Collective, ...]:
    """What the rank issues for the micro-batches of a step, in order; gradients are reduced in the last.

    A block is gathered when it is entered; in backward when that comes to the block after it, the last at the start.
    """
    units = derive_units(run, contracts[0])
    issued: list[Collective] = []
    for index, contract in enumerate(contracts):
        issued += _list_forward_moves(contract, units)
        issued += _list_backward_moves(contract, units, is_last=index + 1 == len(contracts))
    return tuple(issued)


def derive_step_gathers(run: RunConfig, contract: ModelContract, pp_rank: int) -> tuple[Collective, ...]:
    """What a rank of a pipeline issues before the first pass of a step: all its units become whole."""
    units = derive_units(run, contract, pp_rank)
    return (*units.root.gather, *units.block.gather * units.num_blocks)


def derive_step_reduces(run: RunConfig, contract: ModelContract, pp_rank: int) -> tuple[Collective, ...]:
    """What it issues after the last: the gradients of its units are summed, and shared out."""
    units = derive_units(run, contract, pp_rank)
    return (*units.block.reduce * units.num_blocks, *units.root.reduce)


def count_moves(run: RunConfig, contract: ModelContract, pp_rank: int = 0) -> Iterator[tuple[Collective, int]]:
    """How often each is issued in a step of what moves parameters and their gradients; nothing where all is whole."""
    if run.parallel.dp_shard == 1:
        return
    units = derive_units(run, contract, pp_rank)
    number, repeats = units.num_blocks, run.train.gradient_accumulation if run.parallel.pp == 1 else 1
    again = 2 if units.gathers_again else 1
    for unit, gathers, reduces in ((units.root, repeats, 1), (units.block, again * repeats * number, number)):
        yield from ((each, gathers) for each in unit.gather)
        yield from ((each, reduces) for each in unit.reduce)


def _list_forward_moves(contract: ModelContract, units: Units) -> Iterator[Collective]:
    yield from units.root.gather
    yield from _list_ops(contract.entry)
    for block in contract.blocks:
        yield from units.block.gather
        yield from _list_ops(block)
    yield from _list_ops((*contract.exit, contract.loss))


def _list_backward_moves(contract: ModelContract, units: Units, *, is_last: bool) -> Iterator[Collective]:
    again = units.block.gather if units.gathers_again else ()
    yield from again
    yield from _list_backward_of((*contract.exit, contract.loss), contract)
    for index in reversed(range(len(contract.blocks))):
        yield from again if index else ()
        yield from _list_backward_of(contract.find_block(index), contract)
        yield from units.block.reduce if is_last else ()
    yield from _list_backward_of(contract.entry, contract)
    yield from units.root.reduce if is_last else ()


def _list_ops(ops: Iterable[Op]) -> Iterator[Collective]:
    return (collective for op in ops for collective in list_collectives(op.forward))


def _list_backward_of(ops: tuple[Op, ...], contract: ModelContract) -> list[Collective]:
    return list_collectives(list_backward(ops, contract.setting.recompute))


def _derive_unit(run: RunConfig, contract: ModelContract, ops: Iterable[Op]) -> Unit:
    degree = run.parallel.mesh_shape.degree("dp_shard_cp")
    owned = {parameter.ownership.name: parameter.ownership for op in ops for parameter in op.parameters}
    share = sum(count_share(each, contract.setting.rank, degree) for each in owned.values())
    dtype, sum_dtype = contract.setting.dtype, contract.setting.sum_dtype
    return build_unit(run.parallel.mesh_shape, share, gathered=dtype, summed=sum_dtype)


def build_unit(shape: MeshShape, share: int, *, gathered: DType, summed: DType, trained: int | None = None) -> Unit:
    """What moves of a unit of which each rank has `share` elements, gathered and summed in these formats.

    `trained` is how many of them have gradients, where not all have.
    """
    trained = share if trained is None else trained
    axis, degree, copies = shape.name("dp_shard_cp"), shape.degree("dp_shard_cp"), shape.dp_replicate
    total = Collective(REDUCE, "dp_replicate", copies, (trained,), summed)
    reduces = (Collective(_SCATTER, axis, degree, (trained * degree,), summed), *((total,) if copies > 1 else ()))
    gather = Collective(_GATHER, axis, degree, (share * degree,), gathered)
    return Unit((gather,) if share else (), reduces if trained else ())


def count_share(ownership: Ownership, tp_rank: int, degree: int) -> int:
    """Elements that each rank moves of a parameter: its rows, rounded up to the same number on every rank."""
    return count_row_share(ownership.local_shape(tp_rank), degree)


def count_row_share(shape: tuple[int, ...], degree: int) -> int:
    """The same of what tp left of a parameter."""
    rows, *others = shape
    return -(-rows // degree) * prod(others)
