"""fairscale.nn.model_parallel layers on gloo (the layers of the original LLaMA release).

Column/RowParallelLinear, VocabParallelEmbedding and vocab_parallel_cross_entropy; there is no
sequence parallelism.  fairscale is no longer developed (last release 0.4.13, December 2022).
"""

import torch
import torch.nn.functional as F
from fairscale.nn.model_parallel import initialize_model_parallel
from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy
from fairscale.nn.model_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

from harness.torch_reference import (
    DTYPES,
    init_gloo,
    local_weight,
    merge_heads,
    sdpa,
    split_heads,
    tensor,
)
from harness.torch_steps import make_step
from harness.workitem import EPS, SHARD_DIM, WorkItem


def setup(rank: int, world: int, item: WorkItem):
    init_gloo(rank, world)
    initialize_model_parallel(world)
    layers = {}
    norms = {}
    torch.set_default_dtype(DTYPES[item.dtype])
    for name in item.weight_names:
        out = item.shape(name)[0]
        if SHARD_DIM[name] is None:
            norms[name] = local_weight(item, name, rank, world).requires_grad_()
            continue
        if name == "embedding":
            layer = VocabParallelEmbedding(item.vocab, item.hidden, init_method=lambda t: t)
        elif SHARD_DIM[name] == 0:
            layer = ColumnParallelLinear(item.hidden, out, bias=False, gather_output=False, init_method=lambda t: t)
        else:
            layer = RowParallelLinear(
                item.shape(name)[1], out, bias=False, input_is_parallel=True, init_method=lambda t: t
            )
        with torch.no_grad():
            layer.weight.copy_(local_weight(item, name, rank, world))
        layers[name] = layer
    torch.set_default_dtype(torch.float32)
    weights = norms | {n: m.weight for n, m in layers.items()}
    L = layers

    if item.kind == "block":

        def forward(x):
            h = F.rms_norm(x, (item.hidden,), norms["attn_norm"], EPS)
            q, k, v = (split_heads(L[n](h), item.head_dim) for n in ("wq", "wk", "wv"))
            x = x + L["wo"](merge_heads(sdpa(q, k, v)))
            h = F.rms_norm(x, (item.hidden,), norms["mlp_norm"], EPS)
            return x + L["w_down"](F.silu(L["w_gate"](h)) * L["w_up"](h))

        copies = {"loss": world, "x": world, "attn_norm": world, "mlp_norm": world}
        return make_step(
            item, forward, (tensor(item.x(), item, True),), weights, dy=tensor(item.dy(), item), copies=copies
        )

    def loss(tokens, targets):
        logits = L["lm_head"](L["embedding"](tokens))
        return vocab_parallel_cross_entropy(logits, targets).mean()

    return make_step(
        item, loss, (torch.from_numpy(item.tokens()), torch.from_numpy(item.targets())), weights, copies={"loss": world}
    )
