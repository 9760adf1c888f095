"""Cross-entropy, log-probability and entropy of logits whose vocabulary is cut over tp.

Every rank holds `[T, V/tp]` and learns a few numbers per token from the others; the logits are never gathered. They are
read in chunks of tokens, so that they never exist whole in float32. Kept for backward are the logits in their own dtype
and a few numbers per token. All results are in float32 (float64 for float64 logits) and the same on every tp rank.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from plait.comm.autograd.once import once_differentiable
from plait.comm.mesh import Mesh
from plait.errors import ConfigError
from plait.parallel.vocab import OwnTargets, VocabShard, build_vocab_shard, iterate_shifted

Reduction = Literal["mean", "sum", "none"]


def vocab_parallel_cross_entropy(
    logits_shard: Tensor,
    targets: Tensor,
    mesh: Mesh | None = None,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross-entropy as `torch.nn.functional.cross_entropy` defines it, over a vocabulary cut over tp.

        logits_shard   [T, V/tp]    own columns; any leading dims of tokens
        targets        [T]          the same on all tp ranks
        loss           [] or [T]    the same on all tp ranks

        forward    all_reduce max [T], then all_reduce sum [2, T] (with label smoothing [3, T]) over tp
        backward   nothing moves; the gradient has the dtype of the logits

    `label_smoothing` spreads over the true `vocab_size`; `z_loss` adds that multiple of `logsumexp(logits)**2`. The
    mean is over the targets that are not ignored; over none of them it is nan, as in torch, with a zero gradient.
    Without a mesh, or on one of tp degree 1, the logits are whole. Contract: `contract.loss.derive_cross_entropy`.

    Raises:
        ShardingError: the logits are not this rank's columns (whole ones, say), or a target is not in the vocabulary.
    """
    _check_options(label_smoothing, z_loss, reduction)
    vocab = build_vocab_shard(logits_shard, mesh, vocab_size)
    is_valid = targets != ignore_index
    terms = _Terms(vocab, label_smoothing, z_loss)
    loss = _compute_loss(logits_shard, targets, is_valid, terms)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / is_valid.sum()


def vocab_parallel_log_prob(
    logits_shard: Tensor, targets: Tensor, mesh: Mesh | None = None, *, vocab_size: int
) -> Tensor:
    """Log-probability of each target.

        logits_shard   [T, V/tp]    own columns; any leading dims of tokens
        targets        [T]          the same on all tp ranks
        log_prob       [T]          the same on all tp ranks

        forward    all_reduce max [T], then all_reduce sum [2, T] over tp
        backward   nothing moves; every shard gets its gradient, also those that do not own the target

    Contract: `contract.loss.derive_log_prob`.
    """
    vocab = build_vocab_shard(logits_shard, mesh, vocab_size)
    return -_compute_loss(logits_shard, targets, torch.ones_like(targets, dtype=torch.bool), _Terms(vocab))


def vocab_parallel_entropy(logits_shard: Tensor, mesh: Mesh | None = None, *, vocab_size: int) -> Tensor:
    """Entropy of each token's distribution over the vocabulary, in nats.

        logits_shard   [T, V/tp]    own columns; any leading dims of tokens
        entropy        [T]          the same on all tp ranks

        forward    all_reduce max [T], then all_reduce sum [2, T] over tp
        backward   nothing moves

    Contract: `contract.loss.derive_entropy`.
    """
    vocab = build_vocab_shard(logits_shard, mesh, vocab_size)
    return _Entropy.apply(logits_shard.flatten(0, -2), vocab).view(logits_shard.shape[:-1])


@dataclass(frozen=True)
class _Terms:
    """What the loss of a token is made of."""

    vocab: VocabShard
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def _check_options(label_smoothing: float, z_loss: float, reduction: str) -> None:
    problems = []
    if not 0 <= label_smoothing < 1:
        problems.append(f"label_smoothing {label_smoothing} is not 0 <= label_smoothing < 1")
    if not z_loss >= 0:
        problems.append(f"z_loss {z_loss} is not >= 0")
    if reduction not in ("mean", "sum", "none"):
        problems.append(f"reduction {reduction!r} is not one of mean, sum, none")
    if problems:
        raise ConfigError.from_problems("vocab_parallel_cross_entropy", problems)


