"""Every schedule executed between threads, with rows that come as late and rooms that fill as early as they may."""

import pytest
import torch

from plait.comm import trace
from plait.errors import TransportError, TransportTimeout
from plait.overlap.transport.threads import ThreadTransport, ThreadWorld
from plait.schedule.step import Method
from tests.support.collective_gemm import Case, list_runs, run_case

CHUNKS = (1, 2, 3)


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("num_rows", "timing"), [(0, "mixed"), (1, "late"), (3, "mixed"), (11, "early"), (20, "late")])
def test_every_pass_by_every_method_is_the_dense_one(degree, num_rows, timing):
    world = ThreadWorld(degree, timing=timing)

    def run_all(transport: ThreadTransport) -> int:
        number = 0
        for case, method, chunks in list_runs(num_rows, degree, CHUNKS):
            run = run_case(case, method, chunks, transport)
            assert run.wrong == [], (run.wrong, case, method, chunks)
            number += 1
        return number

    numbers = world.run(run_all)
    assert numbers == [numbers[0]] * degree
    assert numbers[0] > (80 if degree > 1 and num_rows else 10)


@pytest.mark.parametrize("seed", range(6))
def test_pauses_between_steps_change_nothing(seed):
    world = ThreadWorld(3, delay_s=0.001, seed=seed)

    def run_all(transport: ThreadTransport) -> None:
        for case, method, chunks in list_runs(7, 3, (2,)):
            run = run_case(case, method, chunks, transport)
            assert run.wrong == [], (run.wrong, case, method, chunks)

    world.run(run_all)


@pytest.mark.parametrize("method", Method)
def test_what_moves_is_what_the_schedule_says(method):
    case = Case("column", "backward", True, 11, 4)
    with trace.record() as recorded:
        runs = ThreadWorld(4).run(lambda transport: run_case(case, method, 2, transport, label="here"))
    for rank, run in enumerate(runs):
        sent = [moved for moved in recorded.moved if moved.direction == "sent" and moved.message.source == rank]
        received = [moved for moved in recorded.moved if moved.direction == "received" and moved.message.target == rank]
        if method is Method.NONE:
            continue
        assert [moved.message for moved in sent] == run.program.messages_sent
        assert [moved.message for moved in received] == run.program.messages_received
        width = run.outcome.total.shape[1]
        assert {(moved.num_bytes, moved.label) for moved in sent + received} == {
            (len(moved.message.piece.rows) * width * 8, "here") for moved in sent + received
        }
        assert sent, received


def test_sums_are_taken_in_rank_order_whoever_owns_them():
    """Two large addends that cancel, and one that is lost beside either: only its place says what the sum is."""
    addends = [1e20, -1e20, 1.0]

    def reduce(transport: ThreadTransport) -> torch.Tensor:
        case = Case("row", "forward", True, 7, 3)
        flow = case.work.reduce
        session = transport.open_reduce(flow, 2, torch.float32, torch.device("cpu"), "")
        session.partial.fill_(addends[transport.axis.rank])
        session.collect()
        return session.total

    for total in ThreadWorld(3).run(reduce):
        assert torch.equal(total, torch.ones_like(total))


def test_addends_are_carried_in_the_declared_dtype():
    """257 has no bfloat16, so a sum carried in it differs from one carried in float32 and rounded at the end."""

    def reduce(transport: ThreadTransport, dtype: torch.dtype, kind: str) -> tuple[float, torch.dtype]:
        flow = Case("row", "forward", kind == "reduce_scatter", 5, 2).work.reduce
        session = transport.open_reduce(flow, 2, dtype, torch.device("cpu"), "")
        session.partial.fill_(257.0 if dtype is torch.float32 else 256.0)
        if transport.axis.rank == 1 and dtype is torch.bfloat16:
            session.partial.fill_(1.0)
        session.collect()
        assert session.total.unique().numel() == 1
        return session.total[0, 0].item(), session.total.dtype

    for kind in ("reduce_scatter", "all_reduce"):
        narrow = ThreadWorld(2, reduce_dtype=torch.bfloat16).run(lambda t, k=kind: reduce(t, torch.float32, k))
        assert narrow == [(512.0, torch.float32)] * 2
        wide = ThreadWorld(2, reduce_dtype=torch.float32)
        with trace.record() as recorded:
            assert wide.run(lambda t, k=kind: reduce(t, torch.bfloat16, k)) == [(256.0, torch.bfloat16)] * 2
        assert {moved.num_bytes for moved in recorded.moved if moved.message.content == "addend"} <= {16, 24}
        assert {collective.dtype for collective in recorded.collectives} == {"float32"}


@pytest.mark.parametrize("method", [method for method in Method if method is not Method.NONE])
@pytest.mark.parametrize("is_sequence_parallel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_method_sums_in_the_carrier(method, is_sequence_parallel, dtype):
    case = Case("column", "backward", is_sequence_parallel, 11, 4)

    def run(transport: ThreadTransport) -> list[str]:
        return run_case(case, method, 2, transport, dtype=dtype).wrong

    for reduce_dtype in (None, torch.float32, torch.float64):
        assert ThreadWorld(4, reduce_dtype=reduce_dtype).run(run) == [[]] * 4


def test_a_rank_that_fails_ends_the_others():
    case = Case("row", "forward", True, 8, 3)

    def run(transport: ThreadTransport) -> None:
        if transport.axis.rank == 1:
            raise ValueError("boom")
        with pytest.raises(TransportError, match=r"^addend y\[.*\] . -> . failed: rank 1 failed: boom$"):
            run_case(case, Method.DIRECT, 2, transport)
        with pytest.raises(TransportError, match="^an earlier run was left in the middle: "):
            run_case(case, Method.DIRECT, 2, transport)

    with pytest.raises(ValueError, match="boom"):
        ThreadWorld(3).run(run)


def test_a_rank_that_does_not_come_is_waited_for_only_so_long():
    case = Case("row", "forward", True, 8, 2)

    def run(transport: ThreadTransport) -> None:
        if transport.axis.rank == 0:
            run_case(case, Method.RING, 1, transport)

    with pytest.raises(TransportTimeout, match=r"addend y\[0:4\] 1 -> 0 timed out after 0.1 s"):
        ThreadWorld(2, timeout_s=0.1).run(run)
