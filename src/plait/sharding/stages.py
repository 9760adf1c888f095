"""Which part of a model each stage of a pipeline holds, and on which rank the stage is."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

ENDS_AS_BLOCKS = 2
"""Embedding and head, where they count as a block each so that blocks can be shared out."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """What a stage holds.

    Attributes:
        index: its place among the stages; 0 has the embedding.
        layers: the indices of its blocks, in the whole model.
        is_last: whether it has the final norm, the head and the loss.
    """

    index: int
    layers: range
    is_first: bool
    is_last: bool


@lru_cache(maxsize=4096)
def share_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """The blocks of each stage, in order.

    Blocks that do not divide are shared out as if embedding and head were a block each (Llama 3's 126 over 8 * 16), or
    else the first stages have one more.
    """
    if num_layers % num_stages and (num_layers + ENDS_AS_BLOCKS) % num_stages == 0 and num_stages > 1:
        each = (num_layers + ENDS_AS_BLOCKS) // num_stages
        counts = [each - (index in (0, num_stages - 1)) for index in range(num_stages)]
    else:
        each, rest = divmod(num_layers, num_stages)
        counts = [each + (index < rest) for index in range(num_stages)]
    return tuple(range(stop - count, stop) for stop, count in zip(accumulate(counts), counts, strict=True))


def derive_parts(num_layers: int, num_stages: int) -> tuple[StagePart, ...]:
    """The stages from first to last."""
    shares = enumerate(share_layers(num_layers, num_stages))
    return tuple(StagePart(index, layers, index == 0, index == num_stages - 1) for index, layers in shares)


def list_rank_stages(pp: int, stages_per_rank: int, rank: int) -> tuple[int, ...]:
    """The stages on pp rank `rank`: one of each round through the ranks, so that each sends to the next rank."""
    return tuple(rank + pp * turn for turn in range(stages_per_rank))


def select_parts(num_layers: int, pp: int, stages_per_rank: int, rank: int) -> tuple[StagePart, ...]:
    """What pp rank `rank` holds, stage by stage."""
    parts = derive_parts(num_layers, pp * stages_per_rank)
    return tuple(parts[index] for index in list_rank_stages(pp, stages_per_rank, rank))


def find_idle_stage(num_layers: int, num_stages: int) -> int | None:
    """The first stage without a block that has neither embedding nor head, if there is one: however many are asked."""
    return num_layers if num_stages > num_layers + ENDS_AS_BLOCKS else None
