"""The rectangles of scores that one rank computes: what a mask hides altogether is in none of them.

A mask is cut so that nearly all is in tiles without any mask, or causal ones of as many queries as keys, for which
there are fast kernels. Only the edges of windows are left as bands.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from plait.contract.context.mask import AttentionMask, count_band
from plait.sharding import Interval

BAND_ROWS = 256
"""Queries of a tile at the edge of a window: a mask of that many rows is the largest that ever exists."""


@dataclass(frozen=True)
class Tile:
    """Query rows and key rows as a rank stores them, of some rows of the batch.

    Query u and key w of the tile see each other if `low <= u - w <= high`.
    """

    batch: Interval
    q: Interval
    k: Interval
    low: int | None = None
    high: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether all see each other."""
        return self.low is None and self.high is None

    @property
    def is_causal(self) -> bool:
        """Whether each query sees as many keys as there are queries up to it."""
        return self.low == 0 and self.high is None and len(self.q) == len(self.k)

    @property
    def num_scores(self) -> int:
        """Elements of the rectangle in one head, hidden ones among them; of a causal tile its triangle."""
        num_q, num_k = len(self.q), len(self.k)
        return len(self.batch) * (count_band(num_q, num_k, 0, None) if self.is_causal else num_q * num_k)

    @property
    def num_visible(self) -> int:
        """Elements that are not hidden, in one head."""
        return len(self.batch) * count_band(len(self.q), len(self.k), self.low, self.high)


def derive_tiles(
    q_chunks: tuple[Interval, ...],
    k_chunks: tuple[Interval, ...],
    mask: AttentionMask,
    batch: int = 1,
    band_rows: int = BAND_ROWS,
) -> tuple[Tile, ...]:
    """Cut what tokens at positions `q_chunks`, stored one behind the other, see of those at `k_chunks`."""
    tiles: list[Tile] = []
    for rows, row in mask.group_rows(batch):
        if not len(rows):
            continue
        own = [
            tile
            for q_place, q in _place(q_chunks)
            for k_place, k in _place(k_chunks)
            for tile in _cut(rows, row, (q, q_place), (k, k_place), mask, band_rows)
        ]
        tiles += _merge(own)
    return tuple(tiles)


def _place(chunks: Sequence[Interval]) -> list[tuple[int, Interval]]:
    """Each chunk and where it is stored."""
    return list(zip(accumulate(map(len, chunks), initial=0), chunks, strict=False))


def _cut(
    rows: Interval, row: int, q: tuple[Interval, int], k: tuple[Interval, int], mask: AttentionMask, band_rows: int
) -> Iterable[Tile]:
    """The tiles of a chunk of queries and one of keys, each with where it is stored."""
    (q_chunk, q_place), (k_chunk, k_place) = q, k
    for own_q, own_k in mask.pair_documents(row, q_chunk, k_chunk):
        for part_q in _list_query_parts(own_q, own_k, mask, band_rows):
            for part_k in _cut_at(own_k, _list_key_edges(part_q, mask)):
                found = _narrow(part_q, part_k, mask)
                if found is not None:
                    near_q, near_k = found
                    low, high = _find_bounds(near_q, near_k, mask)
                    q_rows = _shift(near_q, q_place - q_chunk.start)
                    k_rows = _shift(near_k, k_place - k_chunk.start)
                    yield Tile(rows, q_rows, k_rows, low, high)


def _list_query_parts(q: Interval, k: Interval, mask: AttentionMask, band_rows: int) -> list[Interval]:
    """Queries that end before the keys begin or end, so that a causal tile is square; few at a time in a window."""
    found = _narrow(q, k, mask)
    if found is None:
        return []
    near_q, near_k = found
    edges = [] if mask.low is None else [near_k.start + mask.low, near_k.stop + mask.low]
    if mask.high is not None and _find_bounds(near_q, near_k, mask)[1] is not None:
        edges += range(near_q.start + band_rows, near_q.stop, band_rows)
    return _cut_at(near_q, edges)


def _list_key_edges(q: Interval, mask: AttentionMask) -> list[int]:
    """Where keys begin and end to be seen by all of `q`, and to be seen by any."""
    edges = [] if mask.high is None else [q.stop - 1 - mask.high]
    return edges if mask.low is None else [*edges, q.start - mask.low, q.stop - mask.low]


def _cut_at(whole: Interval, edges: Iterable[int]) -> list[Interval]:
    within = sorted({whole.start, whole.stop, *(edge for edge in edges if whole.start < edge < whole.stop)})
    return [Interval(start, stop) for start, stop in pairwise(within)]


def _narrow(q: Interval, k: Interval, mask: AttentionMask) -> tuple[Interval, Interval] | None:
    """Leave out queries that see none of `k`, and keys that none of `q` sees; None where nothing is left."""
    q_start, q_stop, k_start, k_stop = q.start, q.stop, k.start, k.stop
    if mask.low is not None:
        q_start, k_stop = max(q_start, k_start + mask.low), min(k_stop, q_stop - mask.low)
    if mask.high is not None:
        q_stop, k_start = min(q_stop, k_stop + mask.high), max(k_start, q_start - mask.high)
    if q_start >= q_stop or k_start >= k_stop:
        return None
    return Interval(q_start, q_stop), Interval(k_start, k_stop)


def _find_bounds(q: Interval, k: Interval, mask: AttentionMask) -> tuple[int | None, int | None]:
    """The bounds of `u - w` within a tile, where they hide anything."""
    shift = q.start - k.start
    low = None if mask.low is None or mask.low - shift <= 1 - len(k) else mask.low - shift
    high = None if mask.high is None or mask.high - shift >= len(q) - 1 else mask.high - shift
    return low, high


def _shift(rows: Interval, by: int) -> Interval:
    return Interval(rows.start + by, rows.stop + by)


def _merge(tiles: Sequence[Tile]) -> list[Tile]:
    """Put full tiles together that are side by side, first along the keys, then along the queries."""
    merged: list[Tile] = []
    for tile in sorted(tiles, key=lambda each: (each.q.start, each.q.stop, each.k.start)):
        last = merged[-1] if merged else None
        if last and last.is_full and tile.is_full and last.q == tile.q and last.k.stop == tile.k.start:
            merged[-1] = replace(last, k=Interval(last.k.start, tile.k.stop))
        else:
            merged.append(tile)
    result: list[Tile] = []
    for tile in sorted(merged, key=lambda each: (not each.is_full, each.k.start, each.k.stop, each.q.start)):
        last = result[-1] if result else None
        if last and last.is_full and tile.is_full and last.k == tile.k and last.q.stop == tile.q.start:
            result[-1] = replace(last, q=Interval(last.q.start, tile.q.stop))
        else:
            result.append(tile)
    return result
