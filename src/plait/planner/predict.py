"""Predict the step of one plan."""

from collections.abc import Iterator
from functools import lru_cache

from plait.config.axis.context import find_fewest_heads
from plait.config.axis.pipeline import find_refusal
from plait.config.model import ModelConfig
from plait.contract.step import sum_flops
from plait.errors import ConfigError
from plait.planner.cluster import Cluster
from plait.planner.cost import Cost, join
from plait.planner.hardware.measured import CALIBRATED
from plait.planner.memory.peak import predict_memory
from plait.planner.memory.static import count_stage_parameters
from plait.planner.plan_config import PlanConfig
from plait.planner.planned import derive_planned_model, is_attention, list_recipe_problems
from plait.planner.prediction import Prediction
from plait.planner.stages import list_stages
from plait.planner.step.block import build_layers
from plait.planner.step.circumstance import Circumstance
from plait.planner.step.data_parallel import build_data_parallel, build_optimizer
from plait.planner.step.pipeline import build_pipeline
from plait.sharding import ENDS_AS_BLOCKS

_MANY_CHUNKS = 4
"""Of a pipeline's rank; nobody measured a step with more."""


def predict(model: ModelConfig, cluster: Cluster, plan: PlanConfig, *, seq_len: int, global_batch: int) -> Prediction:
    """What one optimizer step of `global_batch` sequences takes; equal arguments give equal predictions.

    Raises:
        ConfigError: a batch that does not divide, degrees that do not multiply to the devices, or a constant that the
            catalog lacks.
        ShardingError: a degree that the model cannot be cut into.
    """
    check_plan(model, cluster, plan, seq_len=seq_len, global_batch=global_batch)
    num_micro_batches = plan.num_micro_batches(global_batch)
    step = _build_step(model, cluster, plan, seq_len, num_micro_batches)
    capacity_bytes = cluster.hardware.memory.capacity_bytes.value
    memory = predict_memory(model, plan, seq_len, num_micro_batches, capacity_bytes)
    return Prediction(
        model, cluster, plan, seq_len, global_batch, step, memory,
        model_flops=derive_model_flops(model, seq_len) * global_batch,
        peak_flops_per_s=cluster.hardware.peak(plan.gemm_dtype).value,
        weak=_list_weak(cluster, plan),
    )  # fmt: skip


def check_plan(model: ModelConfig, cluster: Cluster, plan: PlanConfig, *, seq_len: int, global_batch: int) -> None:
    """Raise one error that lists everything that cannot be."""
    problems = []
    if plan.num_devices != cluster.num_devices:
        degrees = f"tp {plan.tp} * cp {plan.cp} * pp {plan.pp} * dp {plan.dp}"
        problems.append(f"{degrees} = {plan.num_devices} devices, but the cluster has {cluster.num_devices}")
    if global_batch % (plan.dp * plan.micro_batch):
        problems.append(
            f"a global batch of {global_batch} sequences cannot be cut into micro-batches of {plan.micro_batch} for "
            f"dp = {plan.dp}"
        )
    if plan.cp > 1 and seq_len % (2 * plan.cp):
        problems.append(f"sequences of {seq_len} tokens cannot be cut into the {2 * plan.cp} parts of cp = {plan.cp}")
    if plan.context_method == "all_to_all" and (find_fewest_heads(model, plan.tp) or plan.cp) < plan.cp:
        problems.append(f"heads of a tp rank cannot be dealt to cp = {plan.cp} ranks by all_to_all")
    problems += _list_schedule_problems(model, plan, plan.num_micro_batches(global_batch))
    tokens = plan.micro_batch * seq_len // plan.cp
    if plan.sequence_parallel and tokens < plan.tp:
        problems.append(f"{tokens} tokens of a micro-batch cannot be sharded over tp = {plan.tp}")
    problems += list_recipe_problems(model, cluster.hardware, plan, seq_len)
    if problems:
        raise ConfigError.from_problems("plan", problems)


def _list_schedule_problems(model: ModelConfig, plan: PlanConfig, num_micro_batches: int) -> Iterator[str]:
    """What stages and the order of their work need."""
    if plan.pp * plan.interleave > model.num_layers + ENDS_AS_BLOCKS * (plan.pp > 1):
        yield f"{model.num_layers} blocks cannot be cut over pp = {plan.pp} with {plan.interleave} chunks a rank"
    if plan.interleave > 1 and plan.pp == 1:
        yield f"interleave = {plan.interleave} needs a pipeline, but pp = 1"
    if plan.schedule != "zero_bubble":
        return
    if plan.pp == 1:
        yield "schedule = zero_bubble needs a pipeline, but pp = 1"
    elif (refusal := find_refusal("zero_bubble", plan.pp, num_micro_batches)) is not None:
        yield refusal
    for name in ("recompute", "quantization"):
        if getattr(plan, name) != "none":
            yield f"{name} = {getattr(plan, name)} does not go with the two halves of backward of zero_bubble"


