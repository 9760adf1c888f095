"""Megatron-style tensor parallelism written directly on torch.distributed collectives.

Used by two peers: ``manual_gloo`` (what a careful hand-written version on gloo costs) and
``compute_only`` (the same local shapes with every collective removed: the bound).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .torch_reference import local_weight, merge_heads, sdpa, split_heads, tensor
from .torch_steps import make_step
from .workitem import EPS, WorkItem, shard


class GlooComm:
    """The three collectives tensor parallelism needs, on [1, seq, hidden] activations."""

    def __init__(self, rank: int, world: int):
        self.rank, self.world = rank, world

    def all_reduce(self, t, op=dist.ReduceOp.SUM):
        t = t.contiguous()
        dist.all_reduce(t, op)
        return t

    def gather_seq(self, t):
        out = t.new_empty(t.shape[0], t.shape[1] * self.world, *t.shape[2:])
        dist.all_gather_into_tensor(out[0], t[0].contiguous())
        return out

    def scatter_seq(self, t):
        out = t.new_empty(t.shape[0], t.shape[1] // self.world, *t.shape[2:])
        dist.reduce_scatter_tensor(out[0], t[0].contiguous())
        return out


class NoComm(GlooComm):
    """Same shapes in and out, no bytes moved: results are wrong, times are the bound."""

    def __init__(self, rank: int, world: int):
        super().__init__(rank, world)
        self.full: dict = {}

    def all_reduce(self, t, op=None):
        return t

    def gather_seq(self, t):
        shape = (t.shape[0], t.shape[1] * self.world, *t.shape[2:])
        if shape not in self.full:
            self.full[shape] = torch.randn(shape).to(t.dtype)
        return self.full[shape]

    def scatter_seq(self, t):
        return t[:, : t.shape[1] // self.world]


def _function(name, forward, backward):
    """An autograd function without saved tensors, from two closures."""

    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return forward(t)

        @staticmethod
        def backward(ctx, g):
            return backward(g)

    Fn.__name__ = name
    return Fn.apply


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of vocab-sharded logits; never gathers them."""

    @staticmethod
    def forward(ctx, logits, targets, comm):
        n, vocab = logits.shape
        top = comm.all_reduce(logits.amax(1), dist.ReduceOp.MAX)
        probs = (logits - top[:, None]).exp_()
        local = targets - comm.rank * vocab
        mine = (local >= 0) & (local < vocab)
        rows = torch.arange(n)[mine]
        picked = logits.new_zeros(n)
        picked[rows] = logits[rows, local[mine]] - top[rows]
        sums = torch.stack([probs.sum(1), picked])
        sums = comm.all_reduce(sums)
        probs /= sums[0][:, None]
        ctx.save_for_backward(probs, rows, local[mine])
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx, g):
        grad, rows, cols = ctx.saved_tensors
        grad[rows, cols] -= 1
        return grad.mul_(g / grad.shape[0]), None, None


def setup(item: WorkItem, comm: GlooComm, sequence_parallel: bool):
    rank, world = comm.rank, comm.world
    weights = {n: local_weight(item, n, rank, world).requires_grad_() for n in item.weight_names}
    copies = {"loss": world, "x": world, "attn_norm": world, "mlp_norm": world}
    after = None
    if sequence_parallel:
        enter = _function("Gather", comm.gather_seq, comm.scatter_seq)
        leave = _function("Scatter", comm.scatter_seq, comm.gather_seq)
    else:
        enter = _function("Copy", lambda t: t.view_as(t), comm.all_reduce)
        leave = _function("Reduce", comm.all_reduce, lambda g: g)

    if item.kind == "block":
        w = weights

        def forward(x):
            h = enter(F.rms_norm(x, (item.hidden,), w["attn_norm"], EPS))
            q, k, v = (split_heads(F.linear(h, w[n]), item.head_dim) for n in ("wq", "wk", "wv"))
            x = x + leave(F.linear(merge_heads(sdpa(q, k, v)), w["wo"]))
            h = enter(F.rms_norm(x, (item.hidden,), w["mlp_norm"], EPS))
            h = F.silu(F.linear(h, w["w_gate"])) * F.linear(h, w["w_up"])
            return x + leave(F.linear(h, w["w_down"]))

        x, dy = item.x(), item.dy()
        if sequence_parallel:
            x, dy = shard(x, rank, world, 1), shard(dy, rank, world, 1)
            copies.update(loss=1, x=1)

            def after():
                norms = torch.stack([w["attn_norm"].grad, w["mlp_norm"].grad])
                norms = comm.all_reduce(norms)
                w["attn_norm"].grad, w["mlp_norm"].grad = norms.unbind()

        return make_step(
            item,
            forward,
            (tensor(x, item, requires_grad=True),),
            weights,
            dy=tensor(dy, item),
            copies=copies,
            after_backward=after,
        )

    rows = item.vocab // world

    def loss(tokens, targets):
        local = tokens - rank * rows
        mine = (local >= 0) & (local < rows)
        h = F.embedding(local.clamp(0, rows - 1), weights["embedding"]) * mine[..., None]
        h = enter(leave(h))
        logits = F.linear(h, weights["lm_head"])
        return _VocabParallelCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), comm)

    inputs = (torch.from_numpy(item.tokens()), torch.from_numpy(item.targets()))
    return make_step(item, loss, inputs, weights, copies=copies)
