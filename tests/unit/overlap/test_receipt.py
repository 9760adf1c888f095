"""The receipt: what is counted, how alike layers are shown, and what a difference from the asked leads to."""

import json
from io import StringIO

import pytest
from rich.console import Console

from plait.config import OverlapConfig
from plait.errors import ConfigError
from plait.overlap.choice import LIBRARY
from plait.overlap.receipt import (
    Line,
    Receipt,
    build_empty_receipt,
    build_receipt_table,
    check_comparable,
    check_strict,
    fold_lines,
)
from plait.overlap.select import choose
from plait.overlap.site import Site
from plait.schedule.program import build_program
from plait.schedule.work import Operation, derive_work
from plait.sharding import Invariant, Partial, Replicate, Shard, derive_transition

REACHABLE = {LIBRARY: None, "ring": None}
PLACES = {"attention.qkv": "column", "attention.wo": "row", "mlp.gate_up": "column", "mlp.w_down": "row"}


def add_line(
    receipt: Receipt,
    config: OverlapConfig,
    label: str,
    operation: Operation,
    *,
    num_rows: int = 14,
    degree: int = 2,
    rank: int = 0,
    is_sharded: bool = True,
) -> Line:
    outside = Shard(0) if is_sharded else Invariant()
    entry, exit = derive_transition(outside, Replicate()), derive_transition(Partial(), outside)
    work = derive_work(operation, entry if "column" in operation else exit, num_rows, degree)
    site = Site(label, "attention" if "attention" in label else "mlp", 8, 6, "bfloat16", "float32")
    choice = choose(config, site, work, reachable=REACHABLE, rates=None)
    return receipt.add_line(operation, site, work, choice, build_program(work, choice.method, choice.chunks, rank))


def build_receipt(config: OverlapConfig, *, layers: tuple[int, ...] = (0, 1, 2)) -> Receipt:
    receipt = Receipt()
    for direction in ("forward", "backward"):
        for layer in layers if direction == "forward" else reversed(layers):
            for place, kind in PLACES.items():
                add_line(receipt, config, f"layers.{layer}.{place}", Operation(f"{kind} {direction}"))
    return receipt


def render(receipt: Receipt, width: int = 80) -> str:
    text = StringIO()
    Console(file=text, width=width).print(build_receipt_table(receipt))
    return text.getvalue()


FULL, DISABLED = OverlapConfig(policy="full", chunks=2), OverlapConfig()


@pytest.mark.parametrize(
    ("operation", "is_sharded", "num_messages", "sent_bytes"),
    [
        (Operation.COLUMN_FORWARD, True, 4, 2 * 7 * 8 * 2),  # its 7 rows in 2 pieces to 2 others, in bfloat16
        (Operation.COLUMN_BACKWARD, True, 8, 2 * 7 * 8 * 2 + 14 * 8 * 4),  # and the rows of others, in float32
        (Operation.ROW_FORWARD, True, 4, 14 * 8 * 4),
        (Operation.ROW_BACKWARD, True, 4, 2 * 7 * 8 * 2),
        (Operation.ROW_FORWARD, False, 8, 14 * 8 * 4 + 2 * 7 * 8 * 2),  # addends in float32, sums in bfloat16
    ],
)
def test_messages_and_bytes_are_those_of_the_schedule(
    operation: Operation, is_sharded: bool, num_messages: int, sent_bytes: int
) -> None:
    line = add_line(Receipt(), FULL, "x", operation, num_rows=21, degree=3, is_sharded=is_sharded)
    assert (line.num_messages, line.sent_bytes) == (num_messages, sent_bytes)


@pytest.mark.parametrize(
    ("operation", "is_sharded", "num_messages", "sent_bytes"),
    [
        (Operation.COLUMN_FORWARD, True, 1, 14 * 8 * 2),
        (Operation.COLUMN_BACKWARD, True, 2, 14 * 8 * 2 + 14 * 8 * 4),
        (Operation.ROW_FORWARD, False, 1, 2 * 14 * 8 * 4),
        (Operation.COLUMN_FORWARD, False, 0, 0),
    ],
)
def test_of_whole_collectives_it_is_what_a_rank_has_to_send(
    operation: Operation, is_sharded: bool, num_messages: int, sent_bytes: int
) -> None:
    line = add_line(Receipt(), DISABLED, "x", operation, num_rows=21, degree=3, is_sharded=is_sharded)
    assert (line.num_messages, line.sent_bytes) == (num_messages, sent_bytes)


def test_layers_that_are_alike_are_one_row_and_those_of_a_place_stay_together() -> None:
    receipt = build_receipt(FULL, layers=(0, 1, 2, 5))
    assert [(fold.label, str(fold.first.operation)) for fold in fold_lines(receipt)] == [
        (f"layers.0-2,5.{place}", f"{kind} {direction}")
        for place, kind in PLACES.items()
        for direction in ("forward", "backward")
    ]


def test_a_layer_that_differs_is_a_row_of_its_own() -> None:
    receipt = build_receipt(FULL)
    add_line(receipt, OverlapConfig(policy="full", chunks=3), "layers.3.mlp.gate_up", Operation.COLUMN_FORWARD)
    add_line(receipt, FULL, "layers.4.mlp.gate_up", Operation.COLUMN_FORWARD)
    add_line(receipt, FULL, "head", Operation.COLUMN_FORWARD)
    labels = [fold.label for fold in fold_lines(receipt) if fold.first.operation is Operation.COLUMN_FORWARD]
    assert labels == ["layers.0-2.attention.qkv", "layers.0-2,4.mlp.gate_up", "layers.3.mlp.gate_up", "head"]


