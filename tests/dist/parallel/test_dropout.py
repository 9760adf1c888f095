"""A model trained with dropout computes the same on every mesh: forward, loss and every gradient."""

import pytest
import torch
from torch import Tensor, nn

from plait import parallelize, vocab_parallel_cross_entropy
from plait.comm.mesh import build_mesh
from plait.config.model import GptConfig
from plait.contract.model import derive_plan
from plait.contract.plan import Column, HeadLocal, Plan, Row
from plait.models import build_model, initialize
from plait.models.gpt import GptModel
from plait.parallel.apply import ownership_of
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.shard import gather_tensor
from plait.sharding import MeshShape, QueryHeads
from tests.support.lone_mesh import build_lone_mesh

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


class Network(nn.Module):
    """A user's own: torch's dropouts, on tokens and on attention probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(19, 12), nn.Linear(12, 19)
        self.drop, self.drop_heads = nn.Dropout(0.4), nn.Dropout(0.3)
        self.mix = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.out = nn.Linear(12, 12)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_TD = self.drop(self.embed(ids_BS.flatten()))
        q, k, v = (linear(x_TD).view(*ids_BS.shape, -1, 3).transpose(1, 2) for linear in self.mix)
        y = self.drop_heads((q @ k.mT).softmax(-1)) @ v
        return self.head(x_TD + self.drop(self.out(y.transpose(1, 2).flatten(0, 1).flatten(1))))


HEADS = QueryHeads(num_heads=4, num_kv_heads=4, head_width=3)
PLAN = {
    "embed": "vocab_embedding",
    "mix.*": Column(HEADS, group="qkv"),
    "out": Row(HEADS),
    "head": "vocab_head",
    "drop": "token_local",
    "drop_heads": HeadLocal(HEADS),
}


def run_users_dropout(*, tp: int, sequence_parallel: bool) -> None:
    tokens = torch.arange(B * S).view(B, S) * 5 % 19
    grads = []
    for mesh in (build_lone_mesh(1), build_mesh(MeshShape(tp=tp))):
        torch.manual_seed(0)
        model = parallelize(Network().double(), mesh, Plan(PLAN, sequence_parallel=sequence_parallel))
        seed_dropout(model, 5)
        set_dropout_offset(model, 3 * B * S)
        torch.manual_seed(mesh.tp.rank)  # what torch's own dropout would draw from
        vocab_parallel_cross_entropy(model(tokens), tokens.flatten().roll(-1), mesh, vocab_size=19).backward()
        grads.append({n: gather_tensor(p.grad, ownership_of(model)[n], mesh) for n, p in model.named_parameters()})
    for name, whole in grads[0].items():
        torch.testing.assert_close(grads[1][name], whole, **FLOAT64_ROUNDING)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize("tp", [2, 3])
def test_dropouts_of_a_users_module_drop_the_same_at_every_degree(ranks, tp, sequence_parallel):
    """FIELD 3.15: one rank is a degree too."""
    ranks(tp).call(run_users_dropout, tp=tp, sequence_parallel=sequence_parallel)
