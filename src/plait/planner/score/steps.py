"""Rows that time a step, a layer, or what follows from one."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from plait.config.overlap import OverlapConfig
from plait.contract.step import sum_flops
from plait.planner.planned import derive_planned_model, is_attention
from plait.planner.prediction import Prediction
from plait.planner.score.row import NotCovered, Row
from plait.planner.score.software import check_kernels
from plait.planner.score.subject import Subject, build_subject
from plait.planner.step.block import Layers, build_layers

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True, slots=True)
class Answer:
    """A prediction in the row's unit.

    Attributes:
        base: what the null model multiplies by its one constant: `6 N D / peak` of a step.
    """

    predicted: float
    base: float


def _build_timed(row: Row) -> Subject:
    check_kernels(row)
    return build_subject(row)


def read_seconds(row: Row) -> float:
    """What one of the row's unit is in seconds.

    Raises:
        NotCovered: a unit that is not of time.
    """
    unit = row.unit.split()[0]
    if unit not in _SECONDS:
        raise NotCovered(f"unit {row.unit!r} is not one of time")
    return _SECONDS[unit]


def answer_iteration_time(row: Row) -> Answer:
    """Seconds of a step."""
    subject, scale = _build_timed(row), read_seconds(row)
    prediction = subject.predict()
    return Answer(prediction.step_s / scale, _count_null_flops(subject) / _count_peak(prediction) / scale)


def answer_tokens_per_s(row: Row) -> Answer:
    """Tokens of a second on one device."""
    subject = _build_timed(row)
    prediction = subject.predict()
    tokens = subject.global_batch * subject.seq_len / subject.plan.num_devices
    null_s = _count_null_flops(subject) / _count_peak(prediction)
    return Answer(prediction.tokens_per_s_per_device, tokens / null_s)


def answer_mfu(row: Row) -> Answer:
    """Model FLOPs of the datasheet's rate, in percent; published formulas count attention as if nothing were masked."""
    subject = _build_timed(row)
    prediction = subject.predict()
    share = _count_flops(subject, recomputes=False) / (prediction.step_s * _count_peak(prediction))
    return Answer(100 * share if "%" in row.unit else share, 1.0)


def answer_hw_tflops(row: Row) -> Answer:
    """TFLOP/s of a device with what is computed again."""
    return _answer_tflops(_build_timed(row), recomputes=True)


def answer_model_tflops(row: Row) -> Answer:
    """TFLOP/s of a device without what is computed again."""
    return _answer_tflops(_build_timed(row), recomputes=False)


def _answer_tflops(subject: Subject, *, recomputes: bool) -> Answer:
    prediction = subject.predict()
    flops = _count_flops(subject, recomputes=recomputes)
    return Answer(flops / prediction.step_s / subject.plan.num_devices / 1e12, 1.0)


def answer_layer_time(row: Row) -> Answer:
    """One block, forward or backward with what is computed again."""
    subject, scale = _build_timed(row), read_seconds(row)
    layers = _build_layers(subject)
    word = f"{row.measure or ''} {row.notes} {row.id}".lower()
    name = next((name for name in ("fwd", "bwd", "forward", "backward") if name in word), None)
    if name is None:
        raise NotCovered("neither forward nor backward is said")
    backward = name.startswith("b")
    seconds = layers.backward.seconds if backward else layers.forward.seconds
    passes = 4 + 2 * (subject.plan.recompute == "full") if backward else 2
    contract = derive_planned_model(subject.model, subject.plan, subject.seq_len)
    flops = passes * contract.block_parameters * contract.setting.num_tokens
    peak = subject.cluster.hardware.peak(subject.plan.precision.compute).value
    return Answer(seconds / scale, flops / peak / scale)


def answer_overlap_speedup(row: Row) -> Answer:
    """How much faster a step or a forward is with tp collectives overlapped than without; 1 is the same."""
    subject = _build_timed(row)
    measure: Callable[[Subject], float] = _time_forward if "forward" in row.unit else _time_step
    with_overlap, without = (
        replace(subject, plan=replace(subject.plan, overlap=OverlapConfig(policy=policy)))
        for policy in ("auto", "disabled")
    )
    return Answer(measure(without) / measure(with_overlap), 1.0)


def _time_step(subject: Subject) -> float:
    return subject.predict().step_s


def _time_forward(subject: Subject) -> float:
    return _build_layers(subject).forward.seconds


def _build_layers(subject: Subject) -> Layers:
    return build_layers(subject.model, subject.cluster, subject.plan, subject.seq_len)


def _count_null_flops(subject: Subject) -> float:
    """`6 N D`: what the null model knows."""
    return 6.0 * subject.model.num_parameters * subject.global_batch * subject.seq_len


def _count_peak(prediction: Prediction) -> float:
    return prediction.peak_flops_per_s * prediction.plan.num_devices


def _count_flops(subject: Subject, *, recomputes: bool) -> float:
    """Of a step on all devices, from the contract of an unsharded model."""
    plan = replace(subject.plan, tp=1, cp=1, pp=1, micro_batch=1)
    contract = derive_planned_model(subject.model, plan, subject.seq_len)
    total = float(sum(sum_flops((*op.forward, *op.backward)) for op in contract.ops))
    if recomputes and plan.recompute != "none":
        again = [op for op in contract.block if plan.recompute == "full" or is_attention(op)]
        total += subject.model.num_layers * sum(sum_flops(op.forward) for op in again)
    return total * subject.global_batch


def find_shape(row: Row) -> dict[str, int]:
    """`M=4096 K=12288 N=49152` or `m8192_n11008_k4096` in the words of a row."""
    words = f"{row.model.get('shape') or ''} {row.notes}"
    found = re.findall(r"\b([MNKmnk])\s?=?\s?(\d+)|_([nk])(\d+)", words)
    return {(first or second).lower(): int(one or two) for first, one, second, two in found}
