"""Losses of an uncut vocabulary against torch's, their memory and what they refuse; cut ones are in tests/dist."""

from math import inf, isnan

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait import vocab_parallel_cross_entropy, vocab_parallel_entropy, vocab_parallel_log_prob
from plait.errors import ConfigError, ShardingError
from plait.parallel import vocab
from tests.support.lone_mesh import build_lone_mesh

T, V = 13, 11
FLOAT64_ROUNDING = {"rtol": 1e-12, "atol": 1e-13}
"""Two orders of summation over 11 columns in float64."""


def build_logits(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    logits = 3 * torch.randn(T, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits.to(dtype).requires_grad_()


def build_targets() -> Tensor:
    targets = torch.arange(T) * 7 % V
    targets[3] = targets[7] = -100
    return targets


@pytest.fixture(
    params=[1 << 20, 5 * V * 8, 1], ids=["one chunk", "chunks of 5 tokens", "a token at a time"], autouse=True
)
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(vocab, "CHUNK_BYTES", request.param)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_index", [-100, 4])
def test_cross_entropy_and_its_gradient_equal_torchs(reduction, label_smoothing, ignore_index):
    ours, theirs = build_logits(), build_logits()
    targets = build_targets().clamp(min=0) if ignore_index == 4 else build_targets()
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    loss = vocab_parallel_cross_entropy(ours, targets, vocab_size=V, **options)
    expected = F.cross_entropy(theirs, targets, **options)
    torch.testing.assert_close(loss, expected, **FLOAT64_ROUNDING)
    weights = torch.linspace(1, 2, loss.numel(), dtype=torch.float64).view(loss.shape)
    loss.backward(weights)
    expected.backward(weights)
    torch.testing.assert_close(ours.grad, theirs.grad, **FLOAT64_ROUNDING)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_z_loss_adds_the_squared_logsumexp_of_tokens_that_are_not_ignored(reduction):
    ours, theirs, targets = build_logits(), build_logits(), build_targets()
    loss = vocab_parallel_cross_entropy(ours, targets, vocab_size=V, z_loss=0.01, reduction=reduction)
    squares = theirs.logsumexp(-1).square()[targets != -100]
    expected = F.cross_entropy(theirs, targets, reduction=reduction) + 0.01 * getattr(squares, reduction)()
    torch.testing.assert_close(loss, expected, **FLOAT64_ROUNDING)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, **FLOAT64_ROUNDING)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_of_all_terms_equal_finite_differences(reduction):
    def compute(logits: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits, build_targets(), vocab_size=V, label_smoothing=0.2, z_loss=0.05, reduction=reduction
        )

    assert torch.autograd.gradcheck(compute, (build_logits(),))


def test_log_prob_and_entropy_gradients_equal_finite_differences():
    """FIELD 3.12: log-probability and entropy are ops with a backward of their own."""
    targets = torch.arange(T) % V
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_log_prob(x, targets, vocab_size=V), (build_logits(),))
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_entropy(x, vocab_size=V), (build_logits(),))


def test_log_prob_and_entropy_equal_those_of_the_distribution():
    logits, targets = build_logits(), torch.arange(T) % V
    distribution = torch.distributions.Categorical(logits=logits)
    log_prob = vocab_parallel_log_prob(logits, targets, vocab_size=V)
    torch.testing.assert_close(log_prob, distribution.log_prob(targets), **FLOAT64_ROUNDING)
    torch.testing.assert_close(vocab_parallel_entropy(logits, vocab_size=V), distribution.entropy(), **FLOAT64_ROUNDING)


def test_columns_masked_to_minus_infinity_have_no_part():
    """FIELD 3.3: columns masked out change neither the losses nor the gradients of the others."""
    masked, short = build_logits(), build_logits()[:, : V - 2].detach().requires_grad_()
    targets = torch.arange(T) % (V - 2)
    with torch.no_grad():
        masked[:, V - 2 :] = -inf
    for logits, size in ((masked, V), (short, V - 2)):
        loss = vocab_parallel_cross_entropy(logits, targets, vocab_size=size, z_loss=0.01)
        (loss + vocab_parallel_entropy(logits, vocab_size=size).sum()).backward()
    torch.testing.assert_close(masked.grad[:, : V - 2], short.grad, **FLOAT64_ROUNDING)
    assert (masked.grad[:, V - 2 :] == 0).all()


def test_large_logits_do_not_overflow():
    logits, targets = build_logits().detach() + 1e5, build_targets()
    loss = vocab_parallel_cross_entropy(logits.float(), targets, vocab_size=V, label_smoothing=0.1)
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), targets, label_smoothing=0.1))


