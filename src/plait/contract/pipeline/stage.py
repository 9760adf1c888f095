"""What a rank issues for a micro-batch in one stage of a pipeline, whole backward or split in two."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from plait.contract.collective import Collective
from plait.contract.model import ModelContract
from plait.contract.op import Op
from plait.contract.parameter import Parameter
from plait.contract.pipeline.order import Work
from plait.contract.recompute import list_backward
from plait.contract.step import Move, list_collectives, list_gemms, list_moves, sum_flops
from plait.sharding import StagePart


@dataclass(frozen=True)
class StageContract:
    """A part of a model on one rank."""

    model: ModelContract
    part: StagePart

    @property
    def blocks(self) -> tuple[tuple[Op, ...], ...]:
        """What is done in order: the entry, each block, the end; those of them that the stage has."""
        model, part = self.model, self.part
        return (
            *((model.entry,) if part.is_first else ()),
            *map(model.find_block, part.layers),
            *(((*model.exit, model.loss),) if part.is_last else ()),
        )

    @property
    def ops(self) -> tuple[Op, ...]:
        """Every operation in the order of forward."""
        return tuple(op for block in self.blocks for op in block)

    def list_collectives(self, work: Work) -> tuple[Collective, ...]:
        """What the rank issues for this, in order."""
        return self._by_work[work]

    def count_flops(self, work: Work) -> int:
        """FLOPs of the GEMMs of this."""
        return self._flops[work]

    @cached_property
    def _flops(self) -> dict[Work, int]:
        backward = [step for op in self.ops for step in (*op.again, *op.backward)]
        weights = [gemm for gemm in list_gemms(backward) if gemm.what == "wgrad"]
        both, later = sum_flops(backward), sum_flops(weights)
        return {
            Work.FORWARD: sum(sum_flops(op.forward) for op in self.ops),
            Work.BACKWARD: both,
            Work.INPUT_BACKWARD: 0 if self.part.is_first else both - later,
            Work.WEIGHT_BACKWARD: both if self.part.is_first else later,
        }

    @cached_property
    def _by_work(self) -> dict[Work, tuple[Collective, ...]]:
        recompute = self.model.setting.recompute
        backward = [step for block in reversed(self.blocks) for step in list_backward(block, recompute)]
        both, nothing = tuple(list_collectives(backward)), ()
        inputs = (move for op in reversed(self.ops) for move in list_moves(op.backward) if _is_for_input(op, move))
        weights = (move for op in self.ops for move in list_moves(op.backward) if _is_for_weight(op, move))
        return {
            Work.FORWARD: tuple(each for op in self.ops for each in list_collectives(op.forward)),
            Work.BACKWARD: both,
            # The first stage has no input whose gradient anyone waits for, so torch leaves all to the second half.
            Work.INPUT_BACKWARD: nothing if self.part.is_first else tuple(move.collective for move in inputs),
            Work.WEIGHT_BACKWARD: both if self.part.is_first else tuple(move.collective for move in weights),
        }


def _is_for_weight(op: Op, move: Move) -> bool:
    """A gathered input or gradient that a weight's gradient is made of, or a sum of such gradients."""
    return bool(op.parameters) and move.tensor != "dx"


def _is_for_input(op: Op, move: Move) -> bool:
    """A gathered gradient that is multiplied by a weight, or the sum of what comes of it; all where there is none."""
    return not op.parameters or move.tensor in ("dx", "dy")


def list_ends(contract: ModelContract, parts: Iterable[StagePart]) -> tuple[Op, ...]:
    """What a rank does around the blocks, as far as its stages have it."""
    parts = tuple(parts)
    return (
        *(contract.entry if any(part.is_first for part in parts) else ()),
        *(contract.exit if any(part.is_last for part in parts) else ()),
    )


def list_parameters(contract: ModelContract, parts: Iterable[StagePart]) -> tuple[Parameter, ...]:
    """Those that a rank holds of its stages, block by block; a tied one once."""
    parts = tuple(parts)
    held = {p.ownership.name: p for op in list_ends(contract, parts) for p in op.parameters}
    block = [p for op in contract.block for p in op.parameters]
    return (*held.values(), *block * sum(len(part.layers) for part in parts))


def count_parameters(contract: ModelContract, parts: Iterable[StagePart]) -> int:
    """Their elements."""
    return sum(p.layout.local_numel(contract.setting.rank) for p in list_parameters(contract, parts))


def select_modules(modules: Iterable[str], parts: Sequence[StagePart]) -> Iterator[str]:
    """Of modules in blocks, and the head, those that the stages have."""
    indices = {str(index) for part in parts for index in part.layers}
    for module in modules:
        names = module.split(".")
        if (names[0] == "layers" and names[1] in indices) or (names[0] == "head" and parts[-1].is_last):
            yield module