def derive_model_flops(model: ModelConfig, seq_len: int) -> float:
    """Of one sequence, forward and backward without recompute, read from the contract; causal attention needs half."""
    linear, attention = _count_token_flops(model)
    return linear * seq_len + 0.5 * attention * seq_len * seq_len


@lru_cache(maxsize=256)
def _count_token_flops(model: ModelConfig) -> tuple[float, float]:
    """Those of linears, which grow with the tokens, and of attention, which grow with their square: of one token."""
    contract = derive_planned_model(model, PlanConfig(), 1)
    blocks = [(op, model.num_layers) for op in contract.block]
    ends = [(op, 1) for op in (*contract.entry, *contract.exit)]
    flops = {True: 0.0, False: 0.0}
    for op, times in (*ends, *blocks):
        flops[is_attention(op)] += times * sum_flops((*op.forward, *op.backward))
    return flops[False], flops[True]


@lru_cache(maxsize=4096)
def _build_step(model: ModelConfig, cluster: Cluster, plan: PlanConfig, seq_len: int, num_micro_batches: int) -> Cost:
    contract = derive_planned_model(model, plan, seq_len)
    where = Circumstance(cluster, plan, contract)
    layers = build_layers(model, cluster, plan, seq_len)
    stages = list_stages(model.num_layers, plan, num_micro_batches)
    heaviest = max(stages, key=lambda stage: count_stage_parameters(contract, stage))
    return join(
        "step",
        [
            *build_pipeline(layers, stages, where),
            *build_data_parallel(layers, where, heaviest),
            build_optimizer(where, heaviest),
        ],
    )


def _list_weak(cluster: Cluster, plan: PlanConfig) -> tuple[str, ...]:
    """Where predictions are known to be less sure than their intervals say."""
    weak = []
    if cluster.hardware.topology.place(plan.tp, num_devices=cluster.num_devices).across > 1:
        weak.append("a tp group that leaves the scale-up domain: network efficiency is assumed, .4 to .95 seen")
    if plan.quantization == "fp8_rowwise":
        weak.append("rowwise scales: its GEMMs were not measured, and are timed as tensorwise ones")
    weak += list_weak_recipes(plan)
    if cluster.hardware.derate.training.provenance == "assumed":
        weak.append(f"{cluster.hardware.name}: the derate of training is assumed, no step was measured on it")
    if plan.interleave > _MANY_CHUNKS:
        weak.append(
            f"{plan.interleave} chunks on each rank of the pipeline: each adds a send, which is predicted to hide "
            "beneath the next chunk however short that is"
        )
    if plan.schedule == "zero_bubble":
        weak.append("zero bubble: collectives of half a backward are predicted to hide as those of a whole one do")
    weak += _list_unmeasured(cluster, plan)
    return tuple(weak)


def list_weak_recipes(plan: PlanConfig) -> list[str]:
    """What of a recipe is not known as well as the rest."""
    weak = []
    if plan.section.resolved is not None:
        weak.append(
            "all blocks are timed as quantized, those too that a run keeps (quantization.keep_first, keep_last)"
        )
    if plan.quantization == "mxfp8":
        weak.append("mxfp8: its GEMMs were not measured, and are timed as those of float8 with one scale for a tensor")
    if plan.quantization == "nvfp4":
        weak.append("nvfp4: its GEMMs were not measured: the data sheet's peak, at the share of it that float8 reaches")
    return weak


def _list_unmeasured(cluster: Cluster, plan: PlanConfig) -> list[str]:
    """What a calibrated machine is asked beyond what was measured of it."""
    hardware, weak = cluster.hardware, []
    if hardware.memory.bytes_per_s.source != CALIBRATED:
        return []
    degrees = {
        key: constant for key, constant in hardware.constants.items() if key.startswith("collectives.all_gather.")
    }
    measured = [int(key.rpartition(".")[2]) for key, constant in degrees.items() if constant.source == CALIBRATED]
    shown = " and ".join(map(str, sorted(measured)))
    if plan.tp > 1 and plan.tp not in measured:
        found = f"were measured among {shown} ranks only" if measured else "were not measured here"
        weak.append(f"tp {plan.tp}: collectives {found}; others are drawn from those, or are the base's")
    most = max(measured, default=1)
    if plan.num_devices > most:
        weak.append(
            f"{plan.num_devices} devices, but no more than {most} were measured together: that the others are as fast, "
            "and share no memory or cores, is assumed"
        )
    return weak
