"""How a pipeline's ranks share the blocks out, and how many micro-batches each holds at a time."""

from dataclasses import dataclass
from functools import lru_cache

from plait.sharding import share_layers


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank of the pipeline holds.

    Attributes:
        index: its place; 0 has the embedding.
        num_layers: blocks of all its chunks together.
        is_last: whether it has the final norm, the head and the loss.
        in_flight: micro-batches whose activations it keeps at most, of all its blocks (a fraction with interleaved
            chunks).
        num_micro_batches: of a step.
    """

    index: int
    num_layers: int
    is_first: bool
    is_last: bool
    in_flight: float
    num_micro_batches: int


@lru_cache(maxsize=4096)
def derive_stages(num_layers: int, pp: int, interleave: int, num_micro_batches: int) -> tuple[Stage, ...]:
    """The stages from first to last.

    Blocks that do not divide are shared out as runs share them out: `plait.sharding.share_layers`.
    """
    return tuple(
        Stage(
            index,
            layers,
            index == 0,
            index == pp - 1,
            _count_in_flight(index, pp, interleave, num_micro_batches),
            num_micro_batches,
        )
        for index, layers in enumerate(_share_layers(num_layers, pp, pp * interleave))
    )


def _share_layers(num_layers: int, pp: int, num_chunks: int) -> list[int]:
    """The blocks of each rank: those of all its chunks."""
    shares = share_layers(num_layers, num_chunks)
    return [sum(map(len, shares[index::pp])) for index in range(pp)]


def _count_in_flight(index: int, pp: int, interleave: int, num_micro_batches: int) -> float:
    """1F1B fills the ranks behind; with chunks a rank first does all but its last one for a round of micro-batches.

    The first rank holds `pp * (1 + (pp - 1) / (pp * interleave))` micro-batches (Korthikanti et al., section 4.2).
    """
    if interleave == 1:
        return float(min(num_micro_batches, pp - index))
    chunks = 2 * (pp - index - 1) + (interleave - 1) * pp + 1
    return min(num_micro_batches * interleave, chunks) / interleave
