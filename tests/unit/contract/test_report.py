"""Tile sizes and records."""

import json

import pytest

from plait.config.presets import load_preset
from plait.contract.model import derive_model
from plait.contract.report.record import build_op_record
from plait.contract.report.tile import derive_tile_fill, list_tile_problems, summarize_tile_problems
from plait.contract.setting import Setting
from plait.contract.step import Gemm


@pytest.mark.parametrize(
    ("what", "m", "k", "n", "problems"),
    [
        ("forward", 8192, 4096, 256, []),
        ("forward", 200, 4096, 1024, []),
        ("forward", 8192, 4096, 64, ["64 is below the 128 of a tile (forward n)"]),
        ("forward", 128, 64, 128, ["128 is below the 256 of a tile (forward n)"]),
        ("dgrad", 8192, 2731, 4096, ["2731 is not a multiple of 64 (dgrad k)"]),
        ("wgrad", 2731, 8191, 4096, ["2731 is not a multiple of 64 (wgrad m)"]),
    ],
)
def test_what_keeps_a_gemm_from_full_tiles(what: str, m: int, k: int, n: int, problems: list[str]) -> None:
    assert summarize_tile_problems(list_tile_problems(Gemm("w", what, m, k, n))) == problems


def test_a_fault_of_several_gemms_is_told_once() -> None:
    gemms = [
        Gemm("w", "forward", 8192, 4096, 320),
        Gemm("w", "forward", 8192, 4096, 100),
        Gemm("w", "dgrad", 8192, 100, 4096),
    ]
    problems = [problem for gemm in gemms for problem in list_tile_problems(gemm)]
    assert summarize_tile_problems(problems) == [
        "100 is below the 128 of a tile (forward n)",
        "100 is not a multiple of 64 (forward n, dgrad k)",
    ]


@pytest.mark.parametrize(
    ("m", "n", "fill"), [(128, 256, 1), (256, 128, 1), (64, 256, 0.5), (129, 256, 129 / 256), (0, 4, 0)]
)
def test_share_of_tiles_that_is_output(m: int, n: int, fill: float) -> None:
    assert derive_tile_fill(Gemm("w", "forward", m, 64, n)) == fill


def test_a_record_says_who_owns_what_and_how_its_gradient_is_reduced() -> None:
    setting = Setting(1, 64, tp=4, rank=3)
    contract = derive_model(load_preset("llama-tiny-gqa2"), setting)
    record = json.loads(json.dumps(build_op_record(contract.block[1], setting)))
    wq, wk, _ = record["parameters"]
    assert wq["owns"] == [[48, 64], [0, 64]]
    assert (wq["layout"], wq["placement"], wq["gradient_placement"]) == ("[N*H/tp, D]", "Shard(0)", "Shard(0)")
    assert (wk["owns"], wk["gradient_reduced_over"], wk["is_counted"]) == ([[8, 16], [0, 64]], "tp/kv", False)


def test_a_record_has_every_step_in_order() -> None:
    setting = Setting(1, 64, tp=4)
    op = derive_model(load_preset("llama-tiny"), setting).block[1]
    record = build_op_record(op, setting)
    assert [step["step"] for step in record["forward"]] == ["collective", "gemm", "gemm", "gemm"]
    gather, first, *_ = record["forward"]
    assert (gather["kind"], gather["axis"], gather["dim"], gather["dtype"]) == ("all_gather", "tp", 0, "bfloat16")
    assert (gather["payload_bytes"], gather["sent_bytes"]) == (64 * 64 * 2, 64 * 64 * 2 * 3 / 4)
    assert (first["m"], first["k"], first["n"], first["flops"]) == (64, 64, 16, 2 * 64 * 64 * 16)
    assert record["totals"]["saved_bytes"] == op.saved_bytes == 64 // 4 * 64 * 2
