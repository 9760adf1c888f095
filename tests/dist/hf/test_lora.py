"""Small models with adapters of peft, in float64, against the unsharded ones: logits, loss, every gradient, dropout.

An adapter that is added before what its base gives is reduced shows in the logits; one whose matrix is cut where it
should be whole, or summed twice, in its gradient.
"""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from plait.comm import trace
from plait.comm.mesh import build_mesh
from plait.config.overlap import Policy
from plait.contract.parameter import build_vocab_split
from plait.errors import ConfigError
from plait.hf.parallelize import parallelize
from plait.hf.plan import plan_for
from plait.hf.stored import stored_of
from plait.parallel.apply import mesh_of, ownership_of
from plait.parallel.dropout import seed_dropout, set_dropout_offset
from plait.parallel.shard import gather_tensor
from plait.verify.finetune.float64 import KeepFloat64
from plait.sharding import MeshShape
from tests.support.adapters import build_adapted, find_base_name
from tests.support.architectures import VOCAB, cut_as, draw_ids

TOLERANCE = 1e-9
"""Of float64 sums in another order, through two layers: differences seen are some 1e-14."""


def _run(model: Any, **kwargs: Any) -> Any:
    ids = draw_ids(3, 7)
    labels = ids.masked_fill(ids % 5 == 0, -100)
    with KeepFloat64():
        output = model(input_ids=ids, labels=labels, use_cache=False, **kwargs)
        output.loss.backward()
    return output


def run_parity(
    *,
    name: str,
    tp: int,
    sequence_parallel: bool = True,
    overlap: Policy = "disabled",
    lora: dict[str, Any] | None = None,
    **config: Any,
) -> None:
    mesh = build_mesh(MeshShape(tp=tp))
    reference, model = (build_adapted(name, lora=lora, **config) for _ in range(2))
    assert parallelize(model, mesh, sequence_parallel=sequence_parallel, overlap=overlap) is model
    assert mesh_of(model) is mesh
    assert ownership_of(model).keys() == dict(model.named_parameters()).keys()
    expected, found = _run(reference), _run(model)
    own = build_vocab_split(VOCAB, tp).intervals[mesh.tp.rank]
    torch.testing.assert_close(found.logits, expected.logits[..., own.start : own.stop], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=TOLERANCE)
    grads = {find_base_name(path): param.grad for path, param in reference.named_parameters()}
    for path, grad in cut_as(model, mesh, grads).items():
        param = model.get_parameter(path)
        assert (param.grad is not None) == (grad is not None) == param.requires_grad, path
        if grad is not None:
            torch.testing.assert_close(param.grad, grad, rtol=0, atol=TOLERANCE, msg=path)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence_parallel", "all_reduce"])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi", "gpt2", "phi3", "glm"])
def test_logits_loss_and_gradients_are_those_of_the_unsharded_model(ranks, name, tp, sequence_parallel):
    ranks(tp).call(run_parity, name=name, tp=tp, sequence_parallel=sequence_parallel)


