"""A stage of a pipeline as torch's schedules run it, with what it sends and receives in the trace."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from plait.comm import trace
from plait.comm.mesh import Mesh, build_message_group
from plait.contract.pipeline.transfer import Transfer
from plait.dtype import DType
from plait.parallel.region.half import Half, compute_half
from plait.parallel.tokens import enter_tokens
from plait.sharding import StagePart

AXIS = "pp/stages"
"""Under which name what a stage sends or waits for is noted, apart from the collectives of the axis."""


ComputeStage = Callable[[nn.Module, Tensor, tuple[int, int]], Tensor]
"""A stage, what it is given and the sizes `[B, S]` of a micro-batch -> what it gives."""


@dataclass(frozen=True)
class Stream:
    """What travels between stages for one micro-batch.

    Attributes:
        size: sequences and tokens of each `[B, S/cp]`, of all tp ranks.
        shape: what a rank sends: its own tokens `[T/tp, D]` under sequence parallelism, else `[T, D]`.
        is_sharded: whether it has own tokens.
    """

    size: tuple[int, int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_sharded: bool


class RunningStage(PipelineStage):
    """A stage that torch's schedules run.

    x          [T/tp, D]     own tokens of a micro-batch, from the stage before; [B, S] of tokens for the first
    y          [T/tp, D]     for the stage behind; logits [T, V/tp] of the last

    forward    send y to the same tp (and dp, cp) rank of the stage behind; nothing is gathered for it
    backward   send the gradient of x to the stage before

    Where a schedule splits backward, gradients of inputs are computed first, those of weights later, by a second pass
    through the same functions, which then gather what both need a second time; see `plait.parallel.region.half`.

    Several micro-batches are under way at once: `enter` is called with the index of the one that goes on, forward or
    backward, before it does.
    """

    def __init__(
        self,
        module: nn.Module,
        part: StagePart,
        num_stages: int,
        mesh: Mesh,
        stream: Stream,
        enter: Callable[[int], None],
        compute: ComputeStage,
    ) -> None:
        like = torch.empty(stream.shape, dtype=stream.dtype, device="meta")
        tokens = torch.empty(stream.size, dtype=torch.int64, device="meta")
        super().__init__(
            module,
            part.index,
            num_stages,
            mesh.device,
            input_args=tokens if part.is_first else like.clone().requires_grad_(),
            output_args=like.clone().requires_grad_(),
            group=build_message_group(mesh.pp),
        )
        self.module = module
        self.mesh = mesh
        self.stream = stream
        self.enter = enter
        self.compute = compute

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the stage; called by torch for each micro-batch."""
        if self.stream.is_sharded:
            batch, seq_len = self.stream.size
            enter_tokens(batch * seq_len, self.mesh)
        (x,) = args
        return self.compute(self.module, x, self.stream.size)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Take note of what came, and go on with the masks of this micro-batch."""
        if not self.is_first:
            self._record("received", "activation", self.stage_index - 1, fwd_chunk_id)
        self.enter(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """All of backward, or the gradients of inputs alone."""
        if not self.is_last:
            self._record("received", "gradient", self.stage_index + 1, bwd_chunk_id)
        self.enter(bwd_chunk_id)
        with compute_half(Half.BOTH if full_backward else Half.INPUTS):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The gradients of weights; of the first stage, which has no input to send a gradient for, all of backward."""
        self.enter(bwd_chunk_id)
        with compute_half(Half.BOTH if self.is_first else Half.WEIGHTS):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was tried out, as sizes are given; torch would leave parameters of FSDP cut, in the first step."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What is to be received before this forward."""
        return self._note(super().get_fwd_recv_ops(fwd_chunk_id), "receive activation", -1, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What is to be received before this backward."""
        return self._note(super().get_bwd_recv_ops(bwd_chunk_id), "receive gradient", 1, bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What is to be sent after this forward."""
        ops = self._note(super().get_fwd_send_ops(fwd_chunk_id), "send activation", 1, fwd_chunk_id)
        if ops:
            self._record("sent", "activation", self.stage_index + 1, fwd_chunk_id)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What is to be sent after this backward."""
        grads = self.bwd_cache.get(bwd_chunk_id)
        if grads is not None:
            self.bwd_cache[bwd_chunk_id] = tuple(None if grad is None else grad.contiguous() for grad in grads)
        ops = self._note(super().get_bwd_send_ops(bwd_chunk_id), "send gradient", -1, bwd_chunk_id)
        if ops:
            self._record("sent", "gradient", self.stage_index - 1, bwd_chunk_id)
        return ops

    def _note(self, ops: list[dist.P2POp], what: str, hop: int, micro_batch: int) -> list[dist.P2POp]:
        """Remember it as the latest that this rank set about."""
        if ops:
            way = "to" if what.startswith("send") else "from"
            text = f"{what} of micro-batch {micro_batch} at stage {self.stage_index}, {way} stage"
            trace.note_wish(AXIS, self.mesh.rank, f"{text} {self.stage_index + hop} (rank {ops[0].peer})")
        return ops

    def _record(
        self,
        direction: Literal["sent", "received"],
        tensor: Literal["activation", "gradient"],
        neighbour: int,
        micro_batch: int,
    ) -> None:
        source, target = (self.stage_index, neighbour) if direction == "sent" else (neighbour, self.stage_index)
        dtype = cast(DType, str(self.stream.dtype).removeprefix("torch."))
        trace.note_transfer(Transfer(direction, tensor, source, target, micro_batch, tuple(self.stream.shape), dtype))
