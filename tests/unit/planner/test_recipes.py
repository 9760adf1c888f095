"""Precision recipes in plans: what they weigh on the way and in memory, at which rates, and where they cannot be."""

from dataclasses import replace

import pytest

from plait.config.presets import load_preset
from plait.config.recipe import RECIPES
from plait.contract.model import derive_model
from plait.errors import ConfigError, ShardingError
from plait.planner import Cluster, load_hardware, plan
from plait.planner.inference.memory import InferenceMemoryPart
from plait.planner.inference.predict import predict_inference
from plait.planner.inference.server import Load, ServerConfig
from plait.planner.memory.activations import derive_block_bytes
from plait.planner.plan_config import PlanConfig, Quantization
from plait.planner.planned import derive_planned_model, is_linear
from plait.planner.predict import predict
from plait.planner.prediction import Prediction
from plait.planner.step.circumstance import Circumstance
from plait.planner.step.linear import build_pass

LLAMA = load_preset("llama3-8b")
B200, H100 = load_hardware("b200"), load_hardware("h100")
NAMES: list[Quantization] = list(RECIPES)  # type: ignore[arg-type]


def predict_on_8(quantization: Quantization, **fields: object) -> Prediction:
    chosen = PlanConfig(**{"tp": 8, "quantization": quantization} | fields)  # type: ignore[arg-type]
    return predict(LLAMA, Cluster(B200, 8), chosen, seq_len=4096, global_batch=8)


def read_move_times(quantization: Quantization) -> list[float]:
    """How long the gathers of an MLP take: forward, and in the backward of either linear."""
    chosen = PlanConfig(tp=8, quantization=quantization)
    contract = derive_planned_model(LLAMA, chosen, 1 << 20)
    where = Circumstance(Cluster(B200, 8), chosen, contract)
    up, down = (op for op in contract.block if is_linear(op) and ".mlp." in op.name)
    forward, backward, row = (
        build_pass(op, direction, where).moves
        for op, direction in ((up, "forward"), (up, "backward"), (down, "backward"))
    )
    return [forward["x"][1].seconds, backward["x"][1].seconds, row["dy"][1].seconds]


@pytest.mark.parametrize(
    ("quantization", "input", "gradient"),
    [
        ("fp8_currentscaling", 1 / 2, 1 / 2),
        ("fp8_delayedscaling", 1 / 2, 1 / 2),
        ("mxfp8", 33 / 64, 33 / 32),
        ("nvfp4", 9 / 32, 9 / 16),
        ("fp8_rowwise", 1, 1),
    ],
)
def test_what_is_gathered_weighs_what_the_recipe_says(
    quantization: Quantization, input: float, gradient: float
) -> None:
    """Of 8 GB, so that latencies are a hundredth at most; a gradient in blocks travels both ways round."""
    times, plain = read_move_times(quantization), read_move_times("none")
    shares = [one / other for one, other in zip(times, plain, strict=True)]
    assert shares == pytest.approx([input, input, gradient], rel=0.01)


@pytest.mark.parametrize(
    ("quantization", "number"), [("fp8_currentscaling", 8), ("fp8_delayedscaling", 0), ("mxfp8", 0), ("nvfp4", 8)]
)
def test_what_ranks_agree_on_before_a_pass_takes_its_time(quantization: Quantization, number: int) -> None:
    """Four gather groups and row linears in a block, forward and backward each, where scales are those of tensors."""
    blocks = predict_on_8(quantization).step.find("blocks")
    agreed = [cost for cost, _ in blocks.walk() if cost.name.startswith("all_reduce amax")]
    assert len(agreed) == number
    assert all(leaf.seconds > 1e-6 for leaf in agreed)


@pytest.mark.parametrize("quantization", NAMES)
def test_a_server_knows_its_scales(quantization: Quantization) -> None:
    server = ServerConfig(tp=8, quantization=quantization)
    served = predict_inference(LLAMA, Cluster(B200, 8), server, Load(1, 128, 8))
    names = [cost.name for forward in (served.prefill, served.decode) for cost, _ in forward.walk()]
    assert names
    assert not any("amax" in name for name in names)


@pytest.mark.parametrize("quantization", NAMES)
def test_what_is_kept_is_what_a_run_keeps(quantization: Quantization) -> None:
    """The planner counts from its own contract, a run from that under the recipe: the same bytes of the linears."""
    chosen = PlanConfig(tp=8, quantization=quantization)
    planned = derive_planned_model(LLAMA, chosen, 4096)
    setting = replace(planned.setting, quantization=chosen.section)
    run = derive_model(LLAMA, setting)
    assert derive_block_bytes(planned, chosen) == sum(op.saved_bytes for op in run.block)