def test_measurements_add_up_and_are_shown_as_their_mean() -> None:
    receipt = build_receipt(FULL, layers=(0, 1))
    fold = next(fold_lines(receipt))
    assert fold.measured_exposed_s is None
    for line, waited_s in zip(fold.lines, (0.010, 0.030), strict=True):
        line.add_measurement(waited_s)
        line.add_measurement(waited_s)
    assert fold.measured_exposed_s == pytest.approx(0.020)
    record = receipt.to_json()["lines"][0]
    assert (record["measured_exposed_s"], record["num_measured"]) == (pytest.approx(0.020), 2)
    assert "20 ms" in render(receipt)


def test_what_the_host_does_not_wait_for_is_not_said_to_take_no_time() -> None:
    receipt = build_receipt(FULL, layers=(0,))
    for line in receipt.lines[1:]:
        line.add_measurement(0.0123)
    note = "waited: empty where a library or one fused operation waits on the device, which its host does not see"
    assert (receipt.lines[0].num_measured, receipt.to_json()["lines"][0]["measured_exposed_s"]) == (0, None)
    assert " ".join(line.strip() for line in render(receipt).splitlines()[-2:]) == note
    receipt.lines[0].add_measurement(0.0123)
    assert "waited: empty" not in render(receipt)


def test_what_a_device_waited_is_read_once_and_only_when_it_is_asked_for() -> None:
    line, waited_s = build_receipt(FULL, layers=(0,)).lines[0], [0.25, 0.5]
    line.add_stalls(waited_s.pop)
    line.add_stalls(waited_s.pop)
    assert (line.num_measured, waited_s) == (2, [0.25, 0.5])
    assert (line.measured_exposed_s, line.measured_exposed_s, waited_s) == (0.75, 0.75, [])
    assert line.to_json()["measured_exposed_s"] == 0.75


def test_a_deep_model_is_readable_at_80_columns() -> None:
    receipt = build_receipt(FULL, layers=tuple(range(32)))
    for line in receipt.lines:
        line.add_measurement(0.0123)
    lines = render(receipt).splitlines()
    assert len(lines) == 2 + 4 + 8 + 1
    assert max(map(len, lines)) <= 80
    assert lines[0] == "overlap = full chunks=2; each pass waits for others, also for late ones"
    row = lines[lines.index("layers.0-31.mlp.gate_up") + 1]
    assert row.startswith("  forward")
    assert "direct x2 over ring" in row
    assert "2 x 56 B" in row
    assert row.rstrip().endswith("(1)")
    assert lines[-1].startswith("(1) the only way")


def test_with_nothing_overlapped_it_is_one_line() -> None:
    assert render(build_receipt(DISABLED)).startswith("overlap = disabled: every collective is the library's")
    one_rank = build_empty_receipt("full")
    assert render(one_rank).startswith("overlap = full: there is nothing to overlap on one rank (parallel.tp = 1)")
    assert one_rank.to_json() == {
        "asked": "full",
        "note": "there is nothing to overlap on one rank (parallel.tp = 1)",
        "num_dropped": 0,
        "lines": [],
    }


def test_json_has_everything_of_each_line() -> None:
    record = json.loads(json.dumps(build_receipt(FULL, layers=(4,)).to_json(), allow_nan=False))
    assert record["asked"] == "full chunks=2"
    assert record["lines"][0] == {
        "label": "layers.4.attention.qkv",
        "operation": "column forward",
        "num_rows": 14,
        "asked": "full chunks=2",
        "is_as_asked": True,
        "overlaps": True,
        "method": "direct",
        "chunks": 2,
        "transport": "ring",
        "reason": "the only way",
        "num_messages": 2,
        "sent_bytes": 7 * 8 * 2,
        "recipe": "none",
        "kernel": None,
        "kernel_reason": None,
        "predicted_s": None,
        "predicted_serial_s": None,
        "predicted_exposed_s": None,
        "measured_exposed_s": None,
        "num_measured": 0,
    }


def test_strict_lists_every_gemm_that_is_not_as_asked_at_once() -> None:
    check_strict(build_receipt(FULL))
    check_strict(build_receipt(DISABLED))
    with pytest.raises(ConfigError) as caught:
        check_strict(build_receipt(OverlapConfig(policy="full", method="bulk")))
    message = str(caught.value)
    assert "overlap.strict = true: 6 problems" in message
    assert (
        'layers.0-2.attention.wo, row forward: asked for "full method=bulk", but what can run is none: bulk needs a '
        "GEMM that does not need what moves" in message
    )
    assert "column backward" not in message
    assert "set overlap.strict=false" in message


def test_a_run_cannot_be_compared_with_itself_under_another_name() -> None:
    check_comparable(build_receipt(DISABLED), build_receipt(FULL))
    check_comparable(build_receipt(FULL), build_receipt(OverlapConfig(policy="full", chunks=3)))
    check_comparable(build_receipt(FULL, layers=(0,)), build_receipt(FULL, layers=(0, 1)))
    with pytest.raises(ConfigError, match="did the same: none") as caught:
        check_comparable(build_receipt(DISABLED), build_receipt(OverlapConfig(policy="auto")))
    assert "asked for: disabled and auto" in str(caught.value)
    measured = build_receipt(FULL)
    measured.lines[0].add_measurement(1.0)
    with pytest.raises(ConfigError, match="did the same: direct x2 over ring"):
        check_comparable(build_receipt(FULL), measured)


def test_two_runs_that_overlap_nothing_on_one_rank_are_the_same() -> None:
    with pytest.raises(ConfigError, match="nothing that could overlap"):
        check_comparable(build_empty_receipt("full"), build_empty_receipt("disabled"))
