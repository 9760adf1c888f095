"""Point to point over gloo: every pass of a linear by every method, and what is sent for it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from plait.comm import trace
from plait.comm.mesh import Axis, build_mesh
from plait.errors import ScheduleError, ShardingError
from plait.overlap.execute import Addends, execute
from plait.overlap.transport.library import LibraryTransport
from plait.overlap.transport.ring import RingTransport
from plait.schedule.program import build_program
from plait.schedule.step import Method
from plait.sharding import Interval, MeshShape
from tests.support.collective_gemm import Case, list_runs, run_case, run_every

OVERLAPPED = (Method.BULK, Method.DIRECT, Method.RING, Method.RING_TWO_WAY)


def build_axis(degree: int) -> Axis:
    return build_mesh(MeshShape(tp=degree)).tp


def run_all(degree: int, num_rows: int, chunks: tuple[int, ...]) -> int:
    """Every pass with every method."""
    return run_every(RingTransport(build_axis(degree)), list_runs(num_rows, degree, chunks))


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 12])
def test_every_pass_by_every_method_is_the_dense_one_and_sends_what_its_schedule_says(ranks, degree, num_rows):
    numbers = ranks(degree).call(run_all, degree=degree, num_rows=num_rows, chunks=(1, 3))
    assert len(set(numbers)) == 1
    assert numbers[0] > (50 if num_rows else 10)


def run_whole(degree: int) -> None:
    transport = LibraryTransport(build_axis(degree))
    for case, method, _ in list_runs(7, degree, (1,)):
        if method is Method.NONE:
            assert run_case(case, method, 1, transport).wrong == [], case
    program = build_program(Case("row", "forward", True, 7, degree).work, Method.DIRECT, 1, transport.axis.rank)
    with pytest.raises(ScheduleError, match="^here: addend y.*: the library takes no messages"):
        execute(program, transport, gemms={}, addends=Addends(4, torch.float32, torch.device("cpu")), label="here")


@pytest.mark.parametrize("degree", [2, 3])
def test_the_library_does_every_pass_whole_and_no_schedule(ranks, degree):
    ranks(degree).call(run_whole, degree=degree)


def run_dtypes() -> None:
    axis = build_axis(3)
    case = Case("column", "backward", True, 8, 3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for reduce_dtype in (None, torch.float32):
            transport = RingTransport(replace(axis, reduce_dtype=reduce_dtype))
            for method in OVERLAPPED:
                with trace.record() as recorded:
                    run = run_case(case, method, 2, transport, dtype=dtype)
                assert run.wrong == [], (dtype, reduce_dtype, method)
                for entry in recorded.moved:
                    sent = (reduce_dtype or dtype) if entry.message.content == "addend" else dtype
                    assert entry.num_bytes == len(entry.message.piece.rows) * 6 * sent.itemsize, entry


def test_rows_travel_in_their_dtype_and_addends_in_the_one_they_are_summed_in(ranks):
    ranks(3).call(run_dtypes)


def gather_float8() -> Tensor:
    axis = build_axis(2)
    case = Case("column", "forward", True, 5, 2)
    flow, own = case.work.gather, case.work.gather.split.intervals[axis.rank]
    full = torch.arange(10.0).view(5, 2).to(torch.float8_e4m3fn)
    session = RingTransport(axis).open_gather(flow, full[own.start : own.stop], "")
    session.collect()
    assert torch.equal(session.full.float(), full.float())
    return session.full.float()


def test_numbers_that_collectives_cannot_carry_can_be_gathered(ranks):
    ranks(2).call(gather_float8)


def reduce_reals(method: Method, repetitions: int) -> list[tuple[Tensor, Tensor]]:
    """The addends of this rank, and its sum, for each repetition."""
    axis = build_axis(4)
    case = Case("row", "forward", True, 30, 4)
    own = torch.randn(30, 5, generator=torch.Generator().manual_seed(axis.rank))
    transport, results = RingTransport(axis), []

    def forward(rows: Interval, full: Tensor | None, partial: Tensor, *, accumulates: bool) -> None:
        partial[rows.start : rows.stop] = own[rows.start : rows.stop]

    program = build_program(case.work, method, 3, axis.rank)
    for _ in range(repetitions):
        addends = Addends(5, torch.float32, torch.device("cpu"))
        outcome = execute(program, transport, gemms={"forward": forward}, addends=addends)
        results.append((own, outcome.total))
    return results


@pytest.mark.parametrize("method", [Method.NONE, Method.DIRECT, Method.RING, Method.RING_TWO_WAY])
def test_a_sum_of_reals_is_the_same_bits_each_time_and_direct_in_rank_order(ranks, method):
    by_rank = ranks(4).call(reduce_reals, method=method, repetitions=3)
    for results in by_rank:
        assert all(torch.equal(total, results[0][1]) for _, total in results)
    first, *others = (results[0][0] for results in by_rank)
    in_rank_order = first.clone()
    for addend in others:
        in_rank_order += addend
    total = torch.cat([results[0][1] for results in by_rank])
    assert torch.equal(total, in_rank_order) == (method in (Method.NONE, Method.DIRECT))
    assert torch.allclose(total, in_rank_order, rtol=0.0, atol=1e-6)


def keep_totals() -> None:
    """What one run gave is the caller's: later runs take the buffers of the transport, never the result."""
    transport = RingTransport(build_axis(2))
    case = Case("column", "backward", False, 9, 2)
    runs = [run_case(case, method, 2, transport) for method in (*OVERLAPPED, *OVERLAPPED)]
    assert len({run.outcome.total.data_ptr() for run in runs}) == len(runs)
    assert all(torch.equal(run.outcome.total, run.expected["dx"]) for run in runs)


