"""A small random model of each architecture, in float64, against the unsharded one: logits, loss, every gradient.

A head count that is not local shows in a shape or, where it divides, in the logits; tokens gathered in another order in
the logits; a gradient that is summed twice or not at all in that of its parameter; a norm inside a region that takes
its gradient for whole in its weight; a packed linear cut across its parts in the logits.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm.mesh import build_mesh
from plait.config.overlap import Policy
from plait.contract.parameter import build_vocab_split
from plait.hf.parallelize import parallelize
from plait.verify.finetune.float64 import KeepFloat64
from plait.sharding import MeshShape
from tests.support.architectures import ARCHITECTURES, VOCAB, build_model, cut_as, draw_ids

TOLERANCE = 1e-9
"""Of float64 sums in another order, through two layers: differences seen are some 1e-14."""


def _run(model: Any, ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
    with KeepFloat64():
        output = model(ids, labels=labels, use_cache=False, **kwargs)
    output.loss.backward()
    return output


def _check_same(model: Any, reference: Any, mesh: Any, ids: Tensor, **kwargs: Any) -> None:
    """Logits, loss and gradients of a batch whose first sequence begins with padding."""
    labels = ids.masked_fill(ids % 5 == 0, -100)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    expected = _run(reference, ids, labels, attention_mask=mask)
    found = _run(model, ids, labels, attention_mask=mask, **kwargs)
    own = build_vocab_split(VOCAB, mesh.tp.degree).intervals[mesh.tp.rank]
    torch.testing.assert_close(found.logits, expected.logits[..., own.start : own.stop], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=TOLERANCE)
    wanted = cut_as(model, mesh, {name: param.grad for name, param in reference.named_parameters()})
    params = dict(model.named_parameters())
    assert wanted.keys() == params.keys()
    for name, grad in wanted.items():
        assert (params[name].grad is None) == (grad is None), name
        if grad is not None:
            close = torch.allclose(params[name].grad, grad, rtol=0, atol=TOLERANCE)
            assert close, f"{name}: off by {(params[name].grad - grad).abs().max()}"


def run_parity(
    *,
    name: str,
    tp: int,
    sequence_parallel: bool,
    shape: tuple[int, int] = (3, 7),
    overlap: Policy = "disabled",
    **config: Any,
) -> None:
    mesh = build_mesh(MeshShape(tp=tp))
    reference, model = build_model(name, **config), build_model(name, **config)
    parallelize(model, mesh, sequence_parallel=sequence_parallel, overlap=overlap)
    _check_same(model, reference, mesh, draw_ids(*shape))


def run_both(*, name: str, tp: int) -> None:
    for sequence_parallel in (True, False):
        run_parity(name=name, tp=tp, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_gradients_are_those_of_the_unsharded_model(ranks, name, tp):
    ranks(tp).call(run_both, name=name, tp=tp)


CASES: dict[str, dict[str, Any]] = {
    "KV heads replicated over ranks": {"tp": 4, "num_key_value_heads": 2},
    "KV heads replicated unevenly": {"tp": 3, "num_key_value_heads": 2, "num_attention_heads": 8, "head_dim": 4},
    "one KV head": {"tp": 3, "num_key_value_heads": 1},
    "9 heads in 3 groups": {"tp": 2, "num_attention_heads": 9, "head_dim": 4, "hidden_size": 36},
    "all heads their own": {"tp": 4, "num_key_value_heads": 6},
    "fewer tokens than ranks": {"tp": 4, "shape": (1, 2)},
    "one sequence": {"tp": 3, "shape": (1, 11)},
    "eager attention": {"tp": 2, "attn_implementation": "eager"},
    "tied": {"tp": 3, "tie_word_embeddings": True},
    "biases": {"tp": 3, "attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence_parallel", "all_reduce"])
@pytest.mark.parametrize("case", CASES)
def test_sizes_that_do_not_divide(ranks, case, sequence_parallel):
    tp = CASES[case]["tp"]
    ranks(tp).call(run_parity, name="llama", sequence_parallel=sequence_parallel, **CASES[case])


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "phi3", "gpt2", "gemma3_text"])
def test_more_ranks_than_kv_heads(ranks, name):
    kv_heads = {} if name == "gpt2" else {"num_key_value_heads": 2}
    ranks(4).call(run_parity, name=name, tp=4, sequence_parallel=True, **kv_heads)


@pytest.mark.parametrize("tp", [2, 4])
def test_norms_with_a_row_for_each_head(ranks, tp):
    ranks(tp).call(run_parity, name="cohere", tp=tp, sequence_parallel=True, use_qk_norm=True)


OVERLAPPED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "phi3", "gpt_neox", "granite", "olmo", "olmo2", "gpt2",
)  # fmt: skip


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlap_changes_nothing(ranks, name, tp):
    ranks(tp).call(run_parity, name=name, tp=tp, sequence_parallel=True, overlap="full")
