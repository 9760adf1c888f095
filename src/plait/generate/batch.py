"""Continuous batching: requests enter and leave a running batch at any step."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from plait.errors import ConfigError
from plait.generate.cache import KVCache, Piece
from plait.generate.places import Places
from plait.generate.request import Capacity, Event, Request
from plait.generate.row import Row
from plait.generate.sampling.sample import sample
from plait.generate.shares import share_budget
from plait.generate.text import Decode
from plait.generate.views import Views
from plait.parallel.vocab import VocabShard


@dataclass(frozen=True)
class Limits:
    """What bounds a step, and the cache.

    Raises:
        ConfigError: a limit below 1.
    """

    max_requests: int = 32
    """Requests that are decoded together; others wait in the order in which they came."""
    max_prefill_tokens: int = 512
    """Prompt tokens in one step, so that a long prompt makes nobody wait for long."""
    max_cache_tokens: int = 65_536
    """Tokens that the cache has room for: requests, times the longest that one of them may become."""

    def __post_init__(self) -> None:
        if problems := [f"{name} {value} is not at least 1" for name, value in vars(self).items() if value < 1]:
            raise ConfigError.from_problems("limits", problems)


class ContinuousBatch:
    """Requests that are decoded together, one token each a step.

    Every rank of the mesh holds one and calls `step` with the same arguments; every rank gets the same events. Which
    request is read, decoded or made to wait follows from the arguments alone.
    """

    def __init__(
        self,
        views: Views,
        shard: VocabShard,
        decode: Decode,
        *,
        capacity: Capacity,
        eos_ids: Iterable[int] = (),
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.capacity = Capacity(capacity.vocab_size, min(capacity.max_context, self.limits.max_cache_tokens))
        """What a request may ask for here."""
        self.cache = KVCache(self.limits.max_cache_tokens)
        self._views = views
        self._shard = shard
        self._decode = decode
        self._eos_ids = frozenset(eos_ids)
        self._places = Places(self.cache)
        self._waiting: deque[Request] = deque()
        self._reading: list[Row] = []
        """In the order in which they came, whatever their rows."""

    @property
    def num_running(self) -> int:
        """Requests that hold a row of the cache."""
        return len(self._places.rows)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    @torch.inference_mode()
    def step(self, arrivals: Sequence[Request] = (), cancelled: Collection[str] = ()) -> list[Event]:
        """Take `arrivals` in, let `cancelled` go, and bring every running request forward by a token at most.

        A request whose prompt is still being read has no event; an unknown id in `cancelled` is of a request that has
        ended already, and is passed over. With nothing running and nothing arriving, nothing is computed nor moved.

        Raises:
            ConfigError: an arrival that `capacity.check` refuses, or with the id of another that has not ended.
        """
        self._check(arrivals)
        self._waiting.extend(arrivals)
        events = self._cancel(set(cancelled))
        self._admit()
        pieces = self._plan_pieces()
        self._reserve(pieces)
        read, logits = self._forward(pieces)
        rows = [*read, *self._places.decoding]
        for row in read:
            self._reading.remove(row)
            self._places.begin_decoding(row)
        if rows:
            sampled = sample(torch.cat(logits), self._shard, [row.draw for row in rows])
            # All have to be told before one leaves: rows that move take along what the forward pass stored.
            accepted = [
                row.accept(token, log_prob, self._eos_ids) if isfinite(log_prob) else row.fail()
                for row, token, log_prob in zip(rows, *sampled, strict=True)
            ]
            for row, event in zip(rows, accepted, strict=True):
                if event.finish_reason == "failed":
                    self.cache.wipe(self._places.rows.index(row))
                if event.finish_reason is not None:
                    self._places.remove(row)
            events += accepted
        return events

    def _check(self, arrivals: Sequence[Request]) -> None:
        if not arrivals:
            return
        known = {row.request.id for row in self._places.rows} | {request.id for request in self._waiting}
        for request in arrivals:
            self.capacity.check(request)
            if request.id in known:
                raise ConfigError(f"request {request.id}: another one of this id has not ended")
            known.add(request.id)

    def _cancel(self, ids: set[str]) -> list[Event]:
        if not ids:
            return []
        events = [self._build_row(request).cancel() for request in self._waiting if request.id in ids]
        self._waiting = deque(request for request in self._waiting if request.id not in ids)
        for row in [row for row in self._places.rows if row.request.id in ids]:
            events.append(row.cancel())
            self._places.remove(row)
            if row in self._reading:
                self._reading.remove(row)
        return events

    def _admit(self) -> None:
        """Let waiting requests in, in their order, while the cache can hold all that may be asked of it."""
        while self._waiting and self.num_running < self.limits.max_requests:
            row = self._build_row(self._waiting[0])
            longest = max(other.num_needed for other in [*self._places.rows, row])
            if (self.num_running + 1) * longest > self.limits.max_cache_tokens and self.num_running:
                return
            self._waiting.popleft()
            self._places.add(row)
            self._reading.append(row)

    def _build_row(self, request: Request) -> Row:
        return Row(request, self._decode, self.capacity.max_context)

    def _plan_pieces(self) -> list[tuple[Row, Piece]]:
        shares = share_budget([row.num_unread for row in self._reading], self.limits.max_prefill_tokens)
        return [
            (row, Piece(self._places.rows.index(row), row.num_read, row.num_read + share))
            for row, share in zip(self._reading, shares, strict=True)
            if share
        ]

    def _reserve(self, pieces: Sequence[tuple[Row, Piece]]) -> None:
        stored = [row.num_cached + 1 for row in self._places.decoding]
        read = [max(row.num_cached, piece.stop) for row, piece in pieces]
        unread = [row.num_cached for row in self._places.reading]
        self.cache.reserve(self.num_running, max([*stored, *read, *unread], default=0))

    def _forward(self, pieces: Sequence[tuple[Row, Piece]]) -> tuple[list[Row], list[Tensor]]:
        """Run what there is to run: the requests whose prompt has now been read, and logits, theirs first."""
        logits: list[Tensor] = []
        finished: list[Row] = []
        decoding = self._places.decoding
        if pieces:
            prompts = [row.request.prompt for row, _ in pieces]
            of_pieces = self._views.read(self.cache, prompts, [piece for _, piece in pieces])
            for row, piece in pieces:
                row.num_read = piece.stop
            is_read = [row.num_unread == 0 for row, _ in pieces]
            finished = [row for row, _ in pieces if row.num_unread == 0]
            logits.append(of_pieces[torch.tensor(is_read, device=of_pieces.device)])
        if decoding:
            tokens = [row.last_token for row in decoding if row.last_token is not None]
            logits.append(self._views.decode(self.cache, tokens, [row.num_cached for row in decoding]))
        return finished, logits
