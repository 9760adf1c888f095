"""How a parallel model of transformers is called: whole logits, some of them, generation, batches in between.

A token too few or too many at the base model's exit shows in the logits of the last positions; a cache of all heads, or
a mask of own tokens, in what is generated after the first token; a batch that is forgotten in gradients of the first.
"""

import copy
from typing import Any

import pytest
import torch

from plait.comm.mesh import build_mesh
from plait.comm.trace import record
from plait.contract.parameter import build_vocab_split
from plait.errors import ConfigError
from plait.hf.parallelize import parallelize
from plait.hf.stored import stored_of
from plait.parallel.apply import ownership_of
from plait.verify.finetune.float64 import KeepFloat64
from plait.sharding import Kind, MeshShape, build_split
from tests.support.architectures import VOCAB, build_model, build_skeleton, cut_as, draw_ids

TOLERANCE = 1e-9


def _build(tp: int, *, sequence_parallel: bool, name: str = "llama", **config: Any) -> tuple[Any, Any, Any]:
    mesh = build_mesh(MeshShape(tp=tp))
    reference, model = build_model(name, **config), build_model(name, **config)
    return reference, parallelize(model, mesh, sequence_parallel=sequence_parallel), mesh


def run_whole_logits(*, tp: int, sequence_parallel: bool) -> None:
    reference, model, _ = _build(tp, sequence_parallel=sequence_parallel)
    ids = draw_ids(2, 5)
    keeps: list[Any] = [0, 1, 3, torch.tensor([0, 4]), torch.tensor([[1, 2], [3, 4]])]
    with KeepFloat64(), torch.no_grad():
        for keep in keeps:
            expected = reference(ids, logits_to_keep=keep).logits
            found = model(ids, logits_to_keep=keep, gather_logits=True).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
        hidden = model.model(ids).last_hidden_state
        torch.testing.assert_close(hidden, reference.model(ids).last_hidden_state, rtol=0, atol=TOLERANCE)


def run_what_moves(*, tp: int) -> None:
    """Under sequence parallelism whole hidden states exist before the layers and inside a region, and no logits do."""
    _, model, mesh = _build(tp, sequence_parallel=True)
    ids = draw_ids(2, 5)
    own = len(build_split(ids.numel(), tp).intervals[mesh.tp.rank])
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape)))
        layer.mlp.register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape)))
    with record() as trace:
        output = model(ids, labels=ids, use_cache=False)
    layers = model.config.num_hidden_layers
    assert seen == [(1, own, 24)] * 2 * layers
    assert output.logits.shape == (2, 5, len(build_vocab_split(VOCAB, tp).intervals[mesh.tp.rank]))
    kinds = [each.kind for each in trace.collectives]
    whole, scalars = Kind.ALL_REDUCE, [Kind.ALL_REDUCE] * 2
    regions = [Kind.ALL_GATHER, Kind.REDUCE_SCATTER] * 2 * layers
    assert kinds == [whole, *regions, Kind.ALL_GATHER, *scalars]
    with record() as trace:
        output.loss.backward()
    # The gradient of the norms' weights, [24], and whole hidden states; nothing of the vocabulary.
    assert {each.shape for each in trace.collectives} == {(24,), (10, 24)}


def run_generate(*, tp: int, sequence_parallel: bool, name: str = "llama") -> None:
    reference, model, _ = _build(tp, sequence_parallel=sequence_parallel, name=name)
    ids, mask = draw_ids(2, 4), torch.ones(2, 4, dtype=torch.int64)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0}
    for how in ({"do_sample": False}, {"do_sample": False, "num_beams": 2}):
        assert torch.equal(model.generate(ids, **options, **how), reference.generate(ids, **options, **how)), how


def run_interleaved(*, tp: int, is_checkpointed: bool) -> None:
    """Two forwards, then their backwards; norms in float32, as what is computed again does not keep float64."""
    reference, model, mesh = _build(tp, sequence_parallel=True)
    first, second = draw_ids(2, 6), draw_ids(3, 3)
    for each in (reference, model):
        if is_checkpointed:
            each.activation_checkpointing_enable({"use_reentrant": False})
        each.train()
        loss = each(first, labels=first, use_cache=False).loss
        other = each(second, labels=second, use_cache=False).loss
        loss.backward()
        other.backward()
    wanted = cut_as(model, mesh, {name: param.grad for name, param in reference.named_parameters()})
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, wanted[name], rtol=1e-5, atol=1e-6)


def run_copy(*, tp: int) -> None:
    """Hooks, groups and batch of a copy are its own."""
    reference, model, _ = _build(tp, sequence_parallel=True, name="phi3")
    ids = draw_ids(2, 6)
    logits = model(ids, gather_logits=True).logits
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert torch.equal(twin(ids, gather_logits=True).logits, logits)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(twin.generate(ids, **options), reference.generate(ids, **options))


