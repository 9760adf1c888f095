"""The link of CUDA devices, over gloo: it sends without tags and its host stands in for the stream.

Over gloo each round blocks the rank until it is done, as NCCL blocks its stream, and what is not in one order on both
sides arrives in the wrong place. So this is where rounds that would hang or mix up messages on a GPU are found.
"""

from functools import partial

import pytest
import torch

from plait.comm import trace
from plait.comm.mesh import build_mesh
from plait.errors import TransportError
from plait.overlap.transport.ring import RingTransport
from plait.overlap.transport.stream import StreamLink
from plait.schedule.step import Method
from plait.sharding import MeshShape
from tests.support.collective_gemm import Case, list_runs, run_case


def build_transport(degree: int) -> RingTransport:
    axis = build_mesh(MeshShape(tp=degree)).tp
    return RingTransport(axis, partial(StreamLink, device=torch.device("cpu")))


def run_all(degree: int, num_rows: int, chunks: tuple[int, ...]) -> int:
    transport = build_transport(degree)
    number = 0
    for case, method, chunks_of_run in list_runs(num_rows, degree, chunks):
        with trace.record() as recorded:
            run = run_case(case, method, chunks_of_run, transport)
        where = (case, method, chunks_of_run)
        assert run.wrong == [], (run.wrong, *where)
        sent = [entry.message for entry in recorded.moved if entry.direction == "sent"]
        assert sent == run.program.messages_sent or method is Method.NONE, where
        number += 1
    return number


@pytest.mark.parametrize(("degree", "num_rows"), [(2, 7), (3, 7), (3, 2), (4, 13)])
def test_messages_without_tags_find_their_place_and_no_round_waits_for_a_later_one(ranks, degree, num_rows):
    numbers = ranks(degree).call(run_all, degree=degree, num_rows=num_rows, chunks=(1, 2, 3))
    assert min(numbers) == max(numbers) > 50


def leave_in_the_middle() -> None:
    transport = build_transport(2)
    case = Case("row", "forward", True, 8, 2)
    flow = case.work.reduce
    session = transport.open_reduce(flow, 3, torch.float32, torch.device("cpu"), "")
    message = next(step.message for step in run_case(case, Method.DIRECT, 1, transport).program.steps)
    session.recv(message)
    with pytest.raises(TransportError, match="^an earlier run was left in the middle: addend y"):
        transport.open_reduce(flow, 3, torch.float32, torch.device("cpu"), "")


def test_after_a_run_left_in_the_middle_there_is_no_other(ranks):
    ranks(2).call(leave_in_the_middle)