def test_leading_dims_are_tokens():
    logits, targets = build_logits()[:12], torch.arange(12) % V
    flat = vocab_parallel_cross_entropy(logits, targets, vocab_size=V, reduction="none")
    shaped = vocab_parallel_cross_entropy(logits.view(3, 4, V), targets.view(3, 4), vocab_size=V, reduction="none")
    assert torch.equal(shaped, flat.view(3, 4))
    assert vocab_parallel_entropy(logits.view(3, 4, V), vocab_size=V).shape == (3, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_computed_in_float32_and_get_a_gradient_of_their_dtype(dtype):
    ours = build_logits(dtype=dtype)
    theirs = ours.detach().float().requires_grad_()
    loss = vocab_parallel_cross_entropy(ours, build_targets(), vocab_size=V)
    expected = F.cross_entropy(theirs, build_targets())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert ours.grad.dtype == dtype
    torch.testing.assert_close(ours.grad, theirs.grad.to(dtype))


def test_a_batch_of_ignored_targets_has_no_gradient():
    """The sum is 0 and the mean nan, as in torch; a trainer that divides by a global count of targets uses the sum."""
    for reduction in ("sum", "mean"):
        logits = build_logits()
        loss = vocab_parallel_cross_entropy(logits, torch.full((T,), -100), vocab_size=V, reduction=reduction)
        assert loss.item() == 0 if reduction == "sum" else isnan(loss.item())
        loss.backward()
        assert (logits.grad == 0).all()


class FloatTensors(TorchDispatchMode):
    """Notes the most float32 elements of one tensor made by an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            self.num_elements = max(self.num_elements, out.numel())
        return out


def test_logits_never_exist_whole_in_float32(monkeypatch):
    monkeypatch.setattr(vocab, "CHUNK_BYTES", 4 * 64 * 8)
    logits = torch.randn(256, 64).bfloat16().requires_grad_()
    targets = torch.arange(256) % 64
    with FloatTensors() as made:
        vocab_parallel_cross_entropy(logits, targets, vocab_size=64, label_smoothing=0.1, z_loss=0.1).backward()
        vocab_parallel_entropy(logits, vocab_size=64).sum().backward()
    assert made.num_elements <= max(64 * 8, 3 * 256)


def test_keeps_the_logits_and_numbers_per_token_for_backward():
    logits, targets = build_logits(dtype=torch.bfloat16), build_targets()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        vocab_parallel_cross_entropy(logits, targets, vocab_size=V, label_smoothing=0.1, reduction="sum")
    large = [tensor for tensor in saved if tensor.numel() > T]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]


@pytest.mark.parametrize("tp", [2, 3])
def test_whole_logits_are_refused_where_a_shard_is_due(tp):
    """FIELD 3.2: gathered logits in a sharded loss would add log(tp) and lose the target's gradient."""
    mesh, targets = build_lone_mesh(tp, 1), build_targets()
    with pytest.raises(ShardingError, match=rf"\[13, 11\] do not end in the \d columns \d+:\d+ of tp rank 1 of {tp}"):
        vocab_parallel_cross_entropy(build_logits(), targets, mesh, vocab_size=V)
    with pytest.raises(ShardingError, match="do not end in"):
        vocab_parallel_log_prob(build_logits(), targets, mesh, vocab_size=V)
    with pytest.raises(ShardingError, match="do not end in"):
        vocab_parallel_entropy(build_logits(), mesh, vocab_size=V)


def test_padded_logits_are_refused():
    """FIELD 3.3: the true vocabulary size is an argument, so that padding cannot join the softmax unseen."""
    with pytest.raises(ShardingError, match=r"do not end in the 10 columns 0:10 of a vocabulary of 10"):
        vocab_parallel_cross_entropy(build_logits(), build_targets(), vocab_size=V - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool])
def test_targets_that_are_no_indices_are_refused(dtype):
    with pytest.raises(ShardingError, match=f"targets of {dtype} are no indices"):
        vocab_parallel_cross_entropy(build_logits(), build_targets().to(dtype), vocab_size=V)


@pytest.mark.parametrize("bad", [V, -1])
def test_targets_outside_the_vocabulary_are_refused(bad):
    targets = build_targets()
    targets[5] = bad
    with pytest.raises(ShardingError, match=rf"target {bad} is not in the vocabulary 0:{V}"):
        vocab_parallel_cross_entropy(build_logits(), targets, vocab_size=V)
    with pytest.raises(ShardingError, match=r"target -?\d+ is not in the vocabulary"):
        vocab_parallel_log_prob(build_logits(), targets, vocab_size=V)


def test_targets_of_another_shape_are_refused():
    with pytest.raises(ShardingError, match=r"targets \[12\] do not match logits \[13, 11\]"):
        vocab_parallel_cross_entropy(build_logits(), build_targets()[1:], vocab_size=V)


def test_options_outside_their_range_are_refused_together():
    with pytest.raises(ConfigError, match=r"3 problems(.|\n)*label_smoothing 1.0(.|\n)*z_loss -1(.|\n)*'median'"):
        vocab_parallel_cross_entropy(
            build_logits(), build_targets(), vocab_size=V, label_smoothing=1.0, z_loss=-1, reduction="median"
        )
