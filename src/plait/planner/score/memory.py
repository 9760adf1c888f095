"""Rows that tell memory."""

import re

from plait.planner.memory.static import derive_static
from plait.planner.planned import derive_planned_model
from plait.planner.prediction import MemoryPart
from plait.planner.score.row import Row
from plait.planner.score.steps import Answer, read_scale
from plait.planner.score.subject import Subject, build_subject
from plait.planner.stages import list_stages


def answer_peak_memory(row: Row) -> Answer:
    """The most that the allocator of the worst rank has given out."""
    subject = build_subject(row)
    return Answer(subject.predict().memory.allocated_bytes / read_scale(row, "B", "memory"), _count_base(subject))


def answer_activation_memory(row: Row) -> Answer:
    """What the blocks of the first stage keep; the published formulas leave the ends of the model out."""
    subject = build_subject(row)
    plan = subject.plan
    kept = subject.predict().memory.bytes_of(MemoryPart.ACTIVATIONS)
    base = plan.micro_batch * subject.seq_len * subject.model.width * subject.model.num_layers / plan.tp
    return Answer(kept / read_scale(row, "B", "memory"), base)


def answer_static_memory(row: Row) -> Answer:
    """Parameters, gradients and optimizer state of the worst rank.

    A row that says how many bytes it counts for each parameter is a formula, and these are of the blocks alone.
    """
    subject, scale = build_subject(row), read_scale(row, "B", "memory")
    plan, model = subject.plan, subject.model
    contract = derive_planned_model(model, plan, subject.seq_len)
    stages = list_stages(model.num_layers, plan, plan.num_micro_batches(subject.global_batch))
    if formula := re.search(r"(\d+) ?B/param", row.notes):
        most = max(stage.num_layers for stage in stages) * contract.block_parameters
        return Answer(int(formula[1]) * most / scale, _count_base(subject))
    worst = max(sum(derive_static(contract, plan, stage).values()) for stage in stages)
    return Answer(worst / scale, _count_base(subject))


def _count_base(subject: Subject) -> float:
    """Parameters of a rank as if all were alike: the null model knows one number of bytes for each."""
    return subject.model.num_parameters / (subject.plan.tp * subject.plan.pp)
