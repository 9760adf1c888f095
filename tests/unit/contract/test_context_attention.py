"""The core of attention over a context axis promises what its method moves, on each rank of the axis."""

import pytest

from plait.config.load import load_run_config
from plait.contract.op import Op
from plait.contract.report.context import build_context_report
from plait.contract.report.tally import build_tally, count_steps
from plait.contract.report.training import build_step_tally
from plait.contract.step import list_collectives, list_messages
from plait.contract.training import derive_run_model
from plait.sharding import Kind

DEGREE, BATCH, SEQ_LEN = 4, 2, 32


def build_run(*overrides: str):  # type: ignore[no-untyped-def]
    sizes = (f"parallel.cp={DEGREE}", f"train.micro_batch_size={BATCH}", f"train.seq_len={SEQ_LEN}")
    return load_run_config("llama-tiny", [*sizes, "precision.compute=float32", *overrides])


def derive_core(rank: int, *overrides: str) -> Op:
    contract = derive_run_model(build_run(*overrides), 0, rank)
    return next(op for op in contract.block if op.is_attention)


def block_bytes() -> int:
    """Keys and values of one rank's tokens; in float32 their gradients weigh as much."""
    model = build_run().model
    return SEQ_LEN // DEGREE * 2 * BATCH * model.num_kv_heads * model.head_width * 4


def test_a_ring_promises_messages_and_no_collective() -> None:
    for rank in range(DEGREE):
        core, block = derive_core(rank), block_bytes()
        assert list_collectives((*core.forward, *core.backward)) == []
        (forward,) = list_messages(core.forward)
        assert (str(forward), forward.axis) == ("send k, v [S/cp, 2, B, K, H]", "cp")
        assert forward.sent == forward.received == (block,) * (DEGREE - 1)
        keys, sums = list_messages(core.backward)
        assert (keys, sums.tensor) == (forward, "dk, dv")
        assert sums.sent == sums.received == (block,) * (DEGREE - 1)


@pytest.mark.parametrize(("rank", "sent", "received"), [(0, (1, 1, 0), (0, 0, 1)), (3, (0, 0, 3), (3, 3, 2))])
def test_what_nobody_sees_is_not_sent(rank: int, sent: tuple[int, ...], received: tuple[int, ...]) -> None:
    """Contiguous and causal: keys go up only, and sums of their gradients begin behind their owner and go home."""
    core = derive_core(rank, "context.order=contiguous")
    messages = list_messages((*core.forward, *core.backward))
    assert tuple(len(each.sent) for each in messages) == sent
    assert tuple(len(each.received) for each in messages) == received
    assert [each.act for each in messages] == ["send" if number else "recv" for number in sent]


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("all_gather", [Kind.ALL_GATHER], [Kind.ALL_GATHER, Kind.REDUCE_SCATTER]),
        ("all_to_all", [Kind.ALL_TO_ALL] * 2, [Kind.ALL_TO_ALL] * 2),
    ],
)
def test_other_methods_promise_collectives_and_no_messages(
    method: str, forward: list[Kind], backward: list[Kind]
) -> None:
    core = derive_core(0, f"context.method={method}")
    assert list_messages((*core.forward, *core.backward)) == []
    assert [each.kind for each in list_collectives(core.forward)] == forward
    assert [each.kind for each in list_collectives(core.backward)] == backward


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_operations_and_the_table_of_ranks_count_the_same_bytes(method: str, order: str, recompute: str) -> None:
    overrides = (f"context.method={method}", f"context.order={order}", f"train.recompute={recompute}")
    for rank in range(DEGREE):
        contract = derive_run_model(build_run(*overrides), 0, rank)
        core = next(op for op in contract.block if op.is_attention)
        report = build_context_report(contract)
        assert report is not None
        assert count_steps(core.forward).sent_bytes == report.forward_bytes[rank]
        assert count_steps(core.backward).sent_bytes == report.backward_bytes[rank]
        assert count_steps(core.again).sent_bytes == (0 if recompute == "none" else report.forward_bytes[rank])


def test_a_step_sends_what_its_micro_batches_do() -> None:
    run = build_run("train.gradient_accumulation=3", "model.num_layers=2")
    contract = derive_run_model(run)
    step, block = build_step_tally(run, contract), build_tally(contract.block)
    once = block.forward + block.backward
    assert once.num_messages == 3 * (DEGREE - 1)
    assert step.collectives.num_messages == 2 * 3 * once.num_messages
