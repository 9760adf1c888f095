"""Memory on the worst rank: against numbers worked out by hand, and its verdict."""

from dataclasses import replace

import pytest

from plait.config.overlap import OverlapConfig
from plait.config.presets import load_preset
from plait.planner.memory.activations import derive_met_bytes, derive_running_bytes
from plait.planner.memory.peak import derive_layer_bytes, derive_stage_parts, judge, predict_memory
from plait.planner.plan_config import PlanConfig
from plait.planner.planned import derive_planned_model
from plait.planner.prediction import Memory, MemoryPart, Verdict
from plait.planner.stages import list_stages
from tests.support.plans import LLAMA

_GPT = load_preset("gpt-22b")


def _predict(plan: PlanConfig, *, batches: int = 8, model: object = LLAMA) -> Memory:
    return predict_memory(model, plan, 2048, batches, 80e9)  # type: ignore[arg-type]


def test_static_memory_is_18_bytes_a_parameter_of_which_12_are_sharded() -> None:
    assert _predict(PlanConfig()).static_bytes == 18 * LLAMA.num_parameters
    sharded = _predict(PlanConfig(dp_shard=4))
    assert sharded.static_bytes == pytest.approx((2 + 4 + 12 / 4) * LLAMA.num_parameters)
    gradients = _predict(PlanConfig(dp_shard=4, sharded="gradients"))
    assert gradients.static_bytes == pytest.approx((2 + 4 / 4 + 12 / 4) * LLAMA.num_parameters)


_ENDS = (2 * LLAMA.vocab_size + 1) * LLAMA.width


def test_shards_of_parameters_are_the_masters_and_gradients_are_shared_out_in_the_last_micro_batch() -> None:
    """Embedding, last norm and head are whole from forward to backward, as one unit."""
    one, many = (_predict(PlanConfig(dp_shard=4, sharded="parameters"), batches=batches) for batches in (1, 8))
    assert one.static_bytes == pytest.approx(2 * _ENDS + (4 + 12) / 4 * LLAMA.num_parameters)
    assert many.static_bytes == pytest.approx(2 * _ENDS + (4 + 12 / 4) * LLAMA.num_parameters)
    lean = _predict(PlanConfig(dp_shard=4, sharded="parameters", gradient_dtype="bfloat16"), batches=1)
    assert one.static_bytes - lean.static_bytes == pytest.approx(2 / 4 * LLAMA.num_parameters)


@pytest.mark.parametrize("batches", [1, 8])
def test_stages_that_share_parameters_out_have_them_whole_while_a_step_lasts(batches: int) -> None:
    plan = PlanConfig(pp=2, dp_shard=4, sharded="parameters")
    whole = replace(plan, sharded="optimizer")
    parts, others = (dict(_predict(each, batches=batches).parts) for each in (plan, whole))
    assert parts == others


def test_ranks_of_cp_share_the_optimizer_state_out() -> None:
    assert _predict(PlanConfig(dp_shard=2, cp=2)).static_bytes == _predict(PlanConfig(dp_shard=4)).static_bytes
    alone = _predict(PlanConfig(dp_replicate=4, sharded="nothing", cp=2))
    assert alone.static_bytes == 18 * LLAMA.num_parameters


@pytest.mark.parametrize(
    ("plan", "formula"),
    [
        (PlanConfig(tp=8, sequence_parallel=False, fused_attention=False), 10 + 24 / 8 + 5 * 64 * 2048 / 6144 / 8),
        (PlanConfig(tp=8, fused_attention=False), 34 / 8 + 5 * 64 * 2048 / 6144 / 8),
        (PlanConfig(tp=8, fused_attention=False, recompute="selective"), 34 / 8),
        (PlanConfig(tp=8, recompute="full"), 2 / 8),
        (PlanConfig(tp=8, sequence_parallel=False, recompute="full"), 2),
    ],
)
def test_activations_are_those_of_korthikanti_table_2(plan: PlanConfig, formula: float) -> None:
    elements = 2048 * _GPT.width * _GPT.num_layers
    assert _predict(plan, model=_GPT).bytes_of(MemoryPart.ACTIVATIONS) == pytest.approx(formula * elements)


def test_fp8_keeps_inputs_of_linears_in_one_byte() -> None:
    plain, fp8 = (
        _predict(PlanConfig(quantization=quantization)).bytes_of(MemoryPart.ACTIVATIONS)  # type: ignore[arg-type]
        for quantization in ("none", "fp8_delayedscaling")
    )
    # Attention keeps its output for itself, in two bytes; what the projection behind it keeps comes on top.
    inputs = 2 * LLAMA.width - LLAMA.num_heads * LLAMA.head_width + LLAMA.mlp_width
    assert plain - fp8 == LLAMA.num_layers * 2048 * inputs


