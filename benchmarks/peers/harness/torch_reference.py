"""Plain PyTorch modules of the work items, plus helpers every torch peer uses."""

import os

import torch
import torch.nn.functional as F
from torch import nn

from .workitem import EPS, SHARD_DIM, WorkItem, shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor(array, item: WorkItem, requires_grad: bool = False) -> torch.Tensor:
    """numpy -> torch; floats are cast to the item's dtype, integers are kept."""
    t = torch.from_numpy(array)
    if t.is_floating_point():
        t = t.to(DTYPES[item.dtype])
    return t.requires_grad_(requires_grad)


def init_gloo(rank: int, world: int) -> None:
    """Default process group on gloo, loopback only (the harness sets MASTER_ADDR/PORT)."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal grouped-query attention, [batch, heads, seq, dim] in and out."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def split_heads(t: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[batch, seq, n*head_dim] -> [batch, n, seq, head_dim]; n follows the local shard."""
    b, s, _ = t.shape
    return t.view(b, s, -1, head_dim).transpose(1, 2)


def merge_heads(t: torch.Tensor) -> torch.Tensor:
    b, n, s, d = t.shape
    return t.transpose(1, 2).reshape(b, s, n * d)


class Attention(nn.Module):
    def __init__(self, item: WorkItem):
        super().__init__()
        self.head_dim = item.head_dim
        h, q, kv = item.hidden, item.heads * item.head_dim, item.kv_heads * item.head_dim
        self.wq = nn.Linear(h, q, bias=False)
        self.wk = nn.Linear(h, kv, bias=False)
        self.wv = nn.Linear(h, kv, bias=False)
        self.wo = nn.Linear(q, h, bias=False)

    def forward(self, x):
        q, k, v = (split_heads(w(x), self.head_dim) for w in (self.wq, self.wk, self.wv))
        return self.wo(merge_heads(sdpa(q, k, v)))


class MLP(nn.Module):
    def __init__(self, item: WorkItem):
        super().__init__()
        self.w_gate = nn.Linear(item.hidden, item.ffn, bias=False)
        self.w_up = nn.Linear(item.hidden, item.ffn, bias=False)
        self.w_down = nn.Linear(item.ffn, item.hidden, bias=False)

    def forward(self, x):
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))


class Block(nn.Module):
    def __init__(self, item: WorkItem):
        super().__init__()
        self.attn_norm = nn.RMSNorm(item.hidden, eps=EPS)
        self.attn = Attention(item)
        self.mlp_norm = nn.RMSNorm(item.hidden, eps=EPS)
        self.mlp = MLP(item)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    def __init__(self, item: WorkItem):
        super().__init__()
        self.embedding = nn.Embedding(item.vocab, item.hidden)
        self.lm_head = nn.Linear(item.hidden, item.vocab, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.embedding(tokens))


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical weight name -> parameter, for Block and Head (last path component but one)."""
    return {n.rsplit(".", 2)[-2]: p for n, p in model.named_parameters()}


def build_reference(item: WorkItem) -> nn.Module:
    """The unsharded model with the item's weights."""
    with torch.device("meta"):
        model = (Block if item.kind == "block" else Head)(item)
    model = model.to(DTYPES[item.dtype])
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in named_weights(model).items():
            p.copy_(torch.from_numpy(item.weight(name)))
    return model


def local_weight(item: WorkItem, name: str, rank: int, world: int) -> torch.Tensor:
    """This rank's Megatron-style shard of weight ``name``, in the item's dtype."""
    w = item.weight(name)
    if SHARD_DIM[name] is not None:
        w = shard(w, rank, world, SHARD_DIM[name])
    return tensor(w, item)


def sum_squares(t: torch.Tensor | None) -> float:
    return float("nan") if t is None else float(t.detach().double().square().sum())
