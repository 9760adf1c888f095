"""Losses whose vocabulary is cut over ranks against torch's on the whole logits: value, gradient and what moves.

A local vocabulary size shows in the smoothed loss, a missing sum in every loss, a target counted twice in the gradient.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait import vocab_parallel_cross_entropy, vocab_parallel_entropy, vocab_parallel_log_prob
from plait.comm.mesh import Mesh, build_mesh
from plait.comm.trace import record
from plait.contract.collective import Collective
from plait.errors import ShardingError
from plait.parallel.loss import Reduction
from plait.sharding import Kind, MeshShape, build_split

FLOAT64_ROUNDING = {"rtol": 1e-11, "atol": 1e-12}
"""Two orders of summation over at most 32,003 columns in float64."""

CUTS = pytest.mark.parametrize(("tp", "vocab", "tokens"), [(2, 32_003, 3), (3, 50, 9), (2, 9, 7)], ids=str)


def build_logits(vocab: int, tokens: int) -> Tensor:
    return 3 * torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build_targets(vocab: int, tokens: int) -> Tensor:
    """Targets on every rank, the first and last column among them, one of them ignored."""
    targets = torch.linspace(0, vocab - 1, tokens).long()
    targets[1] = -100
    return targets


def take_own(full: Tensor, mesh: Mesh) -> Tensor:
    own = build_split(full.shape[-1], mesh.tp.degree).intervals[mesh.tp.rank]
    return full[..., own.start : own.stop]


def run_cross_entropy(
    *, tp: int, vocab: int, tokens: int, label_smoothing: float, z_loss: float, reduction: Reduction
) -> list[float]:
    mesh, targets = build_mesh(MeshShape(tp=tp)), build_targets(vocab, tokens)
    dense = build_logits(vocab, tokens).requires_grad_()
    shard = take_own(dense.detach(), mesh).clone().requires_grad_()
    options = {"label_smoothing": label_smoothing, "reduction": reduction}
    with record() as trace:
        loss = vocab_parallel_cross_entropy(shard, targets, mesh, vocab_size=vocab, z_loss=z_loss, **options)
        loss.sum().backward()
    squares = dense.logsumexp(-1).square().masked_fill(targets == -100, 0)
    extra = squares if reduction == "none" else squares.sum()
    expected = F.cross_entropy(dense, targets, **options) + z_loss * extra / (tokens - 1 if reduction == "mean" else 1)
    expected.sum().backward()
    torch.testing.assert_close(loss, expected, **FLOAT64_ROUNDING)
    torch.testing.assert_close(shard.grad, take_own(dense.grad, mesh), **FLOAT64_ROUNDING)
    num_sums = 3 if label_smoothing else 2
    assert trace.collectives == [
        Collective(Kind.ALL_REDUCE, "tp", tp, (tokens,), "float64", op="max"),
        Collective(Kind.ALL_REDUCE, "tp", tp, (num_sums, tokens), "float64"),
    ]
    return loss.flatten().tolist()


@CUTS
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_cross_entropy_equals_that_of_the_whole_logits(ranks, tp, vocab, tokens, label_smoothing, z_loss, reduction):
    """FIELD 3.1, 3.3: smoothing and softmax over the true vocabulary, uneven shards, the same loss on every rank."""
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "reduction": reduction}
    losses = ranks(tp).call(run_cross_entropy, tp=tp, vocab=vocab, tokens=tokens, **options)
    assert all(loss == losses[0] for loss in losses)


def run_log_prob_and_entropy(*, tp: int, vocab: int, tokens: int) -> None:
    mesh, targets = build_mesh(MeshShape(tp=tp)), build_targets(vocab, tokens).clamp(min=0)
    weights = torch.linspace(1, 2, tokens, dtype=torch.float64)
    dense = build_logits(vocab, tokens).requires_grad_()
    distribution = torch.distributions.Categorical(logits=dense)
    for compute, expected in (
        (lambda shard: vocab_parallel_log_prob(shard, targets, mesh, vocab_size=vocab), distribution.log_prob(targets)),
        (lambda shard: vocab_parallel_entropy(shard, mesh, vocab_size=vocab), distribution.entropy()),
    ):
        shard = take_own(dense.detach(), mesh).clone().requires_grad_()
        with record() as trace:
            value = compute(shard)
            value.backward(weights)
        (grad,) = torch.autograd.grad(expected, dense, weights, retain_graph=True)
        torch.testing.assert_close(value, expected, **FLOAT64_ROUNDING)
        torch.testing.assert_close(shard.grad, take_own(grad, mesh), **FLOAT64_ROUNDING)
        assert (shard.grad != 0).all()
        assert [(entry.shape, entry.op) for entry in trace.collectives] == [((tokens,), "max"), ((2, tokens), "sum")]


@CUTS
def test_log_prob_and_entropy_have_a_gradient_on_every_shard(ranks, tp, vocab, tokens):
    """FIELD 3.12: a raw all-reduce has no backward, and shards without the target got wrong gradients."""
    ranks(tp).call(run_log_prob_and_entropy, tp=tp, vocab=vocab, tokens=tokens)


def run_in_half_precision(*, tp: int, vocab: int, tokens: int) -> None:
    mesh, targets = build_mesh(MeshShape(tp=tp), reduce_dtype=torch.bfloat16), build_targets(vocab, tokens)
    dense = build_logits(vocab, tokens).bfloat16()
    shard = take_own(dense, mesh).clone().requires_grad_()
    with record() as trace:
        loss = vocab_parallel_cross_entropy(shard, targets, mesh, vocab_size=vocab)
    loss.backward()
    assert {entry.dtype for entry in trace.collectives} == {"float32"}
    assert loss.dtype == torch.float32
    assert shard.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, F.cross_entropy(dense.float(), targets))


def test_statistics_are_reduced_in_float32_whatever_the_activations_are_reduced_in(ranks):
    """FIELD 3.18: the dtype of a reduction is stated and honoured."""
    ranks(2).call(run_in_half_precision, tp=2, vocab=50, tokens=9)


def run_whole_logits(*, tp: int) -> None:
    mesh = build_mesh(MeshShape(tp=tp))
    vocab_parallel_cross_entropy(build_logits(50, 4), build_targets(50, 4), mesh, vocab_size=50)


@pytest.mark.parametrize("tp", [2, 3])
def test_whole_logits_are_refused(ranks, tp):
    """FIELD 3.2: gathered logits in a sharded loss would add log(tp) and lose the target's gradient."""
    with pytest.raises(ShardingError, match=r"logits \[4, 50\] do not end in the \d+ columns"):
        ranks(tp).call(run_whole_logits, tp=tp)