def test_recipes_are_faster_the_fewer_bits_they_have() -> None:
    """On one rank: with eight, for so few tokens, agreeing on magnitudes takes what the fewer bits save."""
    alone, together = (
        {name: predict_on_8(name, tp=tp, dp_shard=8 // tp).step_s for name in ("none", "mxfp8", "nvfp4")}
        for tp in (1, 8)
    )
    assert alone["nvfp4"] < alone["mxfp8"] < alone["none"]
    assert together["mxfp8"] < together["nvfp4"] < together["none"]


def test_rates_that_were_not_measured_are_told_and_wide() -> None:
    """The law of float4 is assumed: its error is at least that of the float8 it is likened to."""
    four, eight = predict_on_8("nvfp4"), predict_on_8("mxfp8")
    assert any("nvfp4: its GEMMs were not measured" in weak for weak in four.weak)
    assert any("mxfp8: its GEMMs were not measured" in weak for weak in eight.weak)
    law = B200.gemm("float4")
    assert law.efficiency.provenance == "assumed"
    assert law.efficiency.uncertainty >= 0.4 > B200.gemm("float8").efficiency.uncertainty
    assert four.peak_flops_per_s == 2 * eight.peak_flops_per_s


@pytest.mark.parametrize("quantization", ["mxfp8", "nvfp4"])
def test_blocks_need_an_instruction(quantization: Quantization) -> None:
    text = f"quantization = {quantization}: NVIDIA H100 .* has no instruction for blocks that share a scale"
    with pytest.raises(ConfigError, match=text):
        plan(LLAMA, Cluster(H100, 8), seq_len=4096, global_batch=8, fixed={"quantization": quantization})
    with pytest.raises(ConfigError, match=text):
        predict(
            LLAMA, Cluster(H100, 8), PlanConfig(tp=8, quantization=quantization), seq_len=4096, global_batch=8
        )  # fmt: skip
    with pytest.raises(ConfigError, match=text):
        predict_inference(LLAMA, Cluster(H100, 8), ServerConfig(quantization=quantization), Load(1, 128, 8))


def test_degrees_that_tear_blocks_are_refused_with_the_reason() -> None:
    """Heads of 16 features: blocks of 32 have to stay on one rank."""
    model = load_preset("llama-tiny").model_copy(update={"head_width": 16, "num_layers": 4, "mlp_width": 256})
    report = plan(model, Cluster(B200, 8), seq_len=256, global_batch=8, fixed={"quantization": "mxfp8", "cp": 1})
    assert {each.plan.tp for each in report.ranked} <= {1, 2}
    reasons = {refusal.what: refusal.reason for refusal in report.refused}
    assert "mxfp8: layers.*.attention.wk [K*H, D]: one of 4 ranks would have features 0:16" in reasons["tp = 4"]
    with pytest.raises(ShardingError, match="wk"):
        predict_inference(model, Cluster(B200, 4), ServerConfig(tp=4, quantization="mxfp8"), Load(1, 32, 8))


def test_tokens_are_whole_blocks_or_there_is_no_plan() -> None:
    model = load_preset("llama3-8b")
    with pytest.raises(ConfigError, match="blocks of 32 tokens for wgrad, which the 72 of a micro-batch"):
        predict(model, Cluster(B200, 1), PlanConfig(quantization="mxfp8"), seq_len=72, global_batch=1)
    with pytest.raises(ConfigError, match="no whole number of"):
        plan(model, Cluster(B200, 1), seq_len=72, global_batch=2, fixed={"quantization": "mxfp8"})
    report = plan(model, Cluster(B200, 1), seq_len=72, global_batch=8, fixed={"quantization": "mxfp8"})
    assert {each.plan.micro_batch % 4 for each in report.ranked} == {0}


def test_weights_of_a_server_take_what_the_recipe_says() -> None:
    weights: dict[str, float] = {}
    for name in ("none", "fp8_currentscaling", "mxfp8", "nvfp4"):
        memory = predict_inference(LLAMA, Cluster(B200, 1), ServerConfig(quantization=name), Load(1, 128, 8)).memory
        weights[name] = memory.bytes_of(InferenceMemoryPart.WEIGHTS)
    linears = LLAMA.num_parameters - 2 * LLAMA.vocab_size * LLAMA.width - (2 * LLAMA.num_layers + 1) * LLAMA.width
    saved = {name: (weights["none"] - size) / linears for name, size in weights.items()}
    assert saved == pytest.approx({"none": 0, "fp8_currentscaling": 1, "mxfp8": 31 / 32, "nvfp4": 2 - 9 / 16})
