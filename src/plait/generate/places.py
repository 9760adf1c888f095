"""Which row of the cache each request has: those that decode first, without gaps, then those still reading."""

from plait.generate.cache import KVCache
from plait.generate.row import Row


class Places:
    """Requests in the order of their rows; a decoding step then reads the first rows of the cache as they lie.

    A request that ends or begins to decode makes another one move: its keys and values are copied, which takes less
    than the reading of its prompt took.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.rows: list[Row] = []
        self.num_decoding = 0

    @property
    def decoding(self) -> list[Row]:
        """Requests whose prompt has been read."""
        return self.rows[: self.num_decoding]

    @property
    def reading(self) -> list[Row]:
        """The others."""
        return self.rows[self.num_decoding :]

    def add(self, row: Row) -> None:
        """Give a new request the next free row."""
        self.rows.append(row)

    def begin_decoding(self, row: Row) -> None:
        """Put a request, whose prompt has been read, behind those that decode."""
        self._swap(self.rows.index(row), self.num_decoding)
        self.num_decoding += 1

    def remove(self, row: Row) -> None:
        """Free the row of a request that has ended."""
        index = self.rows.index(row)
        if index < self.num_decoding:
            self.num_decoding -= 1
            self._overwrite(index, self.num_decoding)
            index = self.num_decoding
        self._overwrite(index, len(self.rows) - 1)
        self.rows.pop()
        if not self.rows:
            self.cache.clear()

    def _overwrite(self, target: int, source: int) -> None:
        if target != source:
            self.cache.move(source, target, self.rows[source].num_cached)
            self.rows[target] = self.rows[source]

    def _swap(self, one: int, other: int) -> None:
        if one != other:
            self.cache.swap(one, other, max(self.rows[one].num_cached, self.rows[other].num_cached))
            self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
