"""Initialisation with KV heads that are replicated over subgroups, which only real ranks can build."""

import pytest
import torch

from plait import parallelize
from plait.comm.mesh import build_mesh
from plait.config.model import LlamaConfig
from plait.contract.model import derive_plan
from plait.models import build_model, initialize
from plait.parallel.apply import ownership_of
from plait.parallel.shard import shard_tensor
from plait.sharding import MeshShape

CONFIG = LlamaConfig(
    num_layers=1, width=24, num_heads=6, num_kv_heads=2, mlp_width=20, vocab_size=19, max_seq_len=8, qkv_bias=True
)


def run_initialize(*, tp: int) -> None:
    mesh = build_mesh(MeshShape(tp=tp))
    dense, model = build_model(CONFIG), build_model(CONFIG, device="meta")
    initialize(dense, CONFIG, seed=0)
    parallelize(model, mesh, derive_plan(CONFIG))
    model.to_empty(device="cpu")
    initialize(model, CONFIG, seed=0)
    for (name, param), whole in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(param, shard_tensor(whole, ownership_of(model)[name], mesh.tp.rank)), name


@pytest.mark.parametrize("tp", [3, 4])
def test_replicated_kv_heads_have_the_same_numbers_on_every_member(ranks, tp):
    """FIELD 3.14: a function of the global tensor and global index, never of the shard."""
    ranks(tp).call(run_initialize, tp=tp)
