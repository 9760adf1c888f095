"""Rows that time a step, a layer, or what follows from one."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from plait.config.overlap import OverlapConfig
from plait.contract.step import sum_flops
from plait.planner.hardware.constant import SCALES
from plait.planner.planned import derive_planned_model, is_attention
from plait.planner.prediction import Prediction
from plait.planner.score.row import NotCovered, Row
from plait.planner.score.software import check_kernels
from plait.planner.score.subject import Subject, build_subject
from plait.planner.step.block import Layers, build_layers


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
    return read_scale(row, "s", "time")


def read_scale(row: Row, base: str, what: str) -> float:
    """What one of the row's unit is in `base`; what follows says of what it is (`ms (per layer)`, `TFLOP/s/GPU`).

    Raises:
        NotCovered: it is no multiple of `base`.
    """
    scale = SCALES[base].get(row.unit.partition(" ")[0].removesuffix("/GPU"))
    if scale is None:
        raise NotCovered(f"unit {row.unit!r} is not one of {what}")
    return scale


def answer_iteration_time(row: Row) -> Answer:
    """Seconds of a step."""
    subject, scale = _build_timed(row), read_seconds(row)
    prediction = subject.predict()
    return Answer(prediction.step_s / scale, _count_null_flops(subject) / _count_peak(prediction) / scale)


def answer_tokens_per_s(row: Row) -> Answer:
    """Tokens of a second on one device."""
    if not row.unit.startswith("tokens/s"):
        raise NotCovered(f"unit {row.unit!r} is not tokens/s")
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
    return _answer_tflops(row, recomputes=True)


def answer_model_tflops(row: Row) -> Answer:
    """TFLOP/s of a device without what is computed again."""
    return _answer_tflops(row, recomputes=False)


def _answer_tflops(row: Row, *, recomputes: bool) -> Answer:
    subject, scale = _build_timed(row), read_scale(row, "FLOP/s", "a rate of computing")
    prediction = subject.predict()
    flops = _count_flops(subject, recomputes=recomputes)
    return Answer(flops / prediction.step_s / subject.plan.num_devices / scale, 1.0)


def answer_layer_time(row: Row) -> Answer:
    """One block, forward or backward with what is computed again."""
    subject, scale = _build_timed(row), read_seconds(row)
    layers = _build_layers(subject)
    backward = _is_backward(row)
    seconds = layers.backward.seconds if backward else layers.forward.seconds
    passes = 4 + 2 * (subject.plan.recompute == "full") if backward else 2
    contract = derive_planned_model(subject.model, subject.plan, subject.seq_len)
    flops = passes * contract.block_parameters * contract.setting.num_tokens
    peak = subject.cluster.hardware.peak(subject.plan.precision.compute).value
    return Answer(seconds / scale, flops / peak / scale)


def _is_backward(row: Row) -> bool:
    """As the field for it says, or else the name, or the first word on it in the notes, which may speak of both."""
    for text in (row.measure, row.id, row.notes):
        if found := re.search(r"fwd|forward|bwd|backward", str(text or "").lower()):
            return found[0].startswith("b")
    raise NotCovered("neither forward nor backward is said")


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