def _compute_loss(logits_shard: Tensor, targets: Tensor, is_valid: Tensor, terms: _Terms) -> Tensor:
    terms.vocab.check_targets(logits_shard, targets, is_valid)
    flat = (logits_shard.flatten(0, -2), targets.flatten(), is_valid.flatten())
    return _CrossEntropy.apply(*flat, terms).view(targets.shape)


class _CrossEntropy(torch.autograd.Function):
    """Loss of each token, zero where it is not valid.

    With `m` the largest logit, `s = sum(exp(x - m))`, target `t`, smoothing `e` and z-loss `z`:

        loss            log(s) - (1-e) (x[t] - m) - e/V sum(x - m) + z lse^2      lse = m + log(s)
        d loss / dx     (1 + 2 z lse) exp(x - lse) - (1-e) [is target] - e/V
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, is_valid_T: Tensor, terms: _Terms) -> Tensor:
        own_targets = terms.vocab.locate(targets_T)
        max_T = terms.vocab.reduce_max(logits_TV)
        sums = max_T.new_empty(3 if terms.label_smoothing else 2, len(max_T))
        for rows, shifted in iterate_shifted(logits_TV, max_T):
            sums[1, rows] = own_targets.take(shifted, rows)
            if terms.label_smoothing:
                sums[2, rows] = shifted.sum(-1)
            sums[0, rows] = shifted.exp_().sum(-1)
        sums = terms.vocab.reduce_sum(sums)
        log_sum_T = sums[0].log()
        lse_T = max_T + log_sum_T
        loss_T = log_sum_T - (1 - terms.label_smoothing) * sums[1] + terms.z_loss * lse_T.square()
        if terms.label_smoothing:
            loss_T -= terms.label_smoothing / terms.vocab.size * sums[2]
        ctx.save_for_backward(logits_TV, lse_T, is_valid_T, *own_targets)
        ctx.terms = terms
        return loss_T.masked_fill_(~is_valid_T, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_T: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, lse_T, is_valid_T, *own_targets = ctx.saved_tensors
        terms, own = ctx.terms, OwnTargets(*own_targets)
        grad_T = grad_loss_T.masked_fill(~is_valid_T, 0)
        probability_scale_T = 1 + 2 * terms.z_loss * lse_T
        grad_logits = torch.empty_like(logits_TV)
        for rows, shifted in iterate_shifted(logits_TV, lse_T, out=grad_logits):
            grad = shifted.exp_()
            if terms.z_loss:
                grad.mul_(probability_scale_T[rows].unsqueeze(1))
            own.subtract_(grad, rows, 1 - terms.label_smoothing)
            if terms.label_smoothing:
                grad -= terms.label_smoothing / terms.vocab.size
            grad.mul_(grad_T[rows].unsqueeze(1))
            if grad.dtype is not grad_logits.dtype:
                grad_logits[rows] = grad
        return grad_logits, None, None, None


class _Entropy(torch.autograd.Function):
    """Entropy of each token.

    With `u = exp(x - m)`, `s = sum(u)` and `entr(u) = -u log(u)`, which is 0 at 0 (a logit of -inf):

        entropy            log(s) + sum(entr(u)) / s
        d entropy / dx     entr(p) - p * entropy           p = exp(x - lse)
    """

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, vocab: VocabShard) -> Tensor:
        max_T = vocab.reduce_max(logits_TV)
        sums = max_T.new_empty(2, len(max_T))
        for rows, shifted in iterate_shifted(logits_TV, max_T):
            weights = shifted.exp_()
            sums[0, rows] = weights.sum(-1)
            sums[1, rows] = torch.special.entr(weights).sum(-1)
        sums = vocab.reduce_sum(sums)
        log_sum_T = sums[0].log()
        entropy_T = log_sum_T + sums[1] / sums[0]
        ctx.save_for_backward(logits_TV, max_T + log_sum_T, entropy_T)
        return entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_entropy_T: Tensor) -> tuple[Tensor, None]:
        logits_TV, lse_T, entropy_T = ctx.saved_tensors
        grad_logits = torch.empty_like(logits_TV)
        for rows, shifted in iterate_shifted(logits_TV, lse_T):
            p = shifted.exp_()
            grad = torch.special.entr(p).sub_(p.mul_(entropy_T[rows].unsqueeze(1)))
            grad_logits[rows] = grad.mul_(grad_entropy_T[rows].unsqueeze(1))
        return grad_logits, None
