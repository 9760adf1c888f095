"""What a row measured, in the planner's terms: a model, a cluster, a plan and a batch."""

import re
from dataclasses import dataclass, replace
from itertools import takewhile

from plait.config.model import ModelConfig
from plait.config.precision import FloatFormat, PrecisionConfig
from plait.errors import PlaitError
from plait.planner.cluster import Cluster
from plait.planner.hardware import Hardware, load_hardware
from plait.planner.plan_config import PlanConfig
from plait.planner.predict import predict
from plait.planner.prediction import Prediction, Verdict
from plait.planner.score.model import build_model
from plait.planner.score.row import NotCovered, Row
from plait.planner.score.software import (
    find_software,
    parse_fused_attention,
    parse_overlap,
    parse_quantization,
    parse_recompute,
)


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured."""

    model: ModelConfig
    cluster: Cluster
    plan: PlanConfig
    seq_len: int
    global_batch: int

    def predict(self) -> Prediction:
        """The planner's answer."""
        return predict(self.model, self.cluster, self.plan, seq_len=self.seq_len, global_batch=self.global_batch)


def find_hardware(row: Row) -> Hardware:
    """The devices of a row.

    Raises:
        NotCovered: the catalog does not know them.
    """
    if row.gpu is None:
        raise NotCovered("hardware.gpu is not given")
    try:
        return load_hardware(row.gpu)
    except PlaitError as error:
        raise NotCovered(error.message) from error


def build_subject(row: Row) -> Subject:
    """What a row measured.

    Raises:
        NotCovered: something is not given, or not known to the planner.
    """
    hardware, model = find_hardware(row), build_model(row)
    plan = _build_plan(row)
    global_batch = row.count("global_batch", plan.dp * plan.micro_batch)
    subject = Subject(model, Cluster(hardware, plan.num_devices), plan, row.size("seq"), global_batch)
    return subject if row.parallel.get("micro_batch") else _choose_micro_batch(subject)


def _build_plan(row: Row) -> PlanConfig:
    software = find_software(row)
    tp, cp, pp = (row.count(name, 1) for name in ("tp", "cp", "pp"))
    dp = _find_dp(row, tp * cp * pp)
    shard = row.count("fsdp", dp)
    if dp % shard:
        raise NotCovered(f"dp = {dp} cannot be cut into groups of fsdp = {shard}")
    sequence_parallel = row.parallel.get("sp")
    return PlanConfig(
        tp=tp,
        sequence_parallel=tp > 1 if sequence_parallel is None else bool(sequence_parallel),
        cp=cp,
        pp=pp,
        interleave=row.count("interleave", 1),
        dp_replicate=dp // shard,
        dp_shard=shard,
        sharded=software.sharded,
        micro_batch=row.count("micro_batch", 1),
        recompute=parse_recompute(row),
        overlap=parse_overlap(row, software),
        precision=PrecisionConfig(compute=_parse_compute(row)),
        quantization=parse_quantization(row),
        fused_attention=parse_fused_attention(row),
        gradient_dtype=software.gradient_dtype,
        overlaps_gradients=software.overlaps_gradients,
        overlaps_sends=software.overlaps_sends,
        loss=software.loss,
    )


def _parse_compute(row: Row) -> FloatFormat:
    text = row.precision.lower()
    return "float32" if "fp32" in text or "float32" in text else "bfloat16"


def _find_dp(row: Row, others: int) -> int:
    """As given, else the devices that are left, else what the row's notes infer (`DP32`)."""
    if row.parallel.get("dp") is not None:
        return row.count("dp")
    if row.num_devices is not None:
        if row.num_devices % others:
            raise NotCovered(f"{row.num_devices} devices cannot be shared out over tp * cp * pp = {others}")
        return row.num_devices // others
    if inferred := re.search(r"\bDP ?(\d+)\b", row.notes):
        return int(inferred[1])
    raise NotCovered("neither dp nor the number of devices is given")


def _choose_micro_batch(subject: Subject) -> Subject:
    """Where a row does not say, its authors will have tried: the fastest of 1, 2, 4, ... that has room."""
    share = subject.global_batch // subject.plan.dp
    sizes = takewhile(lambda size: size <= share, (2**power for power in range(6)))
    tried = [replace(subject, plan=replace(subject.plan, micro_batch=size)) for size in sizes if share % size == 0]
    if not tried:
        raise NotCovered(f"a global batch of {subject.global_batch} cannot be shared out over dp = {subject.plan.dp}")
    predicted = [(each, each.predict()) for each in tried]
    roomy = [pair for pair in predicted if pair[1].memory.verdict is not Verdict.DOES_NOT_FIT] or predicted[:1]
    return min(roomy, key=lambda pair: pair[1].step_s)[0]
