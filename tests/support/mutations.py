"""Mistakes to be made on purpose inside the ranks, each of which a verification has to find.

A `Slip` does something wrong with one collective of the step, the `index`-th that is recorded. A `FAULTS` entry is a
mistake in the code of a layer, as other projects have made it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist

from plait.comm import collectives, trace
from plait.comm.mesh import Axis
from plait.models import init
from plait.parallel import dropout, loss, rng
from plait.parallel.embedding import VocabParallelEmbedding
from plait.parallel.linear import RowFunction
from plait.parallel.vocab import VocabShard
from plait.sharding import Interval, Ownership
from plait.train.optimizer import AdamW


class MutatedRanks:
    """Ranks on which every call makes the mistake `mutation`."""

    def __init__(self, ranks: Any, mutation: "Slip | str") -> None:
        self._ranks = ranks
        self._mutation = mutation

    def call(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run `function` on every rank."""
        return self._ranks.call(run_mutated, mutation=self._mutation, wrapped=function, arguments=kwargs)


def run_mutated(mutation: "Slip | str", wrapped: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Run `wrapped` on this rank with a mistake."""
    with FAULTS[mutation]() if isinstance(mutation, str) else mutation.make():
        return wrapped(**arguments)


@dataclass(frozen=True)
class Slip:
    """Something wrong with collective `index` of the recorded step.

    What is dropped, averaged or misplaced is recorded as if nothing were wrong, so that only the numbers can show it.
    What is repeated leaves the numbers as they are, so that only the trace can show it.
    """

    index: int
    how: Literal["drop", "average", "misplace", "repeat"]

    def make(self) -> AbstractContextManager[Any]:
        """Make the mistake while the context lasts."""
        if self.how == "repeat":
            return self._repeat()
        return patch.object(collectives, "_run", self._run_wrongly)

    def _is_at(self, num_recorded: int) -> bool:
        recording = trace._recorder.traces
        return bool(recording) and len(recording[-1].issued) == num_recorded

    def _run_wrongly(self, issue: Callable[..., Any], axis: Axis, *tensors: Any) -> None:
        if not self._is_at(self.index + 1):
            issue(*tensors, group=axis.group)
        elif self.how == "drop":
            keep_own(issue, axis, *tensors)
        else:
            issue(*tensors, group=axis.group)
            result = tensors[0]
            result.copy_(result / axis.degree if self.how == "average" else torch.cat(result.chunk(axis.degree)[::-1]))

    @contextmanager
    def _repeat(self) -> Iterator[None]:
        names = ("all_reduce", "all_gather", "all_gather_into", "reduce_scatter", "all_to_all")
        with patch.multiple(collectives, **{name: self._repeated(getattr(collectives, name)) for name in names}):
            yield

    def _repeated(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def repeat(*args: Any, **kwargs: Any) -> Any:
            if self._is_at(self.index):
                collective(*args, **kwargs)
            return collective(*args, **kwargs)

        return repeat


def keep_own(issue: Callable[..., Any], axis: Axis, *tensors: Any) -> None:
    """Fill the result with what this rank has, as if the collective had been forgotten."""
    if issue is dist.all_gather_single:
        x_full, x_shard = tensors
        x_full.copy_(x_shard.repeat(axis.degree, *[1] * (x_shard.dim() - 1)))
    elif issue is dist.reduce_scatter_single:
        x_shard, x_partial = tensors
        x_shard.copy_(x_partial.chunk(axis.degree)[axis.rank])
    elif issue is dist.all_to_all_single:
        received, outgoing, *_ = tensors
        received.copy_(outgoing.repeat(-(-received.numel() // outgoing.numel()))[: received.numel()])
    else:
        assert issue is dist.all_reduce, issue


def add_row_bias_on_every_rank() -> AbstractContextManager[Any]:
    add_once = RowFunction.forward

    def forward(ctx: Any, x: Any, weight: Any, bias: Any, exit: Any, has_backward: bool) -> Any:
        return add_once(ctx, x, weight, None if bias is None else bias * exit.mesh.tp.degree, exit, has_backward)

    return patch.object(RowFunction, "forward", staticmethod(forward))


def count_replicas_on_every_rank() -> AbstractContextManager[Any]:
    return patch.object(Ownership, "is_counted_on", lambda self, rank: True)


def count_nothing_but_rank_0() -> AbstractContextManager[Any]:
    return patch.object(Ownership, "is_counted_on", lambda self, rank: rank == 0)


class LocalVocab(VocabShard):
    """A vocabulary that takes its shard for the whole."""

    def check_targets(self, *_: Any) -> None:
        """Its size no longer means the whole."""


def smooth_over_the_local_vocabulary() -> AbstractContextManager[Any]:
    build = loss.build_vocab_shard

    def build_local(*args: Any) -> VocabShard:
        whole = build(*args)
        return LocalVocab(len(whole.own), whole.own, whole.axis)

    return patch.object(loss, "build_vocab_shard", build_local)


def take_another_ranks_part() -> AbstractContextManager[Any]:
    intervals = Ownership.intervals

    def of_the_next(self: Ownership, rank: int) -> tuple[Interval, ...]:
        degree = 1 if self.split is None else self.split.degree
        return intervals(self, (rank + 1) % degree)

    return patch.object(Ownership, "intervals", of_the_next)


def draw_initial_weights_by_local_index() -> AbstractContextManager[Any]:
    def normal_of_shard(tensor: Any, key: int, intervals: Any, global_shape: Any, **kwargs: Any) -> Any:
        own = tuple(Interval(0, size) for size in tensor.shape)
        return rng.normal_(tensor, key, own, tuple(tensor.shape), **kwargs)

    return patch.object(init, "normal_", normal_of_shard)


def draw_token_masks_by_local_index() -> AbstractContextManager[Any]:
    return patch.object(dropout.Dropout, "apply_mesh", lambda self, mesh: None)


def draw_attention_masks_by_local_head() -> AbstractContextManager[Any]:
    return patch.object(dropout.AttentionDropout, "apply_heads", lambda self, split, rank: None)


def forget_the_position_in_the_run() -> AbstractContextManager[Any]:
    say = dropout.TokenOffset.set
    return patch.object(dropout.TokenOffset, "set", lambda self, first_token: say(self, 0))


def miss_the_last_own_row_of_the_vocabulary() -> AbstractContextManager[Any]:
    build = VocabParallelEmbedding.__init__

    def build_short(self: VocabParallelEmbedding, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.own = Interval(self.own.start, self.own.stop - 1)

    return patch.object(VocabParallelEmbedding, "__init__", build_short)


def lose_one_of_two_uses_of_the_tied_weight() -> AbstractContextManager[Any]:
    forward = VocabParallelEmbedding.forward

    def forward_detached(self: VocabParallelEmbedding, ids: Any) -> Any:
        self.weight.requires_grad_(not trace._recorder.traces)
        x = forward(self, ids)
        self.weight.requires_grad_(True)
        return x

    return patch.object(VocabParallelEmbedding, "forward", forward_detached)


def carry_sums_in_bfloat16() -> AbstractContextManager[Any]:
    return patch.object(collectives, "_carrier", lambda x, axis, dtype: torch.bfloat16)


def step_further_on_one_rank() -> AbstractContextManager[Any]:
    step_all = AdamW.step

    def step_by_rank(self: AdamW, learning_rate: float) -> None:
        step_all(self, learning_rate * (1 + 1e-3 * dist.get_rank()))

    return patch.object(AdamW, "step", step_by_rank)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "row bias on every rank": add_row_bias_on_every_rank,
    "replicas counted on every rank": count_replicas_on_every_rank,
    "shards counted on rank 0 only": count_nothing_but_rank_0,
    "label smoothing over the local vocabulary": smooth_over_the_local_vocabulary,
    "another rank's part of each weight": take_another_ranks_part,
    "initial weights by local index": draw_initial_weights_by_local_index,
    "token masks by local index": draw_token_masks_by_local_index,
    "attention masks by local head": draw_attention_masks_by_local_head,
    "position in the run forgotten": forget_the_position_in_the_run,
    "last own vocabulary row missed": miss_the_last_own_row_of_the_vocabulary,
    "one use of a tied weight lost": lose_one_of_two_uses_of_the_tied_weight,
    "sums carried in bfloat16": carry_sums_in_bfloat16,
    "one rank steps further": step_further_on_one_rank,
}
