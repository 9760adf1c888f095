"""megatron-core layers on gloo: Column/RowParallelLinear, VocabParallelEmbedding,
vocab_parallel_cross_entropy; with and without ``sequence_parallel``.

megatron-core builds its work buffers on ``torch.cuda.current_device()``.  On a CPU that call
raises, so this peer points it at "cpu" (the one line marked PATCH): sequence parallelism does
not run without it.  Activations are [seq, batch, hidden], as everywhere in Megatron.
"""

import torch
import torch.nn.functional as F

torch.cuda.current_device = lambda: "cpu"  # PATCH

from megatron.core import parallel_state  # noqa: E402
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

from harness.torch_reference import DTYPES, init_gloo, local_weight, sdpa, tensor  # noqa: E402
from harness.torch_steps import make_step  # noqa: E402
from harness.workitem import EPS, WorkItem, shard  # noqa: E402


def setup(rank: int, world: int, item: WorkItem, *, mode: str = "tp"):
    init_gloo(rank, world)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    sequence = mode == "sp"
    config = ModelParallelConfig(
        tensor_model_parallel_size=world,
        sequence_parallel=sequence,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=DTYPES[item.dtype],
        gradient_accumulation_fusion=False,
    )
    common = dict(config=config, init_method=lambda t: t, bias=False)

    def column(*names):
        """One ColumnParallelLinear holding several weights, as Megatron's fused qkv and gate/up."""
        out = sum(item.shape(n)[0] for n in names)
        layer = ColumnParallelLinear(item.hidden, out, gather_output=False, **common)
        with torch.no_grad():
            layer.weight.copy_(torch.cat([local_weight(item, n, rank, world) for n in names]))
        return layer

    def row(name):
        layer = RowParallelLinear(
            item.shape(name)[1], item.hidden, input_is_parallel=True, skip_bias_add=False, **common
        )
        with torch.no_grad():
            layer.weight.copy_(local_weight(item, name, rank, world))
        return layer

    copies = {"loss": world}
    if item.kind == "block":
        qkv, wo = column("wq", "wk", "wv"), row("wo")
        gate_up, w_down = column("w_gate", "w_up"), row("w_down")
        norms = {n: local_weight(item, n, rank, world).requires_grad_() for n in ("attn_norm", "mlp_norm")}
        heads = [item.heads // world, item.kv_heads // world, item.kv_heads // world]
        sizes = [h * item.head_dim for h in heads]

        def attention(h):
            fused = qkv(h)[0]  # the whole sequence, this rank's heads
            s, b, _ = fused.shape
            parts = fused.split(sizes, dim=-1)
            q, k, v = (p.reshape(s, b, n, item.head_dim).permute(1, 2, 0, 3) for p, n in zip(parts, heads))
            return wo(sdpa(q, k, v).permute(2, 0, 1, 3).reshape(s, b, -1))[0]

        def forward(x):
            x = x + attention(F.rms_norm(x, (item.hidden,), norms["attn_norm"], EPS))
            gate, up = gate_up(F.rms_norm(x, (item.hidden,), norms["mlp_norm"], EPS))[0].chunk(2, -1)
            return x + w_down(F.silu(gate) * up)[0]

        def to_sbh(a):
            a = a.swapaxes(0, 1)
            return tensor((shard(a, rank, world, 0) if sequence else a.copy()), item)

        def reduce_norms():  # what Megatron's finalize_model_grads does under sequence parallelism
            stacked = torch.stack([w.grad for w in norms.values()])
            torch.distributed.all_reduce(stacked)
            for w, g in zip(norms.values(), stacked):
                w.grad = g

        copies = {"attn_norm": world, "mlp_norm": world}
        if not sequence:
            copies |= {"loss": world, "x": world}
        weights = dict(norms, wo=wo.weight, w_down=w_down.weight, qkv=qkv.weight, gate_up=gate_up.weight)
        step, fingerprint = make_step(
            item,
            forward,
            (to_sbh(item.x()).requires_grad_(),),
            weights,
            dy=to_sbh(item.dy()),
            copies=copies,
            after_backward=reduce_norms if sequence else None,
        )

        def unfused():
            result = fingerprint()
            del result["qkv"], result["gate_up"]
            for names, w in ((("wq", "wk", "wv"), qkv.weight), (("w_gate", "w_up"), gate_up.weight)):
                rows = [item.shape(n)[0] // world for n in names]
                for n, g in zip(names, w.grad.split(rows)):
                    result[n] = float(g.double().square().sum())
            return result

        return step, unfused

    embedding = VocabParallelEmbedding(
        item.vocab, item.hidden, init_method=lambda t: t, config=config, reduce_scatter_embeddings=sequence
    )
    with torch.no_grad():
        embedding.weight.copy_(local_weight(item, "embedding", rank, world))
    lm_head = column("lm_head")

    def loss(tokens, targets):
        h = embedding(tokens)  # [s/p, b, h] under sequence parallelism, else [b, s, h]
        logits = lm_head(h if sequence else h.transpose(0, 1).contiguous())[0]
        return vocab_parallel_cross_entropy(logits, targets.transpose(0, 1)).mean()

    return make_step(
        item,
        loss,
        (torch.from_numpy(item.tokens()), torch.from_numpy(item.targets())),
        {"embedding": embedding.weight, "lm_head": lm_head.weight},
        copies=copies,
    )
