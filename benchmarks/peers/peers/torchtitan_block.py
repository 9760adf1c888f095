"""torchtitan 0.3.0: its own Llama3TransformerBlock, sharded by ``Module.parallelize``.

torchtitan picks its device from the available accelerators and falls back to "cuda" on a CPU
machine, so two lines (PATCH) tell it to use the CPU; its trainer and its language-model attention
backends (FlexAttention compiled, varlen) are not used: the block is built from torchtitan's config
classes with its ScaledDotProductAttention, and the rotary embedding is replaced by the identity.
"""

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # PATCH: device type
torch._utils._get_device_module = lambda kind: getattr(torch, kind)  # PATCH

import torch.nn as nn  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.models.common import ComplexRoPE, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.llama3.model import Llama3TransformerBlock  # noqa: E402
from torchtitan.models.llama3.sharding import _set_llama3_layer_sharding  # noqa: E402

from harness.torch_reference import DTYPES, init_gloo, tensor  # noqa: E402
from harness.torch_steps import make_step  # noqa: E402
from harness.workitem import EPS, WorkItem, shard  # noqa: E402

NAMES = {
    "attn_norm": "attention_norm",
    "wq": "attention.qkv_linear.wq",
    "wk": "attention.qkv_linear.wk",
    "wv": "attention.qkv_linear.wv",
    "wo": "attention.wo",
    "mlp_norm": "ffn_norm",
    "w_gate": "feed_forward.w1",
    "w_up": "feed_forward.w3",
    "w_down": "feed_forward.w2",
}


class NoRope(nn.Module):
    def forward(self, q, k, positions=None):
        return q, k


def setup(rank: int, world: int, item: WorkItem, *, mode: str = "sp", backend: str = "partial_dtensor"):
    init_gloo(rank, world)
    sequence = mode == "sp"
    init = {"weight": nn.init.ones_}
    config = Llama3TransformerBlock.Config(
        attention_norm=RMSNorm.Config(normalized_shape=item.hidden, eps=EPS, param_init=init),
        ffn_norm=RMSNorm.Config(normalized_shape=item.hidden, eps=EPS, param_init=init),
        attention=make_gqa_config(
            dim=item.hidden,
            n_heads=item.heads,
            n_kv_heads=item.kv_heads,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=ComplexRoPE.Config(dim=item.head_dim, max_seq_len=item.seq),
            fuse_qkv=False,
        ),
        feed_forward=make_ffn_config(dim=item.hidden, hidden_dim=item.ffn, w1_param_init=init, w2w3_param_init=init),
    )
    _set_llama3_layer_sharding(config, enable_sp=sequence)
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=world, pp=1, ep=1, world_size=world, spmd_backend=backend)
    dims.build_mesh()
    block = config.build().to(DTYPES[item.dtype])
    with torch.no_grad():
        for name, path in NAMES.items():
            block.get_submodule(path).weight.copy_(torch.from_numpy(item.weight(name)))
    block.attention.rope = NoRope()
    block.parallelize(dims)
    weights = {n: block.get_submodule(path).weight for n, path in NAMES.items()}

    x, dy = item.x(), item.dy()
    copies = {}
    if sequence:
        x, dy = shard(x, rank, world, 1), shard(dy, rank, world, 1)
    else:
        copies = dict(loss=world, x=world, attn_norm=world, mlp_norm=world)

    layout = [Shard(1) if sequence else Replicate()]

    def forward(x):
        # inside torchtitan's decoder the stream between blocks is a DTensor already
        out = block(DTensor.from_local(x, dims.get_mesh("tp"), layout, run_check=False), None)
        return out.to_local() if isinstance(out, DTensor) else out

    return make_step(item, forward, (tensor(x, item, True),), weights, dy=tensor(dy, item), copies=copies)