CASES: dict[str, dict[str, Any]] = {
    "KV heads replicated over ranks": {"tp": 4, "num_key_value_heads": 2},
    "9 heads in 3 groups": {"tp": 2, "num_attention_heads": 9, "head_dim": 4, "hidden_size": 36},
    "biases": {"tp": 3, "attention_bias": True, "mlp_bias": True, "lora": {"lora_bias": True}},
    "tied": {"tp": 2, "tie_word_embeddings": True},
    "attention alone": {"tp": 3, "lora": {"target_modules": ["q_proj", "v_proj"]}},
    "rows alone": {"tp": 3, "lora": {"target_modules": ["o_proj", "down_proj"]}},
    "the second layer alone": {"tp": 2, "lora": {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]}},
    "ranks and alphas of their own": {
        "tp": 2,
        "lora": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 5}, "use_rslora": True},
    },
    "two of them": {"tp": 2, "lora": {"names": ("default", "other")}},
    "injected": {"tp": 3, "lora": {"wrapped": False}},
    "packed in the first layer alone": {
        "tp": 2,
        "name": "phi3",
        "lora": {"target_modules": ["qkv_proj"], "layers_to_transform": [0]},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_adapters_of_many_kinds(ranks, case):
    for sequence_parallel in (True, False):
        arguments = {"name": "llama", "sequence_parallel": sequence_parallel, **CASES[case]}
        ranks(arguments["tp"]).call(run_parity, **arguments)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_overlap_changes_nothing(ranks, name):
    ranks(3).call(run_parity, name=name, tp=3, overlap="full")


def run_dropout(*, name: str, tp: int, sequence_parallel: bool) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss with dropout and without, and all gradients with it, whole, by their names in a checkpoint."""
    mesh = build_mesh(MeshShape(tp=tp))
    model = build_adapted(name, lora={"lora_dropout": 0.5}, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    parallelize(model, mesh, sequence_parallel=sequence_parallel)
    without = _run(model).loss.item()
    seed_dropout(model, 5)
    set_dropout_offset(model, 40)
    model.train().zero_grad()
    loss = _run(model).loss.item()
    stored, ownership, grads = stored_of(model), ownership_of(model), {}
    for path, param in model.named_parameters():
        if param.grad is not None:
            place = stored[path]
            whole = grads.setdefault(place.name, torch.zeros(place.shape, dtype=torch.float64))
            part = whole if place.dim is None else whole.narrow(place.dim, place.interval.start, len(place.interval))
            part.copy_(gather_tensor(param.grad, ownership[path], mesh))
    return loss, without, grads


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence_parallel", "all_reduce"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_dropout_drops_does_not_depend_on_the_ranks(ranks, name, sequence_parallel):
    loss, without, grads = run_dropout(name=name, tp=1, sequence_parallel=sequence_parallel)
    assert abs(loss - without) > 1e-3
    for tp in (2, 3):
        for found in ranks(tp).call(run_dropout, name=name, tp=tp, sequence_parallel=sequence_parallel):
            assert found[0] == pytest.approx(loss, abs=TOLERANCE)
            assert found[2].keys() == grads.keys()
            for path, grad in grads.items():
                torch.testing.assert_close(found[2][path], grad, rtol=0, atol=TOLERANCE, msg=path)


def run_cost(*, tp: int) -> tuple[int, int, list[str]]:
    """FLOPs of forward and backward: of the unsharded model, of this rank; and what moves."""
    mesh = build_mesh(MeshShape(tp=tp))
    flops = []
    for model in (build_adapted("llama"), parallelize(build_adapted("llama"), mesh)):
        with FlopCounterMode(display=False) as counter, trace.record() as issued:
            _run(model)
        flops.append(counter.get_total_flops())
    return flops[0], flops[1], [f"{each.collective.kind.value} {each.label}" for each in issued.issued]


def test_what_is_frozen_costs_no_weight_gradient_and_no_gather_for_one(ranks):
    """Two ranks multiply as much as one, but for lora_A of columns, which both have; nothing is gathered for wgrad."""
    costs = ranks(2).call(run_cost, tp=2)
    # [21, 24] @ [24, 4] of q, k, v, gate, up in two layers: forward and both gradients, but no dgrad in the first
    # layer, where nothing before it is trained.
    product = 2 * 21 * 24 * 4
    repeated = product * ((3 + 2) * 2 * 3 - 3)
    assert sum(own for _, own, _ in costs) == costs[0][0] + repeated
    gathers = [each for each in costs[0][2] if each.startswith("all_gather") and "self_attn.input" in each]
    assert len(gathers) == 2, "one a layer, forward"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "variant of LoRA that has no parallel form: DoraLinearVariant"),
    "head": ({"target_modules": ["lm_head", "q_proj"]}, "lm_head has adapters"),
    "embedding": ({"target_modules": ["embed_tokens"]}, r"embed_tokens \(tuners.lora.layer.Embedding\)"),
    "biases of the base": ({"bias": "all"}, "bias = 'all'"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.*tie.*")
def test_what_has_no_parallel_form_is_refused(case):
    fields, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        plan_for(build_adapted("llama", lora=fields))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_other_methods_of_peft_are_refused():
    import peft

    from tests.support.architectures import build_model

    model = peft.get_peft_model(build_model("llama"), peft.IA3Config(task_type="CAUSAL_LM"))
    with pytest.raises(ConfigError, match=r"tuners.ia3.layer.Linear\) has no parallel form"):
        plan_for(model)


def run_generation(*, tp: int) -> list[list[int]]:
    model = parallelize(build_adapted("llama"), build_mesh(MeshShape(tp=tp)))
    with pytest.raises(ConfigError, match="a part of the weights only"):
        model.save_pretrained("nowhere")
    with pytest.raises(ConfigError, match="a part of the weights only"):
        model.merge_adapter()
    with KeepFloat64():
        tokens: list[list[int]] = model.generate(input_ids=draw_ids(2, 5), max_new_tokens=6, do_sample=False).tolist()
    return tokens


def test_generate_of_peft_works(ranks):
    with KeepFloat64():
        expected = build_adapted("llama").generate(input_ids=draw_ids(2, 5), max_new_tokens=6, do_sample=False).tolist()
    assert ranks(3).call(run_generation, tp=3) == [expected] * 3
