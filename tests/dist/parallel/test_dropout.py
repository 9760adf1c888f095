"""A model trained with dropout computes the same on every mesh: forward, loss and every gradient."""

import pytest
import torch

from plait import parallelize, vocab_parallel_cross_entropy
from plait.comm.mesh import build_mesh
from plait.config.model import GptConfig
from plait.contract.model import derive_plan
from plait.models import build_model, initialize
from plait.models.gpt import GptModel
from plait.parallel.apply import ownership_of
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.shard import gather_tensor
from plait.sharding import MeshShape

FLOAT64_ROUNDING = {"rtol": 1e-10, "atol": 1e-13}
"""Two orders of summation through two float64 layers. A mask that differs in one element shows at 1e-3."""

CONFIG = GptConfig(
    num_layers=2, width=24, num_heads=4, vocab_size=19, max_seq_len=8, dropout=0.3, attention_dropout=0.2
)
B, S = 2, 7


def build() -> GptModel:
    model = build_model(CONFIG, dtype=torch.float64)
    initialize(model, CONFIG, seed=0)
    seed_dropout(model, 5)
    set_dropout_offset(model, 3 * B * S)
    return model


def run_training_step(*, tp: int, sequence_parallel: bool) -> None:
    mesh = build_mesh(MeshShape(tp=tp))
    dense, model = build(), build()
    parallelize(model, mesh, derive_plan(CONFIG, sequence_parallel=sequence_parallel))
    tokens = torch.arange(B * S).view(B, S) * 5 % 19
    targets = tokens.flatten().roll(-1)
    loss = vocab_parallel_cross_entropy(model(tokens), targets, mesh, vocab_size=19)
    expected = vocab_parallel_cross_entropy(dense(tokens), targets, vocab_size=19)
    torch.testing.assert_close(loss, expected, **FLOAT64_ROUNDING)
    loss.backward()
    expected.backward()
    for (name, param), whole in zip(model.named_parameters(), dense.parameters(), strict=True):
        grad = gather_tensor(param.grad, ownership_of(model)[name], mesh)
        torch.testing.assert_close(grad, whole.grad, **FLOAT64_ROUNDING, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("tp", [2, 3])
def test_training_with_dropout_equals_single_device(ranks, tp, sequence_parallel):
    """FIELD 3.15: same seed, same masks, for 14 tokens and 4 heads over 2 and 3 ranks."""
    ranks(tp).call(run_training_step, tp=tp, sequence_parallel=sequence_parallel)
