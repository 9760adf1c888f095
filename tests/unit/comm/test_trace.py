"""What a rank has issued, recorded and remembered."""

from dataclasses import dataclass

import pytest

from plait.comm import trace
from plait.comm.trace import HISTORY, NOTES_BYTES, Noted, issue, last_collective, record
from plait.contract.collective import Collective
from plait.sharding import Kind


@dataclass(frozen=True)
class Reach:
    name: str = "tp"
    degree: int = 2
    ranks: tuple[int, ...] = (4, 5)


def issue_sum(numel: int, axis: Reach = Reach(), label: str = "") -> None:
    issue(Kind.ALL_REDUCE, axis, (numel,), "torch.float32", 0, "sum", label)


def test_a_trace_holds_what_the_contract_speaks_of_in_issue_order():
    with record() as recorded:
        issue(Kind.ALL_GATHER, Reach(), (7, 3), "torch.bfloat16", 1, "sum", "layers.0.mlp")
        issue(Kind.ALL_REDUCE, Reach(), (7,), "torch.float32", 0, "max", "loss")
    assert recorded.collectives == [
        Collective(Kind.ALL_GATHER, "tp", 2, (7, 3), "bfloat16", dim=1),
        Collective(Kind.ALL_REDUCE, "tp", 2, (7,), "float32", op="max"),
    ]
    assert recorded.labels == ["layers.0.mlp", "loss"]


def test_only_the_block_is_recorded_and_blocks_nest():
    issue_sum(1)
    with record() as outer:
        issue_sum(2)
        with record() as inner:
            issue_sum(3)
        issue_sum(4)
    issue_sum(5)
    assert [entry.shape for entry in outer.collectives] == [(2,), (3,), (4,)]
    assert [entry.shape for entry in inner.collectives] == [(3,)]


def test_recording_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), record() as recorded:
        _ = 1 / 0
    issue_sum(1)
    assert recorded.collectives == []


def test_the_last_collective_is_known_without_recording():
    issue_sum(9, label="mlp.down")
    last = last_collective()
    assert last is not None
    assert (last.axis, last.first_rank, last.text) == ("tp", 4, "all_reduce [9] float32 over tp (mlp.down)")


def test_the_latest_are_remembered_and_numbered_by_axis():
    for numel in range(HISTORY + 3):
        issue_sum(numel)
    issue_sum(1, Reach("dp", 2, (1, 3)))
    _, noted = trace.read_notes(trace.copy_notes())
    assert len(noted) == HISTORY
    *on_tp, on_dp = noted
    assert [entry.text.split()[1] for entry in on_tp] == [f"[{numel}]" for numel in range(4, HISTORY + 3)]
    assert [entry.number - on_tp[0].number for entry in on_tp] == list(range(HISTORY - 1))
    assert (on_dp.axis, on_dp.first_rank) == ("dp", 1)


def test_what_is_forgotten_is_not_counted():
    issue_sum(1)
    trace.forget()
    assert last_collective() is None
    issue_sum(2)
    assert [entry.number for entry in trace.read_notes(trace.copy_notes())[1]] == [1]


def test_notes_can_be_moved_where_others_read_them_and_say_who_wrote_them():
    issue_sum(11)
    elsewhere = bytearray(NOTES_BYTES)
    trace.move_notes(elsewhere)
    trace.identify("rank 5 (dp_replicate=2 tp=1)")
    issue_sum(12)
    who, noted = trace.read_notes(bytes(elsewhere))
    assert who == "rank 5 (dp_replicate=2 tp=1)"
    assert [entry.text.split()[1] for entry in noted[-2:]] == ["[11]", "[12]"]
    assert str(noted[-1]).endswith("on tp: all_reduce [12] float32 over tp")
    assert isinstance(noted[-1], Noted)


def test_a_label_longer_than_a_note_is_cut_not_refused():
    issue_sum(1, label="layers." * 100)
    last = last_collective()
    assert last is not None
    assert last.text.startswith("all_reduce [1] float32 over tp (layers.layers.")
