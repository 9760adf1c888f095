"""What backward takes again, and what blocks keep then."""

from dataclasses import replace
from typing import Any

import pytest

from plait.config.model import GptConfig, LlamaConfig, ModelConfig
from plait.config.train import Recompute
from plait.contract.model import ModelContract, derive_model
from plait.contract.report.tally import build_tally
from plait.contract.setting import Setting
from plait.contract.step import list_collectives, sum_flops
from plait.planner.memory.activations import derive_block_bytes
from plait.planner.plan_config import PlanConfig
from plait.planner.planned import derive_planned_model
from plait.sharding import Kind

SIZES: dict[str, Any] = {"num_layers": 2, "width": 24, "num_heads": 4, "vocab_size": 33, "max_seq_len": 16}
MODELS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(num_kv_heads=2, mlp_width=32, **SIZES),
    "gpt": GptConfig(dropout=0.1, attention_dropout=0.1, **SIZES),
}
SETTING = Setting(batch=2, seq_len=16, tp=2, dtype="float32")


def _derive(model: str, recompute: Recompute) -> ModelContract:
    return derive_model(MODELS[model], replace(SETTING, recompute=recompute))


@pytest.mark.parametrize("model", MODELS)
def test_a_block_computed_again_keeps_its_input_and_does_not_sum_twice_what_the_next_one_keeps(model: str) -> None:
    plain, again = _derive(model, "none"), _derive(model, "full")
    assert [saved.name for op in again.block for saved in op.saved] == ["x"]
    twice = [each.kind for op in again.block for each in list_collectives(op.again)]
    assert twice == [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_GATHER]
    flops = sum(sum_flops(op.again) for op in again.block)
    down = next(op for op in plain.block if op.name.endswith("w_down"))
    assert flops == build_tally(plain.block).forward_flops - sum_flops(down.forward)
    assert build_tally(again.block).flops == build_tally(plain.block).flops + flops


@pytest.mark.parametrize("model", MODELS)
def test_of_an_attention_core_computed_again_the_inputs_are_kept(model: str) -> None:
    plain, again = _derive(model, "none"), _derive(model, "selective")
    core = next(op for op in again.block if op.is_attention)
    assert [saved.name for saved in core.saved] == ["q", "k", "v"]
    assert core.again == core.forward
    assert [op for op in again.block if op is not core and op.again] == []
    assert again.backward_collectives == plain.backward_collectives


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_a_plan_counts_what_the_contract_keeps(model: str, recompute: Recompute) -> None:
    """Unfused attention, which dropout of probabilities needs here."""
    plan = PlanConfig(tp=2, micro_batch=2, recompute=recompute, fused_attention=False)
    planned = derive_planned_model(MODELS[model], plan, 16)
    contract = derive_model(MODELS[model], replace(planned.setting, recompute=recompute))
    assert derive_block_bytes(planned, plan) == sum(op.saved_bytes for op in contract.block)
