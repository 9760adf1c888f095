"""Keys and values travel from rank to rank, each block while the one before is computed (Liu et al., arXiv:2310.01889).

The steps are those of `plait.schedule.context`, which `plait.verify.static.context` proves.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from plait.comm import trace
from plait.comm.autograd.once import once_differentiable
from plait.contract.context.traffic import DKV, KV
from plait.parallel.context.context import Site
from plait.parallel.context.link import RecordedLink
from plait.parallel.context.packed import pack, unpack
from plait.parallel.context.tile import Accumulator, Rows, attend_tiles, attend_tiles_backward, build_rows
from plait.schedule.context import Attend, RingProgram, Sum, build_ring_backward, build_ring_forward
from plait.schedule.step import Flush, Message, Recv, Send, Wait


class RingAttention(torch.autograd.Function):
    """Attention of the own queries over all keys, a block of them at a time.

        q          [B, N, S/cp, H]
        k, v       [B, K, S/cp, H]
        y          [B, N, S/cp, H]

        forward    k and v [S/cp, 2, B, K, H] from rank to rank over cp, in up to cp - 1 messages per rank
        backward   the same again, and in as many messages the sums of their gradients

    A block goes no further than somebody sees it. Contract: contract/context/traffic.py.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, site: Site) -> Tensor:
        kv_shard = pack(k, v)
        run = _Forward(site, q, kv_shard)
        run.take_steps(build_ring_forward(site.plan.needs, site.plan.order.split, site.axis.rank))
        out = run.seen.out.to(q.dtype)
        ctx.save_for_backward(q, kv_shard, out, run.seen.lse)
        ctx.site = site
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv_shard, out, lse = ctx.saved_tensors
        site: Site = ctx.site
        run = _Backward(site, build_rows(grad, q, out, lse, site.scale), kv_shard)
        run.take_steps(build_ring_backward(site.plan.needs, site.plan.order.split, site.axis.rank))
        grad_k, grad_v = unpack(run.total.to(q.dtype))
        return run.grad_q.to(q.dtype), grad_k, grad_v, None


class _Pass(ABC):
    """One pass of the ring: the block of keys and values that is at hand, and what travels."""

    link: RecordedLink

    def __init__(self, site: Site, kv_shard: Tensor) -> None:
        self.site = site
        self.blocks = {site.axis.rank: kv_shard}

    def take_steps(self, program: RingProgram) -> None:
        """Take the steps of `program`, in order; all ranks of the axis have to, with programs of one ring."""
        if any(self.site.plan.needs.reach):
            self.note()
            self.link = RecordedLink(self.site.axis, self.blocks[program.rank].device, self.site.label)
        for step in program.steps:
            match step:
                case Recv(message):
                    self.link.recv(message, self.build_room(message))
                case Send(message):
                    self.link.send(message, self.find_rows(message))
                case Wait(message):
                    self.keep(message, self.link.wait(message))
                case Flush(tensor):
                    self.link.flush(tensor)
                case Attend(owner):
                    self.attend(owner)
                case Sum():
                    self.sum(step)

    def note(self) -> None:
        """Let a rank that fails say where it was."""
        self.note_ring(self.blocks[self.site.axis.rank].dtype, "k, v")

    def note_ring(self, dtype: torch.dtype, tensor: str) -> None:
        """The same text on all ranks, so that others are told from it that are elsewhere."""
        shape = (self.site.plan.order.size, *self.blocks[self.site.axis.rank].shape[1:])
        size, name = "x".join(map(str, shape)), str(dtype).removeprefix("torch.")
        axis = self.site.axis
        trace.note_ring(axis, f"ring [{size}] {name} over {axis.name} ({self.site.label}: {tensor})")

    def build_room(self, message: Message) -> Tensor:
        """Room for a message."""
        own = self.blocks[self.site.axis.rank]
        dtype = own.dtype if message.tensor == KV else self.site.sum_dtype
        return own.new_empty((len(message.piece.rows), *own.shape[1:]), dtype=dtype)

    def find_rows(self, message: Message) -> Tensor:
        """What is sent."""
        return self.blocks[message.piece.owner]

    def keep(self, message: Message, rows: Tensor) -> None:
        """The next block is at hand, and the one before is done with."""
        rank = self.site.axis.rank
        self.blocks = {rank: self.blocks[rank], message.piece.owner: rows}

    @abstractmethod
    def attend(self, owner: int) -> None:
        """Compute with a block."""

    def sum(self, step: Sum) -> None:
        """Put addends together: there are none in forward."""
        raise AssertionError(step)


class _Forward(_Pass):
    def __init__(self, site: Site, q: Tensor, kv_shard: Tensor) -> None:
        super().__init__(site, kv_shard)
        self.q, self.seen = q, Accumulator(q)

    def attend(self, owner: int) -> None:
        tiles = self.site.plan.block_tiles(self.site.axis.rank, owner)
        attend_tiles(self.q, *unpack(self.blocks[owner]), tiles, self.site.scale, self.seen)


class _Backward(_Pass):
    """Attributes: total is the gradient of the own keys and values, `[S/cp, 2, B, K, H]`."""

    def __init__(self, site: Site, rows: Rows, kv_shard: Tensor) -> None:
        super().__init__(site, kv_shard)
        self.rows = rows
        self.grad_q = torch.zeros_like(rows.q, dtype=rows.lse.dtype)
        self.computed: dict[int, Tensor] = {}
        self.received: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}

    @property
    def total(self) -> Tensor:
        return self.sums[self.site.axis.rank]

    def note(self) -> None:
        super().note()
        self.note_ring(self.site.sum_dtype, "dk, dv")

    def find_rows(self, message: Message) -> Tensor:
        return self.sums[message.piece.owner] if message.tensor == DKV else super().find_rows(message)

    def keep(self, message: Message, rows: Tensor) -> None:
        if message.tensor == DKV:
            self.received[message.piece.owner] = rows
        else:
            super().keep(message, rows)

    def attend(self, owner: int) -> None:
        kv = self.blocks[owner]
        self.computed[owner] = part = torch.zeros_like(kv, dtype=self.rows.lse.dtype)
        tiles = self.site.plan.block_tiles(self.site.axis.rank, owner)
        attend_tiles_backward(self.rows, *unpack(kv), tiles, (self.grad_q, *unpack(part)))

    def sum(self, step: Sum) -> None:
        addends = [self.computed.pop(step.owner).to(self.site.sum_dtype)] if step.adds_own else []
        addends += [self.received.pop(step.owner)] if step.adds_received else []
        if not addends:  # nobody sees the own keys
            addends = [torch.zeros_like(self.blocks[step.owner], dtype=self.site.sum_dtype)]
        # What was sent on before has left by now, so nothing else has to be kept.
        self.sums = {step.owner: addends[0] if len(addends) == 1 else addends[0].add_(addends[1])}
