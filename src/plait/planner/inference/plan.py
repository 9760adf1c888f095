"""Plan a server: every tensor degree that the model and the devices allow, and how far tensor parallelism pays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.config.model import ModelConfig
from plait.contract.op import Op
from plait.errors import ShardingError
from plait.planner.cluster import Cluster
from plait.planner.inference.predict import predict_inference
from plait.planner.inference.prediction import InferencePrediction
from plait.planner.inference.server import Load, ServerConfig, build_server_config, check_load, check_server
from plait.planner.planned import derive_planned_model
from plait.planner.prediction import Verdict
from plait.planner.space.fixed import describe_fixed
from plait.planner.tensor_degree import Worse, find_worse_terms
from plait.sharding import MAX_TP


@dataclass(frozen=True, slots=True)
class InferenceDegree:
    """What a tensor degree costs.

    Attributes:
        prediction: as asked, from a graph unless `launch` is fixed; None where the model cannot be cut so.
        host: the same with collectives that the host launches.
        is_even: whether every rank has as much as every other.
        reason: why there is no prediction.
    """

    tp: int
    prediction: InferencePrediction | None
    host: InferencePrediction | None = None
    is_even: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InferenceReport:
    """A server of every degree.

    Attributes:
        worse_prefill: the first degree at which the time to the first token is longer than at the degree before, of
            those that give every rank as much; `worse_decode` is that of the time per token.
        worse_prefill_any: the same of all degrees; `worse_decode_any` too.
        fixed: what was asked for, as `tp = 8`.
    """

    model: ModelConfig
    cluster: Cluster
    load: Load
    degrees: tuple[InferenceDegree, ...]
    worse_prefill: Worse | None
    worse_decode: Worse | None
    worse_prefill_any: Worse | None
    worse_decode_any: Worse | None
    fixed: tuple[str, ...] = ()

    @property
    def predictions(self) -> tuple[InferencePrediction, ...]:
        """Of every degree that can be, in ascending order."""
        return tuple(each.prediction for each in self.degrees if each.prediction is not None)

    @property
    def roomy(self) -> tuple[InferencePrediction, ...]:
        """Of those that fit, or where none does, of those that are tight."""
        by_verdict = {
            verdict: tuple(each for each in self.predictions if each.memory.verdict is verdict)
            for verdict in (Verdict.FITS, Verdict.TIGHT)
        }
        return by_verdict[Verdict.FITS] or by_verdict[Verdict.TIGHT]

    @property
    def fastest(self) -> InferencePrediction | None:
        """The one with the least time per token, of those that have room."""
        return min(self.roomy, key=lambda each: each.time_per_output_token_s, default=None)

    @property
    def most_tokens(self) -> InferencePrediction | None:
        """The one that generates most tokens with each device, of those that have room."""
        return max(self.roomy, key=lambda each: each.tokens_per_s_per_device, default=None)


def plan_inference(
    model: ModelConfig,
    cluster: Cluster,
    *,
    batch: int,
    prompt_len: int,
    generate_len: int,
    prefill_batch: int = 1,
    fixed: Mapping[str, Any] | None = None,
) -> InferenceReport:
    """Predict a server of every tensor degree of which a job could consist (`list_degrees`).

    `fixed` may say tp, sequence_parallel, launch, quantization, overlap and precision (`ServerConfig`).

    Raises:
        ConfigError: a load that cannot be, or something fixed that a server does not decide.
        ShardingError: `fixed` names a degree that the model cannot be cut into.
    """
    load = Load(batch, prompt_len, generate_len, prefill_batch)
    check_load(load, model.max_seq_len)
    asked = fixed or {}
    server = build_server_config(asked)
    check_server(server, cluster.num_devices)
    listed = [server.tp] if "tp" in asked else list_degrees(cluster)
    degrees = tuple(_predict_degree(model, cluster, replace(server, tp=tp), load, asked) for tp in listed)
    even = [each.prediction for each in degrees if each.prediction and each.is_even]
    every = [each.prediction for each in degrees if each.prediction]
    return InferenceReport(
        model, cluster, load, degrees,
        find_worse_terms(map(_get_prefill, even)), find_worse_terms(map(_get_decode, even)),
        find_worse_terms(map(_get_prefill, every)), find_worse_terms(map(_get_decode, every)),
        tuple(describe_fixed({name: value}) for name, value in asked.items()),
    )  # fmt: skip


def list_degrees(cluster: Cluster) -> list[int]:
    """Every degree inside a host, and beyond it those of whole hosts, as a job takes them."""
    host = int(cluster.hardware.topology.host_size.value)
    most = min(cluster.num_devices, MAX_TP)
    return [tp for tp in range(1, most + 1) if tp <= host or tp % host == 0]


def _predict_degree(
    model: ModelConfig, cluster: Cluster, server: ServerConfig, load: Load, asked: Mapping[str, Any]
) -> InferenceDegree:
    try:
        prediction = predict_inference(model, cluster, server, load)
    except ShardingError as error:
        if "tp" in asked:
            raise
        return InferenceDegree(server.tp, None, reason=error.message)
    host = None if "launch" in asked else predict_inference(model, cluster, replace(server, launch="host"), load)
    return InferenceDegree(server.tp, prediction, host, is_cut_evenly(model, server))


def is_cut_evenly(model: ModelConfig, server: ServerConfig) -> bool:
    """Whether every rank holds as much of every parameter inside blocks."""
    contract = derive_planned_model(model, server.build_plan(1, sequence_parallel=False), 1)
    ops: Sequence[Op] = contract.block
    splits = [parameter.ownership.split for op in ops for parameter in op.parameters]
    return all(split is None or len(set(split.lengths)) == 1 for split in splits)


_Times = tuple[int, float, Mapping[str, float]]


def _get_prefill(prediction: InferencePrediction) -> _Times:
    return prediction.server.tp, prediction.time_to_first_token_s, dict(prediction.prefill_terms)


def _get_decode(prediction: InferencePrediction) -> _Times:
    return prediction.server.tp, prediction.time_per_output_token_s, dict(prediction.decode_terms)
