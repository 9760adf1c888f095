"""What a row says of how it was run, and what is taken for granted where it does not."""

from typing import Any

import pytest

from plait.planner.score.row import parse_row
from plait.planner.score.software import (
    MEGATRON,
    MEGATRON_2022,
    NEMO,
    TORCHTITAN,
    find_software,
    parse_fused_attention,
    parse_overlap,
    parse_quantization,
)
from plait.planner.score.subject import build_subject

_ROW: dict[str, Any] = {
    "id": "x", "source": "s", "kind": "iteration_time", "value": 1.0, "unit": "s", "precision": "bf16",
    "hardware": {"gpu": "A100", "count": 16},
    "model": {"layers": 24, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 51200, "seq": 2048},
    "parallel": {"tp": 2, "pp": 2, "global_batch": 64},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "software"),
    [
        ({"source": "TorchTitan AsyncTP benchmark"}, TORCHTITAN),
        ({"source": "NVIDIA/dgxc-benchmarking v25.04"}, NEMO),
        ({"notes": "NeMo 2.0"}, NEMO),
        ({"precision": "fp16 mixed"}, MEGATRON_2022),
        ({}, MEGATRON),
    ],
)
def test_software_is_known_by_its_words(changes: dict[str, Any], software: object) -> None:
    assert find_software(parse_row({**_ROW, **changes})) is software


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"parallel": {"async_tp": True}}, "auto"),
        ({"parallel": {"async_tp": False}}, "disabled"),
        ({"notes": "ub_tp_comm_overlap on"}, "auto"),
        ({"notes": "no TP overlap"}, "disabled"),
        ({"notes": "no TP overlap flag"}, "auto method=bulk"),
        ({}, "auto method=bulk"),
    ],
)
def test_overlap_is_as_the_row_says(changes: dict[str, Any], asked: str) -> None:
    row = parse_row({**_ROW, **changes})
    assert parse_overlap(row, find_software(row)).asked == asked


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({"notes": "no FlashAttention"}, False),
        ({"precision": "fp16 mixed"}, False),
        ({"precision": "fp16 mixed", "parallel": {"recompute": "none (FlashAttention)"}}, True),
        ({}, True),
    ],
)
def test_attention_is_fused_if_said_or_by_the_age_of_the_run(changes: dict[str, Any], fused: bool) -> None:
    assert parse_fused_attention(parse_row({**_ROW, **changes})) is fused


@pytest.mark.parametrize(
    ("precision", "recipe"),
    [
        ("bf16", "none"),
        ("fp8", "fp8_delayedscaling"),
        ("fp8 tensorwise", "fp8_currentscaling"),
        ("fp8 rowwise", "fp8_rowwise"),
    ],
)
def test_recipes(precision: str, recipe: str) -> None:
    assert parse_quantization(parse_row({**_ROW, "precision": precision})) == recipe


def test_degrees_that_are_not_given_follow_from_the_devices() -> None:
    subject = build_subject(parse_row(_ROW))
    assert (subject.plan.dp, subject.plan.tp, subject.plan.pp, subject.plan.sequence_parallel) == (4, 2, 2, True)
    fsdp = build_subject(parse_row({**_ROW, "parallel": {**_ROW["parallel"], "fsdp": 2}}))
    assert (fsdp.plan.dp_replicate, fsdp.plan.dp_shard) == (2, 2)
    inferred = {**_ROW, "hardware": {"gpu": "A100"}, "notes": "256 GPUs = DP32 reproduces the memory"}
    assert build_subject(parse_row(inferred)).plan.dp == 32


def test_a_micro_batch_that_is_not_given_is_the_fastest_that_has_room() -> None:
    chosen = build_subject(parse_row(_ROW))
    assert chosen.plan.micro_batch in (1, 2, 4, 8, 16)
    parallel = {**_ROW["parallel"], "micro_batch": 1}
    one = build_subject(parse_row({**_ROW, "parallel": parallel}))
    assert one.plan.micro_batch == 1
    assert chosen.predict().step_s <= one.predict().step_s