def run_other_calls(*, tp: int, sequence_parallel: bool) -> None:
    """Embeddings for ids, a loss over a number of items that is given, a tuple for a ModelOutput."""
    reference, model, _ = _build(tp, sequence_parallel=sequence_parallel)
    ids, items = draw_ids(2, 6), torch.tensor(7)
    with KeepFloat64(), torch.no_grad():
        embeds = model.model.embed_tokens(ids)
        torch.testing.assert_close(embeds, reference.model.embed_tokens(ids), rtol=0, atol=TOLERANCE)
        expected = reference(ids, labels=ids, num_items_in_batch=items)
        found = model(inputs_embeds=embeds, labels=ids, num_items_in_batch=items, return_dict=False, use_cache=False)
        torch.testing.assert_close(found[0], expected.loss, rtol=0, atol=TOLERANCE)
        whole = model(ids, labels=ids, num_items_in_batch=items, gather_logits=True)
        torch.testing.assert_close(whole.loss, expected.loss, rtol=0, atol=TOLERANCE)


def run_meta(*, tp: int, name: str) -> None:
    """What is cut on the meta device, and filled afterwards, is the same model."""
    mesh = build_mesh(MeshShape(tp=tp))
    reference, cut = build_model(name), parallelize(build_model(name), mesh)
    model = parallelize(build_skeleton(name), mesh)
    assert all(param.is_meta for param in model.parameters())
    assert stored_of(model) == stored_of(cut)
    assert ownership_of(model) == ownership_of(cut)
    own = cut_as(model, mesh, dict(reference.named_parameters()))
    for path, param in cut.named_parameters():
        assert torch.equal(param, own[path]), path
        assert dict(model.named_parameters())[path].shape == param.shape


def run_drawn(*, tp: int) -> list[int]:
    """Whatever random numbers each rank would have, all draw with those of the first."""
    _, model, mesh = _build(tp, sequence_parallel=True)
    torch.manual_seed(100 + mesh.rank)
    drawn: list[int] = model.generate(draw_ids(1, 4), max_new_tokens=12, do_sample=True)[0].tolist()
    return drawn


def run_refusals(*, tp: int) -> None:
    _, model, _ = _build(tp, sequence_parallel=True, attention_dropout=0.1)
    ids = draw_ids(2, 5)
    model(ids)
    with pytest.raises(ConfigError, match="self_attn.attention_dropout = 0.1 and 1 more"):
        model.train()(ids)
    for called in (model.eval(), model.model):
        with pytest.raises(ConfigError, match="output_hidden_states asks for tensors"):
            called(ids, output_hidden_states=True)
    with pytest.raises(ConfigError, match="save_pretrained: this rank has a part"):
        model.save_pretrained("nowhere")
    with pytest.raises(ConfigError, match="parallel already"):
        parallelize(model, build_mesh(MeshShape(tp=tp)))


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence_parallel", "all_reduce"])
@pytest.mark.parametrize("tp", [2, 3])
def test_whole_logits_of_all_or_some_positions(ranks, tp, sequence_parallel):
    ranks(tp).call(run_whole_logits, tp=tp, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("tp", [2, 3])
def test_layers_hand_on_own_tokens_and_logits_are_never_gathered(ranks, tp):
    ranks(tp).call(run_what_moves, tp=tp)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence_parallel", "all_reduce"])
@pytest.mark.parametrize("tp", [2, 3])
def test_generate_gives_the_same_tokens(ranks, tp, sequence_parallel):
    ranks(tp).call(run_generate, tp=tp, sequence_parallel=sequence_parallel)


def test_all_ranks_draw_the_same_tokens(ranks):
    drawn = ranks(2).call(run_drawn, tp=2)
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 16


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma3_text", "olmo2", "phi3"])
def test_generate_with_other_caches_masks_and_positions(ranks, name):
    ranks(2).call(run_generate, tp=2, sequence_parallel=True, name=name)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_two_batches_may_be_under_way(ranks, is_checkpointed):
    ranks(2).call(run_interleaved, tp=2, is_checkpointed=is_checkpointed)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gemma3_text"])
def test_a_skeleton_on_the_meta_device_is_cut_as_well(ranks, name):
    ranks(2).call(run_meta, tp=2, name=name)


def test_a_copy_is_a_model_of_its_own(ranks):
    ranks(2).call(run_copy, tp=2)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence_parallel", "all_reduce"])
def test_embeddings_numbers_of_items_and_tuples(ranks, sequence_parallel):
    ranks(3).call(run_other_calls, tp=3, sequence_parallel=sequence_parallel)


def test_what_would_be_wrong_is_refused(ranks):
    ranks(2).call(run_refusals, tp=2)
