"""What was found, for programs."""

from collections.abc import Sequence

from plait.planner.plan import PlanReport
from plait.planner.plan_config import PlanConfig
from plait.planner.prediction import Prediction
from plait.planner.record import Record, build_constant_record, build_cost_record, build_worse_record
from plait.planner.tensor_degree import TensorDegree
from plait.planner.why_not import WhyNot


def build_record(report: PlanReport, answers: Sequence[WhyNot] = ()) -> Record:
    """Everything in SI base units; the best plan with the tree of its step and all constants."""
    best = report.best
    return {
        "model": report.name,
        "hardware": report.cluster.hardware.name,
        "num_devices": report.cluster.num_devices,
        "seq_len": report.seq_len,
        "global_batch": report.global_batch,
        "fixed": list(report.fixed),
        "num_considered": report.num_considered,
        "fits": bool(report.ranked),
        "plans": [build_prediction_record(each) for each in report.ranked or (best,)],
        "first_worse": {
            "layer": build_worse_record(report.worse_layer),
            "same_plan": build_worse_record(report.worse_same),
            "best_plan": build_worse_record(report.worse_best),
        },
        "degrees": [_describe_degree(each) for each in report.degrees],
        "refused": [
            {
                "what": each.what, "reason": each.reason, "num_plans": each.num_plans,
                "lacking_bytes": each.lacking_bytes or None,
            }
            for each in report.refused
        ],
        "why_not": [_describe_answer(answer) for answer in answers],
        "step": build_cost_record(best.step),
        "constants": [build_constant_record(each) for each in dict.fromkeys(best.constants)],
    }  # fmt: skip


def build_prediction_record(prediction: Prediction) -> Record:
    """One plan: what it decides, time, memory, what binds."""
    memory, (low_s, high_s) = prediction.memory, prediction.interval_s
    return {
        "plan": _describe_plan(prediction.plan),
        "step_s": prediction.step_s,
        "low_s": low_s,
        "high_s": high_s,
        "mfu": prediction.mfu,
        "tokens_per_s": prediction.tokens_per_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "terms_s": {str(kind): seconds for kind, seconds in prediction.step.sum_by_kind().items()},
        "exposed_s": prediction.step.exposed_s,
        "head_s": prediction.head_s,
        "memory": {
            "verdict": str(memory.verdict), "total_bytes": memory.total_bytes, "capacity_bytes": memory.capacity_bytes,
            "margin_bytes": memory.margin_bytes, "stage": memory.stage,
            "parts_bytes": {str(part): size for part, size in memory.parts},
        },
        "binding": {
            "term": prediction.binding.term, "share": prediction.binding.share, "reason": prediction.binding.reason,
        },
        "weak": list(prediction.weak),
        "missing": [str(each) for each in prediction.plan.list_missing()],
    }  # fmt: skip


def _describe_plan(plan: PlanConfig) -> Record:
    names = (
        "tp", "sequence_parallel", "cp", "context_method", "pp", "interleave", "schedule", "dp", "dp_replicate",
        "dp_shard", "sharded", "micro_batch", "recompute", "quantization", "fused_attention", "gradient_dtype",
    )  # fmt: skip
    return {
        **{name: getattr(plan, name) for name in names},
        "overlap": plan.overlap.model_dump(),
        "precision": plan.precision.model_dump(),
    }


def _describe_degree(degree: TensorDegree) -> Record:
    return {
        "tp": degree.tp,
        "layer_s": None if degree.layer is None else degree.layer.seconds,
        "same_plan_s": None if degree.same is None else degree.same.step_s,
        "same_plan_verdict": None if degree.same is None else str(degree.same.memory.verdict),
        "best_plan_s": None if degree.best is None else degree.best.step_s,
        "reason": degree.reason or None,
    }


def _describe_answer(answer: WhyNot) -> Record:
    prediction = None if answer.prediction is None else build_prediction_record(answer.prediction)
    return {"asked": answer.asked, "reason": answer.reason, "terms_s": dict(answer.terms), "prediction": prediction}