def test_fsdp_has_room_for_whole_blocks() -> None:
    sharded, whole = (_predict(PlanConfig(dp_shard=8, sharded=sharded)) for sharded in ("parameters", "optimizer"))  # type: ignore[arg-type]
    block = (LLAMA.num_parameters - 2 * LLAMA.vocab_size * LLAMA.width - LLAMA.width) / LLAMA.num_layers
    more = sharded.bytes_of(MemoryPart.BUFFERS) - whole.bytes_of(MemoryPart.BUFFERS)
    assert more == pytest.approx((2 * 2 + 4) * block)


def test_the_worst_stage_is_the_last_where_logits_weigh_more_than_micro_batches_in_flight() -> None:
    assert _predict(PlanConfig(pp=2), model=_GPT).stage == 0
    assert _predict(PlanConfig(pp=2, recompute="full"), batches=1).stage == 1


def test_pieces_in_flight_have_a_place_for_each_gemm() -> None:
    plan = PlanConfig(tp=4)
    tensor = 2 * 2048 * LLAMA.width
    pieces, whole = (
        _predict(replace(plan, overlap=overlap)).bytes_of(MemoryPart.BUFFERS)
        for overlap in (OverlapConfig(policy="auto"), OverlapConfig(policy="auto", method="bulk"))
    )
    # Two gathers and two sums forward, four gathers and two sums backward; the norms' gradients are small.
    assert pieces - whole == pytest.approx((10 - 2) * tensor, rel=1e-3)


def test_the_verdict_leaves_room_for_the_largest_error_and_the_context() -> None:
    margin = 2.0 * 2**30
    assert judge(80e9, 1.07 * 80e9 + margin + 1) is Verdict.FITS
    assert judge(80e9, 1.07 * 80e9 + margin) is Verdict.TIGHT
    assert judge(80e9, 80e9) is Verdict.TIGHT
    assert judge(80e9 + 1, 80e9) is Verdict.DOES_NOT_FIT


def test_rank_0_has_most_where_a_cut_is_uneven() -> None:
    model = LLAMA.model_copy(update={"vocab_size": 128_257})
    plan = PlanConfig(tp=4)
    stage = list_stages(model.num_layers, plan, 8)[0]
    ranks = [derive_planned_model(model, plan, 2048, rank=rank) for rank in range(4)]
    totals = [sum(derive_stage_parts(rank, plan, stage, derive_layer_bytes(rank, plan)).values()) for rank in ranks]
    assert totals[0] == max(totals) > totals[1] == totals[3]
    assert totals[0] == predict_memory(model, plan, 2048, 8, 80e9).total_bytes


def test_all_keys_and_values_take_more_room_than_blocks_of_a_ring() -> None:
    """With their gradients: of 8 ranks, where a ring has those of two."""
    ring, whole, dealt = (PlanConfig(cp=8, context_method=each) for each in ("ring", "all_gather", "all_to_all"))  # type: ignore[arg-type]
    contract = derive_planned_model(LLAMA, ring, 32768)
    own = 4096 * LLAMA.num_kv_heads * LLAMA.head_width
    assert derive_met_bytes(contract, ring) == 2 * 2 * own * (2 + 2)
    assert derive_met_bytes(contract, whole) == 8 * 2 * own * (2 + 2)
    assert derive_met_bytes(contract, dealt) == 2 * (2 * own + 4096 * LLAMA.width) * 2
    assert derive_running_bytes(contract, whole) - derive_running_bytes(contract, ring) == (8 - 2) * 2 * own * 4


@pytest.mark.parametrize("interleave", [1, 2])
def test_zero_bubble_keeps_gradients_of_outputs_and_logits_until_those_of_weights(interleave: int) -> None:
    plain = PlanConfig(pp=4, interleave=interleave)
    split = replace(plain, schedule="zero_bubble")
    contract = derive_planned_model(LLAMA, split, 2048)
    layer, stage = derive_layer_bytes(contract, split), list_stages(LLAMA.num_layers, split, 16)[-1]
    parts = derive_stage_parts(contract, split, stage, layer)
    outputs = LLAMA.width * 2 + (LLAMA.num_heads + 2 * LLAMA.num_kv_heads) * LLAMA.head_width + 2 * LLAMA.mlp_width
    assert layer.half == 2 * 2048 * outputs
    assert parts[MemoryPart.ACTIVATIONS] == 8 * (4 * layer.block + 4 / interleave * layer.half)
    least = 3 * 2048 * LLAMA.vocab_size * (2 + 2)
    others = derive_stage_parts(contract, plain, list_stages(LLAMA.num_layers, plain, 16)[-1], layer)
    assert parts[MemoryPart.ENDS] - others[MemoryPart.ENDS] == pytest.approx(least, rel=0.05)
