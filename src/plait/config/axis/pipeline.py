"""How layers are cut into pipeline stages, and in which order micro-batches go through them."""

from collections.abc import Iterator
from typing import Literal

from plait.config.hf.checkpoint import CheckpointModel
from plait.config.model import GptConfig, LlamaConfig
from plait.config.parallel import ParallelConfig
from plait.config.quantization import QuantizationConfig
from plait.config.section import Count, Problem, Section
from plait.config.train import TrainConfig
from plait.sharding import ENDS_AS_BLOCKS, find_idle_stage

Schedule = Literal["1f1b", "interleaved", "zero_bubble", "gpipe"]

IN_ROUNDS: tuple[Schedule, ...] = ("interleaved", "zero_bubble")
"""Schedules by which a rank may have several stages, and does micro-batches in rounds of about as many as ranks."""

MAX_VISITS = 1 << 18
"""Of micro-batches to stages, in one step: each is an entry of its schedule, on every rank."""


class PipelineConfig(Section):
    """The schedule of micro-batches through the stages of `parallel.pp` ranks; without effect where that is 1.

    Micro-batches are those of `train.gradient_accumulation`.
    """

    schedule: Schedule = "1f1b"
    """`1f1b` (one forward, one backward), `interleaved` (1f1b over several stages a rank), `zero_bubble` (gradients of
    weights are computed where a rank would wait) or `gpipe` (all forwards, then all backwards)."""
    stages_per_rank: Count = 1
    """Stages on each rank, for `interleaved` (at least 2) and `zero_bubble`: more of them mean less waiting and more
    sends."""


def list_pipeline_conflicts(
    model: LlamaConfig | GptConfig | CheckpointModel,
    parallel: ParallelConfig,
    pipeline: PipelineConfig,
    quantization: QuantizationConfig,
    train: TrainConfig,
) -> Iterator[Problem]:
    """Every stage must hold something, and every schedule has its own needs."""
    if parallel.pp == 1:
        if pipeline.stages_per_rank > 1:
            yield Problem("pipeline.stages_per_rank", "there is no pipeline (parallel.pp = 1)", "raise parallel.pp")
        return
    if isinstance(model, CheckpointModel):
        what = "a Hugging Face model is not cut into stages: only its own code knows what runs between its layers"
        yield Problem("parallel.pp", what, "use parallel.tp or dp_shard for it")
    yield from _list_stage_conflicts(model.num_layers, parallel.pp, pipeline)
    num_stages = parallel.pp * pipeline.stages_per_rank
    num_visits = train.gradient_accumulation * num_stages
    if num_visits > MAX_VISITS and find_idle_stage(model.num_layers, num_stages) is None:
        yield Problem(
            "train.gradient_accumulation",
            f"{train.gradient_accumulation} micro-batches through {num_stages} stages are {num_visits} visits, and the "
            f"order of a step is laid out for at most {MAX_VISITS}",
            "use a larger train.micro_batch_size instead",
        )
    refusal = find_refusal(pipeline.schedule, parallel.pp, train.gradient_accumulation)
    if refusal is not None:
        more = "at least" if pipeline.schedule == "1f1b" else "a multiple of"
        hint = f"set train.gradient_accumulation to {more} {parallel.pp}"
        yield Problem("train.gradient_accumulation", refusal, hint)
    if pipeline.schedule == "zero_bubble":
        yield from _list_split_conflicts(quantization, train)


def _list_split_conflicts(quantization: QuantizationConfig, train: TrainConfig) -> Iterator[Problem]:
    """Gradients of inputs and of weights are computed apart."""
    whole = "a compiled block has one backward" if train.compile else ""
    if quantization.resolved is not None:
        whole = "a quantized linear reads its gradient once, for both halves of its backward"
    if whole:
        yield Problem(
            "pipeline.schedule",
            f"{whole}, and zero_bubble splits backward into two",
            'use pipeline.schedule = "interleaved" or "1f1b"',
        )


def find_refusal(schedule: Schedule, pp: int, num_micro_batches: int) -> str | None:
    """Why so many micro-batches a step cannot be scheduled over `pp` ranks, or None."""
    if schedule == "1f1b" and num_micro_batches < pp:
        return f"1f1b needs at least as many micro-batches as pipeline ranks, {pp}, and a step has {num_micro_batches}"
    rounds = max(1, num_micro_batches // pp)
    if schedule in IN_ROUNDS and num_micro_batches % rounds:
        return f"{schedule}: {num_micro_batches} micro-batches cannot be done in {rounds} equal rounds over {pp} ranks"
    return None


def _list_stage_conflicts(num_layers: int, pp: int, pipeline: PipelineConfig) -> Iterator[Problem]:
    each = pipeline.stages_per_rank
    if pipeline.schedule == "interleaved" and each == 1:
        text = 'schedule = "interleaved" takes turns between the stages of a rank, and there is one'
        yield Problem("pipeline.stages_per_rank", text, "use 2 or more, or another schedule")
    elif pipeline.schedule not in IN_ROUNDS and each > 1:
        text = f'schedule = "{pipeline.schedule}" has one stage a rank'
        yield Problem("pipeline.stages_per_rank", text, 'use pipeline.schedule = "interleaved"')
    idle = find_idle_stage(num_layers, pp * each)
    if idle is not None:
        turns = f" times pipeline.stages_per_rank = {each}" if each > 1 else ""
        yield Problem(
            "parallel.pp",
            f"{num_layers} blocks cannot be cut into {pp * each} stages: stage {idle} would have nothing"
            f"{f' (parallel.pp = {pp}{turns})' if turns else ''}",
            f"use at most {num_layers + ENDS_AS_BLOCKS} stages",
        )