def test_results_outlive_the_runs_after_them(ranks):
    ranks(2).call(keep_totals)


def run_with(chunks: list[int], num_rows: list[int]) -> None:
    axis = build_axis(3)
    case = Case("row", "forward", True, num_rows[axis.rank], 3)
    run_case(case, Method.DIRECT, chunks[axis.rank], RingTransport(axis), label="layers.0.mlp.w_down")


def test_ranks_with_other_schedules_are_told_before_anything_is_sent(ranks):
    pool = ranks(3)
    with pytest.raises(ScheduleError) as caught:
        pool.call(run_with, chunks=[2, 4, 2], num_rows=[9, 9, 9])
    first, *rest = caught.value.message.splitlines()
    moved = "reduce_scatter of y [9 = 3 + 3 + 3, 5] float64 beside forward"
    assert first == "the ranks would not run one schedule:"
    assert rest == [
        f"  ranks 0, 2: layers.0.mlp.w_down: direct over ring in 2 chunks, {moved}",
        f"  rank 1: layers.0.mlp.w_down: direct over ring in 4 chunks, {moved}",
    ]
    with pytest.raises(ScheduleError, match=r"rank 2: .*y \[7 = 3 \+ 2 \+ 2, 5\]"):
        pool.call(run_with, chunks=[2, 2, 2], num_rows=[9, 9, 7])
    pool.call(run_with, chunks=[2, 2, 2], num_rows=[9, 9, 9])


def run_as(labels: list[str]) -> None:
    axis = build_axis(2)
    run_case(Case("row", "forward", True, 9, 2), Method.DIRECT, 2, RingTransport(axis), label=labels[axis.rank])


def test_ranks_at_other_linears_are_told_as_well(ranks):
    """What compares them must not bear the name of one: that is how ranks out of step are found, with less to say."""
    with pytest.raises(ScheduleError, match=r"rank 0: w_up: direct over ring(.|\n)*rank 1: w_down: direct over ring"):
        ranks(2).call(run_as, labels=["w_up", "w_down"])


def refuse_shard() -> None:
    axis = build_axis(2)
    flow = Case("column", "forward", True, 5, 2).work.gather
    with pytest.raises(ShardingError, match=r"^here: rank . on 'tp' of degree 2 has x of \[5, 2\], but its rows of 5 "):
        RingTransport(axis).open_gather(flow, torch.zeros(5, 2), "here")


def test_a_shard_of_another_length_is_refused(ranks):
    ranks(2).call(refuse_shard)


def count_collectives() -> list[int]:
    """The number of the latest collective after each of three runs."""
    transport = RingTransport(build_axis(2))
    case, numbers = Case("row", "forward", True, 8, 2), []
    for chunks in (1, 1, 2):
        run_case(case, Method.DIRECT, chunks, transport)
        noted = trace.last_collective()
        assert noted is not None
        assert noted.text.startswith("reduce_scatter")
        numbers.append(noted.number)
    return numbers


def test_ranks_compare_a_schedule_only_before_its_first_run(ranks):
    assert ranks(2).call(count_collectives) == [[2, 3, 5]] * 2
