"""The norm of a sharded model's gradients is that of the unsharded one, whatever is cut, whole, tied or replicated."""

import pytest
import torch
from torch import nn

from plait import clip_grad_norm_, parallelize
from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.contract.collective import Collective
from plait.contract.model import derive_plan
from plait.models import build_model
from plait.parallel.apply import ownership_of
from plait.parallel.shard import shard_tensor
from plait.sharding import Kind, MeshShape

FLOAT64_ROUNDING = {"rtol": 1e-13, "atol": 0.0}
"""Two orders of summing a few thousand squares, all positive, in float64."""
MAX_NORM = 0.5

SIZES = {"num_layers": 2, "width": 24, "vocab_size": 19, "max_seq_len": 8}
CONFIGS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(num_heads=6, num_kv_heads=6, mlp_width=20, **SIZES),
    "llama with replicated KV heads and biases": LlamaConfig(
        num_heads=6, num_kv_heads=1, mlp_width=20, qkv_bias=True, **SIZES
    ),
    "llama tied": LlamaConfig(num_heads=6, num_kv_heads=2, mlp_width=20, tied_embeddings=True, **SIZES),
    "gpt tied": GptConfig(num_heads=4, **SIZES),
}


def set_gradients(model: nn.Module, dense: nn.Module, tp_rank: int) -> None:
    """Give `dense` gradients and `model` its parts of them, as the layers would leave them."""
    generator = torch.Generator().manual_seed(0)
    for (name, param), whole in zip(model.named_parameters(), dense.parameters(), strict=True):
        whole.grad = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
        param.grad = shard_tensor(whole.grad, ownership_of(model)[name], tp_rank)


def run_clipping(*, shape: MeshShape, config: ModelConfig, sequence_parallel: bool) -> float:
    mesh = build_mesh(shape, reduce_dtype=torch.bfloat16)
    dense, model = (build_model(config, dtype=torch.float64) for _ in range(2))
    parallelize(model, mesh, derive_plan(config, sequence_parallel=sequence_parallel))
    set_gradients(model, dense, mesh.tp.rank)
    with record() as trace:
        norm = clip_grad_norm_(model, MAX_NORM)
    expected = nn.utils.clip_grad_norm_(dense.parameters(), MAX_NORM)
    torch.testing.assert_close(norm, expected, **FLOAT64_ROUNDING)
    for (name, param), whole in zip(model.named_parameters(), dense.parameters(), strict=True):
        own = shard_tensor(whole.grad, ownership_of(model)[name], mesh.tp.rank)
        torch.testing.assert_close(param.grad, own, **FLOAT64_ROUNDING)
    assert trace.collectives == [Collective(Kind.ALL_REDUCE, "tp", shape.tp, (1,), "float64")]
    return norm.item()


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [MeshShape(tp=2), MeshShape(tp=3), MeshShape(dp_replicate=2, tp=2)], ids=str)
def test_norm_and_clipped_gradients_equal_single_device(ranks, shape, name, sequence_parallel):
    """FIELD 3.11, 3.28: every element once, by ownership, whatever mixture of cut, whole and tied parameters it is."""
    norms = ranks(shape.world_size).call(
        run_clipping, shape=shape, config=CONFIGS[name], sequence_parallel=sequence_parallel
    )
    assert len(set(norms)) == 1
