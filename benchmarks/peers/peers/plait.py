"""plait: ``plait.parallelize`` on plain modules, with a plan.

mode "sp": activations are sharded over tokens between the regions; "tp": they are whole.
overlap "auto", "full" or "disabled" and transport "auto", "shm" or "ring" are plait's own settings; method likewise.
The vocabulary of the ends is cut: embedding, LM head and cross entropy.
"""

import torch
from plait import (
    Column,
    KeyValueHeads,
    MeshShape,
    Plan,
    QueryHeads,
    Row,
    build_mesh,
    parallelize,
    shard_tokens,
    vocab_parallel_cross_entropy,
)
from plait.config.overlap import OverlapConfig
from torch import nn

from harness import torch_reference
from harness.torch_reference import DTYPES, Head, init_gloo, named_weights, sdpa, tensor
from harness.torch_steps import make_step
from harness.workitem import WorkItem


def split_heads(y: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[T, n*head_dim] of one sequence -> [1, n, T, head_dim]."""
    return y.view(1, y.shape[0], -1, head_dim).transpose(1, 2)


class Attention(nn.Module):
    """[T, D] -> [T, D] of one sequence; how many heads there are follows from what the projections return."""

    def __init__(self, item: WorkItem):
        super().__init__()
        self.head_dim = item.head_dim
        query_width, kv_width = item.heads * item.head_dim, item.kv_heads * item.head_dim
        self.wq = nn.Linear(item.hidden, query_width, bias=False)
        self.wk = nn.Linear(item.hidden, kv_width, bias=False)
        self.wv = nn.Linear(item.hidden, kv_width, bias=False)
        self.wo = nn.Linear(query_width, item.hidden, bias=False)

    def forward(self, x):
        q, k, v = (split_heads(w(x), self.head_dim) for w in (self.wq, self.wk, self.wv))
        y = sdpa(q, k, v)
        return self.wo(y.transpose(1, 2).reshape(y.shape[2], -1))


class Block(torch_reference.Block):
    def __init__(self, item: WorkItem):
        super().__init__(item)
        self.attn = Attention(item)


def build_plan(item: WorkItem, sequence_parallel: bool) -> Plan:
    if item.kind == "head":
        return Plan({"embedding": "vocab_embedding", "lm_head": "vocab_head"}, sequence_parallel=sequence_parallel)
    heads = (item.heads, item.kv_heads, item.head_dim)
    return Plan(
        {
            "attn.wq": Column(QueryHeads(*heads), group="qkv"),
            "attn.wk": Column(KeyValueHeads(*heads), group="qkv"),
            "attn.wv": Column(KeyValueHeads(*heads), group="qkv"),
            "attn.wo": Row(QueryHeads(*heads)),
            "mlp.w_gate": Column(group="gate_up"),
            "mlp.w_up": Column(group="gate_up"),
            "mlp.w_down": "row",
            "*_norm": "token_local",
        },
        sequence_parallel=sequence_parallel,
    )


def build_model(item: WorkItem) -> nn.Module:
    with torch.device("meta"):
        model = (Block if item.kind == "block" else Head)(item)
    model = model.to(DTYPES[item.dtype]).to_empty(device="cpu")
    with torch.no_grad():
        for name, weight in named_weights(model).items():
            weight.copy_(torch.from_numpy(item.weight(name)))
    return model


def setup(rank: int, world: int, item: WorkItem, *, mode: str = "sp", overlap: str = "auto", **settings: str):
    init_gloo(rank, world)
    mesh = build_mesh(MeshShape(tp=world))
    config = OverlapConfig(policy=overlap, **settings)
    model = parallelize(build_model(item), mesh, build_plan(item, mode == "sp"), overlap=config)
    weights = named_weights(model)
    if item.kind == "head":

        def loss(tokens, targets):
            return vocab_parallel_cross_entropy(model(tokens), targets, mesh, vocab_size=item.vocab)

        inputs = (torch.from_numpy(item.tokens()).flatten(), torch.from_numpy(item.targets()).flatten())
        return make_step(item, loss, inputs, weights, copies={"loss": world})

    copies = {"attn_norm": world, "mlp_norm": world}
    x, dy = (tensor(array, item).flatten(0, 1) for array in (item.x(), item.dy()))
    if mode == "sp":
        x, dy = shard_tokens(x, mesh), shard_tokens(dy, mesh)
    else:
        copies |= {"loss": world, "x": world}
    return make_step(item, model, (x.requires_grad_(),), weights, dy=dy, copies=copies)
