"""Dropout masks: one mask of the whole run, of which every rank, micro-batch and recomputation sees its part."""

import pytest
import torch
from torch import Tensor, nn

from plait.errors import ConfigError, ShardingError
from plait.parallel.dropout import AttentionDropout, Dropout, seed_dropout, set_dropout_offset
from plait.sharding import build_head_splits, build_split
from tests.support.lone_mesh import build_lone_mesh

P = 0.25


def prepare(module: nn.Module, *, seed: int = 0, first_token: int = 0) -> nn.Module:
    seed_dropout(module, seed)
    set_dropout_offset(module, first_token)
    return module


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def run_on_own_tokens(tokens: int, degree: int, rank: int) -> Tensor:
    mesh = build_lone_mesh(degree, rank)
    mesh.tokens = build_split(tokens, degree)
    module = prepare(Dropout(P), first_token=1000)
    module.apply_mesh(mesh)
    return module(ones(mesh.tokens.lengths[rank], 6))


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_mask_of_own_tokens_is_part_of_the_dense_mask(degree):
    """FIELD 3.15: the same dropout for every tp degree, also where 7 tokens do not divide."""
    dense = prepare(Dropout(P), first_token=1000)(ones(7, 6))
    assert torch.equal(torch.cat([run_on_own_tokens(7, degree, rank) for rank in range(degree)]), dense)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "degree"), [(8, 8, 3), (8, 4, 2), (6, 2, 4)])
def test_mask_of_own_heads_is_part_of_the_dense_mask(num_heads, num_kv_heads, degree):
    """FIELD 3.15, for heads cut unevenly, in units of heads or of the features the plan cuts."""
    dense = prepare(AttentionDropout(P), first_token=15)(ones(2, num_heads, 5, 5))
    for width in (1, 16):
        split = build_head_splits(num_heads, num_kv_heads, width, degree).query
        parts = []
        for rank in range(degree):
            module = prepare(AttentionDropout(P), first_token=15)
            module.apply_heads(split, rank)
            parts.append(module(ones(2, split.lengths[rank] // width, 5, 5)))
        assert torch.equal(torch.cat(parts, dim=1), dense)


def test_micro_batches_see_parts_of_the_mask_of_one_large_batch():
    tokens, heads = prepare(Dropout(P)), prepare(AttentionDropout(P))
    dense_tokens, dense_heads = tokens(ones(20, 6)), heads(ones(4, 3, 5, 5))
    for first in (0, 2):
        set_dropout_offset(tokens, first * 5)
        set_dropout_offset(heads, first * 5)
        assert torch.equal(tokens(ones(10, 6)), dense_tokens[first * 5 : first * 5 + 10])
        assert torch.equal(heads(ones(2, 3, 5, 5)), dense_heads[first : first + 2])


def test_masks_differ_between_modules_seeds_and_steps():
    pair = prepare(nn.Sequential(Dropout(P), Dropout(P)))
    masks = [pair[0](ones(8, 16)), pair[1](ones(8, 16))]
    masks.append(prepare(pair, seed=1)[0](ones(8, 16)))
    masks.append(prepare(pair, first_token=8)[0](ones(8, 16)))
    for index, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:index])


@pytest.mark.parametrize("module", [Dropout(P), AttentionDropout(P)])
def test_forward_and_backward_use_one_mask_and_keep_the_mean(module):
    prepare(module)
    x = torch.arange(1.0, 1 + 2 * 4 * 16 * 16, dtype=torch.float64).view(2, 4, 16, 16).requires_grad_()
    y = module(x)
    y.backward(3 * ones(*x.shape))
    is_kept = y != 0
    assert torch.equal(y, is_kept * x * (1 / (1 - P)))
    assert torch.equal(x.grad, is_kept * 3 * (1 / (1 - P)))
    # 4 standard deviations of the share of 2048 elements kept
    assert abs(is_kept.double().mean().item() - (1 - P)) < 0.04


def test_leading_dims_are_tokens():
    module = prepare(Dropout(P))
    assert torch.equal(module(ones(2, 5, 6)), module(ones(10, 6)).view(2, 5, 6))


def test_keeps_one_byte_per_element_for_backward():
    saved: list[Tensor] = []
    module, x = prepare(Dropout(P)), ones(8, 16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        module(x)
    assert [(tensor.dtype, tensor.numel()) for tensor in saved] == [(torch.bool, 128)]


@pytest.mark.parametrize("kind", [Dropout, AttentionDropout])
def test_is_the_identity_in_eval_mode_and_at_rate_zero(kind):
    x = ones(1, 2, 3, 3)
    assert kind(P).eval()(x) is x
    assert kind(0.0)(x) is x


def test_a_mask_that_is_not_defined_is_refused():
    without_seed, without_offset = Dropout(P), Dropout(P)
    set_dropout_offset(without_seed, 0)
    seed_dropout(without_offset, 0)
    with pytest.raises(ConfigError, match=r"no seed(.|\n)*seed_dropout\(model, seed\)"):
        without_seed(ones(2, 3))
    with pytest.raises(ConfigError, match=r"every step would get one mask(.|\n)*set_dropout_offset"):
        without_offset(ones(2, 3))


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_a_rate_outside_its_range_is_refused(p):
    with pytest.raises(ConfigError, match=r"is not 0 <= p < 1"):
        Dropout(p)


def test_tokens_that_are_not_this_ranks_are_refused():
    mesh = build_lone_mesh(2, 1)
    mesh.tokens = build_split(7, 2)
    module = prepare(Dropout(P))
    module.apply_mesh(mesh)
    with pytest.raises(ShardingError, match=r"dropout: got 7 tokens \[7, 6\], but tp rank 1 holds 4:7 of 7"):
        module(ones(7, 6))


def test_heads_that_are_not_this_ranks_are_refused():
    module = prepare(AttentionDropout(P))
    module.apply_heads(build_split(8 * 16, 2, 16), 0)
    with pytest.raises(ShardingError, match=r"got 6 heads, but tp rank 0 holds features 0:64"):
        module(ones(1, 6, 3, 3))


def test_an_offset_within_a_sequence_is_refused():
    with pytest.raises(ShardingError, match=r"first token 7 does not begin a sequence of 5"):
        prepare(AttentionDropout(P), first_token=7)(ones(1, 2, 5, 5))
