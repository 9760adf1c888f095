"""A prediction: its collectives are the contract's, its parts add up, bad plans are refused, and it is quick."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from plait.config.overlap import OverlapConfig
from plait.config.presets import load_preset
from plait.config.run import RunConfig
from plait.config.train import TrainConfig
from plait.contract.training import derive_closing_collectives, derive_run_model
from plait.errors import ConfigError, ShardingError
from plait.planner.cluster import Cluster
from plait.planner.cost import Kind
from plait.planner.hardware import MeasuredRates, load_hardware, save_measured
from plait.planner.plan_config import PlanConfig
from plait.planner.predict import predict
from plait.planner.prediction import Prediction, Verdict
from tests.support.costs import is_sum
from tests.support.plans import LLAMA, MODELS, predict_small


@pytest.mark.parametrize("model", MODELS, ids=["llama", "gpt"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("overlap", ["auto", "disabled"])
def test_collectives_and_bytes_of_micro_batches_are_the_contracts(
    model: object, sequence_parallel: bool, overlap: str
) -> None:
    plan = PlanConfig(tp=4, sequence_parallel=sequence_parallel, overlap=OverlapConfig(policy=overlap))  # type: ignore[arg-type]
    prediction = predict_small(plan, model=model, batches=3)  # type: ignore[arg-type]
    run = _build_run(prediction)
    promised = Counter(derive_run_model(run).micro_batch_collectives * 3)
    assert prediction.step.count_collectives() == promised
    issued = prediction.step.count_collectives().items()
    assert sum(move.payload_bytes * count for move, count in issued) == sum(
        move.payload_bytes * count for move, count in promised.items()
    )


def test_gradients_are_summed_over_dp_as_the_contract_says() -> None:
    plan = PlanConfig(tp=2, dp_replicate=4, sharded="nothing", micro_batch=2)
    prediction = predict_small(plan, batches=2)
    run = _build_run(prediction)
    closing = derive_closing_collectives(run, derive_run_model(run))
    ours = [move for move in prediction.step.count_collectives() if move.axis == "dp"]
    assert ours == [move for move in closing if move.axis == "dp" and move.dtype == "bfloat16"]


def _build_run(prediction: Prediction) -> RunConfig:
    plan = prediction.plan
    return RunConfig(
        model=prediction.model.model_copy(update={"attention_dropout": 0.0}),
        parallel=plan.parallel,
        precision=plan.precision,
        train=TrainConfig(seq_len=prediction.seq_len, micro_batch_size=plan.micro_batch),
    )


@pytest.mark.parametrize(
    "plan",
    [
        PlanConfig(),
        PlanConfig(tp=4, pp=4, interleave=2, dp_shard=2),
        PlanConfig(tp=2, cp=2, dp_shard=2, dp_replicate=2, sharded="parameters", recompute="full"),
        PlanConfig(tp=8, sequence_parallel=False, recompute="selective", quantization="fp8_delayedscaling"),
    ],
)
def test_breakdowns_add_up_to_the_step(plan: PlanConfig) -> None:
    prediction = predict_small(plan)
    assert is_sum(prediction.step)
    parts = (
        prediction.compute_s, prediction.exposed_communication_s, prediction.bubble_s, prediction.data_parallel_s,
        prediction.optimizer_s,
    )  # fmt: skip
    assert sum(parts) == pytest.approx(prediction.step_s)
    assert 0 < prediction.head_s < prediction.step_s
    low_s, high_s = prediction.interval_s
    assert low_s < prediction.step_s < high_s
    assert prediction.memory.total_bytes == sum(size for _, size in prediction.memory.parts)
    assert prediction.tokens_per_s_per_device * plan.num_devices == pytest.approx(prediction.tokens_per_s)


def test_every_leaf_names_constants_that_have_a_provenance() -> None:
    prediction = predict_small(PlanConfig(tp=4, cp=2, pp=2, dp_shard=2))
    known = {constant.name for constant in prediction.constants}
    for node, _ in prediction.step.walk():
        if not node.parts and node.seconds:
            assert node.constants, node.name
            assert set(node.constants) <= known, node.name


def test_hidden_communication_widens_the_interval_as_the_gain_is_uncertain() -> None:
    hidden, shown = (
        predict_small(PlanConfig(tp=4, overlap=OverlapConfig(policy=policy))).step.find("layers.0.mlp.w_gate|w_up")
        for policy in ("auto", "disabled")
    )
    (hidden_leaf, shown_leaf) = (node.parts[-1] for node in (hidden, shown))
    assert "overlap.gain" in hidden_leaf.constants
    assert "overlap.gain" not in shown_leaf.constants
    assert hidden_leaf.high_s / hidden_leaf.seconds > shown_leaf.high_s / shown_leaf.seconds
    assert hidden_leaf.low_s < hidden_leaf.seconds < hidden_leaf.high_s < shown_leaf.high_s


def test_equal_arguments_give_equal_predictions() -> None:
    plan = PlanConfig(tp=4, pp=2, dp_shard=2)
    assert predict_small(plan) == predict_small(replace(plan))


def test_mfu_counts_half_of_attention_and_no_recompute() -> None:
    plain, again = (predict_small(PlanConfig(recompute=recompute)) for recompute in ("none", "full"))  # type: ignore[arg-type]
    assert plain.model_flops == again.model_flops
    tokens = plain.global_batch * plain.seq_len
    # 6 N D without the embedding, which is looked up, and 12 L D S of attention of which half is masked.
    matrices = LLAMA.num_parameters - LLAMA.vocab_size * LLAMA.width - (2 * LLAMA.num_layers + 1) * LLAMA.width
    attention = 12 * LLAMA.num_layers * LLAMA.num_heads * LLAMA.head_width * plain.seq_len / 2
    assert plain.model_flops == pytest.approx(tokens * (6 * matrices + attention))
    assert again.mfu < plain.mfu


def test_recompute_costs_the_forward_again() -> None:
    seconds = {
        recompute: predict_small(PlanConfig(tp=2, recompute=recompute)).step.find("backward").seconds  # type: ignore[arg-type]
        for recompute in ("none", "selective", "full")
    }
    forward = predict_small(PlanConfig(tp=2)).step.find("forward")
    assert seconds["full"] - seconds["none"] == pytest.approx(forward.seconds)
    core = forward.find("layers.0.attention").seconds
    assert seconds["selective"] - seconds["none"] == pytest.approx(core)


def test_a_tp_group_that_leaves_the_node_is_slower_and_said_to_be_weak() -> None:
    inside, across = (predict_small(PlanConfig(tp=tp), model=load_preset("llama3-70b")) for tp in (8, 16))
    assert across.exposed_communication_s > 1.3 * inside.exposed_communication_s
    assert "leaves the scale-up domain" in across.weak[0]
    assert inside.weak == ()


def test_many_chunks_of_a_pipeline_are_said_to_be_weak() -> None:
    few, many = (predict_small(PlanConfig(tp=2, pp=2, interleave=interleave, micro_batch=1)) for interleave in (2, 8))
    assert few.weak == ()
    assert many.weak[0].startswith("8 chunks on each rank")


def test_a_calibrated_machine_says_what_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "hardware.toml"
    lines = {kind: {2: ((1e-4, 1e9),)} for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    rates = MeasuredRates("box", "2026-11-30", 1, 10**12, {"float32": 1e11, "bfloat16": 1e11}, 1e-6, 1e10, 1e-6, lines)
    save_measured(path, rates, based_on="cpu")
    hardware = load_hardware(path)
    weak = {
        (tp, dp): " ".join(
            predict(
                LLAMA, Cluster(hardware, tp * dp), PlanConfig(tp=tp, dp_shard=dp), seq_len=4096, global_batch=16
            ).weak
        )
        for tp, dp in ((2, 1), (4, 1), (2, 2))
    }
    assert "measured among" not in weak[2, 1]
    assert "measured together" not in weak[2, 1]
    assert "tp 4: collectives were measured among 2 ranks only" in weak[4, 1]
    assert "4 devices, but no more than 2 were measured together" in weak[4, 1]
    assert "collectives" not in weak[2, 2]
    assert "4 devices, but no more than 2" in weak[2, 2]


def test_fp8_is_faster_and_pays_for_its_quantise_passes() -> None:
    plain, fp8 = (
        predict_small(PlanConfig(tp=2, quantization=quantization))  # type: ignore[arg-type]
        for quantization in ("none", "fp8_delayedscaling")
    )
    assert fp8.step_s < plain.step_s
    assert fp8.step.sum_by_kind()[Kind.MEMORY_BOUND] > plain.step.sum_by_kind()[Kind.MEMORY_BOUND]
    assert fp8.step.find("quantise").seconds > 0


@pytest.mark.parametrize(
    ("plan", "global_batch", "message"),
    [
        (PlanConfig(tp=3, dp_shard=2), 8, "tp 3 .* cp 1 .* pp 1 .* dp 2 = 6 devices, but the cluster has 8"),
        (PlanConfig(tp=2, dp_shard=4, micro_batch=3), 16, "16 sequences cannot be cut into micro-batches of 3 for dp"),
        (PlanConfig(cp=8), 8, "sequences of 2050 tokens cannot be cut into the 16 parts"),
        (PlanConfig(pp=8, interleave=16), 8, "32 blocks cannot be cut over pp = 8 with 16 chunks a rank"),
        (PlanConfig(tp=8, interleave=2), 8, "interleave = 2 needs a pipeline"),
    ],
)
def test_impossible_plans_are_refused_with_their_numbers(plan: PlanConfig, global_batch: int, message: str) -> None:
    cluster = Cluster(load_hardware("h100"), 8)
    with pytest.raises(ConfigError, match=message):
        predict(LLAMA, cluster, plan, seq_len=2050 if plan.cp > 1 else 2048, global_batch=global_batch)


def test_all_problems_of_a_plan_are_told_at_once() -> None:
    plan = PlanConfig(tp=3, cp=7, interleave=2)
    with pytest.raises(ConfigError, match="3 problems"):
        predict(LLAMA, Cluster(load_hardware("h100"), 8), plan, seq_len=2048, global_batch=8)


def test_a_degree_that_heads_cannot_be_cut_into_names_the_parameter() -> None:
    with pytest.raises(ShardingError, match=r"attention\.wq"):
        predict_small(PlanConfig(tp=64))


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    prediction = predict_small(PlanConfig(tp=2), model=load_preset("llama3-70b"))
    memory = prediction.memory
    assert memory.verdict is Verdict.DOES_NOT_FIT
    assert memory.margin_bytes == memory.capacity_bytes - memory.total_bytes < 0
    assert prediction.binding.term == "memory"
