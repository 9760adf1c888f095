"""What was found about a server, as plain data for `--json`: seconds and bytes in the names."""

from collections.abc import Sequence

from plait.planner.cost import Cost
from plait.planner.hardware import Constant
from plait.planner.inference.memory import InferenceMemory
from plait.planner.inference.plan import InferenceDegree, InferenceReport
from plait.planner.inference.prediction import InferencePrediction
from plait.planner.inference.term import Term
from plait.planner.prediction import Binding
from plait.planner.record import Record, build_constant_record, build_cost_record, build_worse_record


def build_inference_record(name: str, report: InferenceReport) -> Record:
    """Everything that the table says, and more; `name` is that of the model, as it was asked for."""
    load, fastest, most = report.load, report.fastest, report.most_tokens
    return {
        "model": name,
        "hardware": report.cluster.hardware.name,
        "num_devices": report.cluster.num_devices,
        "batch": load.batch,
        "prompt_len": load.prompt_len,
        "generate_len": load.generate_len,
        "prefill_batch": load.prefill_batch,
        "fixed": report.fixed,
        "fastest_tp": None if fastest is None else fastest.server.tp,
        "most_tokens_tp": None if most is None else most.server.tp,
        "first_worse": {
            "prefill": build_worse_record(report.worse_prefill),
            "decode": build_worse_record(report.worse_decode),
            "prefill_of_any_degree": build_worse_record(report.worse_prefill_any),
            "decode_of_any_degree": build_worse_record(report.worse_decode_any),
        },
        "degrees": [_describe_degree(degree) for degree in report.degrees],
        "constants": [build_constant_record(each) for each in _list_constants(report.predictions)],
    }


def build_prediction_record(prediction: InferencePrediction) -> Record:
    """One server: times with their intervals, what binds, memory, and both trees."""
    server = prediction.server
    return {
        "tp": server.tp,
        "sequence_parallel": server.sequence_parallel,
        "launch": server.launch,
        "quantization": server.quantization,
        "time_to_first_token_s": prediction.time_to_first_token_s,
        "time_per_output_token_s": prediction.time_per_output_token_s,
        "answer_s": prediction.answer_s,
        "tokens_per_s": prediction.tokens_per_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "num_replicas": prediction.num_replicas,
        "prefill": _describe_forward(prediction.prefill, prediction.prefill_terms, prediction.prefill_binding),
        "decode": _describe_forward(prediction.decode, prediction.decode_terms, prediction.decode_binding),
        "memory": _describe_memory(prediction.memory),
        "max_context_len": prediction.max_context_len,
        "weak": prediction.weak,
    }


def _describe_degree(degree: InferenceDegree) -> Record:
    prediction, host = degree.prediction, degree.host
    if prediction is None:
        return {"tp": degree.tp, "reason": degree.reason}
    host_s = None if host is None else host.time_per_output_token_s
    return {
        **build_prediction_record(prediction),
        "time_per_output_token_launched_by_host_s": host_s,
        "is_even": degree.is_even,
    }


def _describe_forward(cost: Cost, terms: Sequence[tuple[Term, float]], binding: Binding) -> Record:
    return {
        "binding": {"term": str(binding.term), "share": binding.share},
        "terms_s": {str(term): seconds for term, seconds in terms},
        "tree": build_cost_record(cost),
    }


def _describe_memory(memory: InferenceMemory) -> Record:
    return {
        "verdict": str(memory.verdict),
        "total_bytes": memory.total_bytes,
        "capacity_bytes": memory.capacity_bytes,
        "margin_bytes": memory.margin_bytes,
        "parts_bytes": {str(part): size for part, size in memory.parts},
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "max_cached_tokens": memory.max_cached_tokens,
        "max_batch": memory.max_batch,
    }


def _list_constants(predictions: Sequence[InferencePrediction]) -> list[Constant]:
    return list({constant.name: constant for each in predictions for constant in each.constants}.values())
