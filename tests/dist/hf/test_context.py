"""A small model of each architecture over context ranks, in float64, against the unsharded one.

Positions that do not follow the tokens, a window that is not the layer's own, a scale that is not the model's, or a key
that a rank does not get, show in the logits; a gradient of keys that stays where it arose in that of a weight.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.comm import collectives
from plait.comm.mesh import build_mesh
from plait.config.axis.context import ContextConfig
from plait.contract.context.mask import AttentionMask, build_documents
from plait.contract.parameter import build_vocab_split
from plait.errors import ConfigError, ShardingError
from plait.hf.parallelize import parallelize
from plait.parallel.apply import enter_sequences
from plait.parallel.context.sequences import Documents, take_own_tokens
from plait.parallel.context.tokens import list_document_positions
from plait.parallel.loss import vocab_parallel_cross_entropy
from plait.verify.finetune.float64 import KeepFloat64
from plait.sharding import MeshShape
from plait.sharding.token_order import Order, build_order
from tests.support.architectures import ARCHITECTURES, VOCAB, build_model, cut_as, draw_ids

TOLERANCE = 1e-9
"""Of float64 sums in another order, through two layers: differences seen are some 1e-14."""

METHODS = ("ring", "all_gather", "all_to_all")

DOCUMENTS = build_documents([(4, 7), (1, 5, 3, 2)])
"""Of two rows of eleven tokens."""

CUT = {"attention_dropout": 0.0, "attn_pdrop": 0.0, "attn_logit_softcapping": None}
"""What some need to be cut, where they have it."""


def run_parity(
    *,
    name: str,
    cp: int,
    tp: int = 1,
    sequence_parallel: bool = True,
    method: str = "ring",
    order: str = "zigzag",
    shape: tuple[int, int] = (2, 11),
    documents: Documents = (),
    **config: Any,
) -> None:
    mesh, config = build_mesh(MeshShape(cp=cp, tp=tp)), {**CUT, **config}
    reference, model = build_model(name, **config), build_model(name, **config)
    context = ContextConfig.model_validate({"method": method, "order": order})
    parallelize(model, mesh, sequence_parallel=sequence_parallel, context=context, documents=bool(documents))
    ids, targets = draw_ids(*shape), draw_ids(*shape, seed=2)
    enter_sequences(model, shape[1], documents)
    own = build_vocab_split(VOCAB, tp).intervals[mesh.tp.rank]
    with KeepFloat64():
        expected = reference(ids, position_ids=_list_positions(shape, documents), use_cache=False).logits
        logits = model(take_own_tokens(ids, mesh)).logits
        F.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    wanted_logits = take_own_tokens(expected, mesh)[..., own.start : own.stop]
    torch.testing.assert_close(logits, wanted_logits, rtol=0, atol=TOLERANCE)
    own_targets = take_own_tokens(targets, mesh).flatten()
    vocab_parallel_cross_entropy(logits.flatten(0, 1), own_targets, mesh, vocab_size=VOCAB, reduction="sum").backward()
    wanted = cut_as(model, mesh, {path: param.grad for path, param in reference.named_parameters()})
    for path, param in model.named_parameters():
        grad = wanted[path]
        assert (param.grad is None) == (grad is None), path
        if param.grad is not None and grad is not None:
            total = collectives.all_reduce(param.grad, mesh.cp, label=path)
            error = (total - grad).abs().max() if grad.numel() else 0.0
            assert error < TOLERANCE * max(1.0, float(grad.abs().max()) if grad.numel() else 0.0), f"{path}: {error}"


def _list_positions(shape: tuple[int, int], documents: Documents) -> Tensor:
    """By which transformers keeps attention within documents itself, where they begin anew."""
    mask, order = AttentionMask(documents=documents), build_order(Order.CONTIGUOUS, shape[1], 1)
    return list_document_positions(mask, shape[0], order, 0)


def run_methods(*, name: str, **other: Any) -> None:
    for method in METHODS:
        run_parity(name=name, method=method, **other)
    run_parity(name=name, documents=DOCUMENTS, **other)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_the_unsharded_one(ranks, name):
    ranks(2).call(run_methods, name=name, cp=2)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_documents_of_every_architecture_on_one_rank(name):
    run_parity(name=name, cp=1, documents=DOCUMENTS)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3_text"])
def test_three_ranks_of_unequal_length(ranks, name, order):
    ranks(3).call(run_methods, name=name, cp=3, order=order)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence_parallel", "all_reduce"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "phi3", "gemma3_text", "gpt_neox", "olmo2"])
def test_with_tensor_parallelism(ranks, name, sequence_parallel):
    ranks(4).call(run_methods, name=name, cp=2, tp=2, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("window", [1, 3, 11, 64])
def test_windows_of_every_size(ranks, window):
    ranks(2).call(run_methods, name="mistral", cp=2, sliding_window=window)


def run_refusals(*, cp: int) -> None:
    mesh, ids = build_mesh(MeshShape(cp=cp)), draw_ids(2, 8)
    model = parallelize(build_model("llama"), mesh)
    with pytest.raises(ShardingError, match="nothing said how long they are"):
        model(ids)
    enter_sequences(model, 8)
    own = take_own_tokens(ids, mesh)
    cores = model.model.layers[1].self_attn.attention_core
    cores.window = 3
    with pytest.raises(ShardingError, match="means Seen.window=None., it says a window of 3, and its config 3"):
        model(own)
    cores.window = None
    with pytest.raises(ShardingError, match="got 8 tokens of each sequence, but context rank"):
        model(ids)
    for given in ({"attention_mask": torch.ones_like(own)}, {"position_ids": own}):
        with pytest.raises(ConfigError, match=f"{next(iter(given))}: over a context axis, or with documents"):
            model(own, **given)
    with pytest.raises(ConfigError, match="labels of tokens that 2 context ranks share"):
        model(own, labels=own)
    with pytest.raises(ConfigError, match="output_hidden_states asks for tensors of which each rank has a part"):
        model(own, output_hidden_states=True)
    with pytest.raises(ConfigError, match="do not grow"):
        model.generate(ids)
    with pytest.raises(ConfigError, match=r"(?s)over 2 context ranks.*attn_logit_softcapping = 50.0: squashes scores"):
        parallelize(build_model("gemma2"), mesh)


def test_what_would_be_wrong_is_refused(ranks):
    ranks(2).call(run_refusals, cp=2)


def run_labels(*, cp: int) -> None:
    """Shifted labels, whose number is that of all ranks."""
    mesh, ids = build_mesh(MeshShape(cp=cp)), draw_ids(2, 9)
    reference, model = build_model("llama"), build_model("llama")
    parallelize(model, mesh)
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:]
    enter_sequences(model, 9)
    with KeepFloat64():
        expected = reference(ids, labels=ids).loss
        own = take_own_tokens(labels, mesh)
        loss = model(take_own_tokens(ids, mesh), labels=own, shift_labels=own, num_items_in_batch=16).loss
    total = collectives.all_reduce(loss.detach(), mesh.cp, label="loss")
    torch.testing.assert_close(total, expected, rtol=0, atol=TOLERANCE)


def test_the_loss_is_a_sum_over_ranks(ranks):
    ranks(2).call(run_labels, cp=2)


def run_beside_another(*, cp: int) -> None:
    """Of two models of one config object one is parallel, and the other stays what it was."""
    from transformers import LlamaForCausalLM

    from tests.support.architectures import build_config

    config, ids = build_config("llama"), draw_ids(2, 8)
    torch.manual_seed(0)
    model, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    before = other(ids).logits
    parallelize(model, build_mesh(MeshShape(cp=cp)))
    assert torch.equal(other(ids).logits, before)


def test_a_model_with_the_same_config_object_stays_what_it_was(ranks):
    ranks(2).call(run_beside_another, cp=2)
