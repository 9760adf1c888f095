"""Embedding, norms and positions under sequence parallelism: layer-owned gradient sums, ties, uneven vocabularies."""

import pytest
import torch
from torch import Tensor, nn

from plait.comm.mesh import build_mesh
from plait.contract.plan import Plan
from plait.errors import ShardingError
from plait.parallel.apply import ownership_of, parallelize
from plait.parallel.tokens import gather_tokens
from plait.sharding import MeshShape
from tests.dist.parallel.test_linear import assert_grads_equal, fill_integers, integers

WIDTH = 6


class Scale(nn.Module):
    """A norm without its division: exact on integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class TiedModel(nn.Module):
    def __init__(self, vocab: int, positions: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH, padding_idx=vocab - 1)
        self.position = nn.Embedding(positions, WIDTH)
        self.norm = Scale()
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids) + self.position(positions)))


PLAN = {"embedding": "vocab_embedding", "position": "token_local", "norm": "token_local", "head": "vocab_head"}


def build(vocab: int) -> TiedModel:
    model = TiedModel(vocab, 5)
    fill_integers(model)
    return model


def run_tied(*, tp: int, vocab: int, tokens: int, sequence_parallel: bool) -> None:
    mesh = build_mesh(MeshShape(tp=tp))
    dense, model = build(vocab), build(vocab)
    parallelize(model, mesh, Plan(PLAN, sequence_parallel=sequence_parallel))
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in ownership_of(model)

    ids = torch.arange(tokens) * 7 % vocab
    ids[-1] = vocab - 1
    positions = torch.arange(tokens) % 5
    logits, logits_dense = model(ids, positions), dense(ids, positions)
    own = ownership_of(model)["embedding.weight"].intervals(mesh.tp.rank)[0]
    assert torch.equal(logits, logits_dense[:, own.start : own.stop])
    grad = integers(tokens, vocab, seed=3)
    logits.backward(grad[:, own.start : own.stop])
    logits_dense.backward(grad)
    assert_grads_equal(model, dense, mesh)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "ar"])
@pytest.mark.parametrize(("tp", "vocab", "tokens"), [(2, 33, 7), (3, 32, 7), (4, 9, 2), (2, 8, 1)], ids=str)
def test_tied_embedding_and_norms_equal_single_device_bit_for_bit(ranks, tp, vocab, tokens, sequence_parallel):
    """FIELD 3.8, 3.24, 3.27: the layer sums its gradients, true vocabulary sizes, one parameter with two uses."""
    ranks(tp).call(run_tied, tp=tp, vocab=vocab, tokens=tokens, sequence_parallel=sequence_parallel)


def run_wrong_positions(*, tp: int) -> None:
    model = parallelize(build(8), build_mesh(MeshShape(tp=tp)), Plan(PLAN))
    model(torch.zeros(6, dtype=torch.long), torch.zeros(3, dtype=torch.long))


def test_position_ids_of_another_length_are_refused(ranks):
    with pytest.raises(ShardingError, match="3 ids for 6 tokens"):
        ranks(2).call(run_wrong_positions, tp=2)


def run_unknown_id(*, tp: int) -> None:
    model = parallelize(build(8), build_mesh(MeshShape(tp=tp)), Plan(PLAN))
    model(torch.tensor([0, 8]), torch.tensor([0, 1]))


def test_an_id_beyond_the_vocabulary_is_refused(ranks):
    """Every rank would take it for another's, and embed it as zeros."""
    with pytest.raises(ShardingError, match="embedding: id 8 is not in the vocabulary 0:8"):
        ranks(2).call(run_unknown_id, tp=2)


def run_gather_without_entry(*, tp: int) -> None:
    gather_tokens(torch.zeros(3, WIDTH), build_mesh(MeshShape(tp=tp)))


def test_tokens_that_were_never_counted_are_refused(ranks):
    with pytest.raises(ShardingError, match="nothing said how many tokens"):
        ranks(2).call(run_gather_without_entry, tp=2)
