"""Breaking any one thing on purpose makes a verification fail (FIELD 3.20).

Every collective of a step is dropped, averaged instead of summed, put together in the wrong order, and repeated, one at
a time. The first three are recorded as if nothing were wrong, so the numbers alone must show them; a repetition changes
no number, so the trace alone must show it (FIELD 3.19).
"""

import pytest

from plait.contract.training import derive_run_model, derive_step_collectives
from plait.sharding import Kind
from tests.support.mutations import FAULTS, MutatedRanks, Slip
from tests.support.verification import build_config, verify

LLAMA = ("llama-tiny", 2, ("model.num_layers=1",))
GPT = ("gpt-tiny", 2, ("model.num_layers=1",))
SHARED_KV = ("llama-tiny-gqa2", 4, ("model.num_layers=1", "model.qkv_bias=true"))
"""Two KV heads on four ranks: two ranks hold each, and sum their gradients."""


SHARED_OUT = ("llama-tiny", 1, ("model.num_layers=1", "parallel.dp_shard=2", "parallel.dp_replicate=2"))
"""Parameters gathered, gradients reduced, the totals and the norm of ranks that have other sequences."""
COPIED = ("llama-tiny", 2, ("model.num_layers=1", "parallel.dp_replicate=3"))
"""Three addends have no fixed order: what tp ranks hold alike is copied from the first."""


def list_collectives(setup, sequence_parallel):
    source, tp, overrides = setup
    config = build_config(source, tp, *overrides, sequence_parallel=sequence_parallel)
    return derive_step_collectives(config, derive_run_model(config))


def list_slips(setup, *, sequence_parallel, only=lambda collective: True):
    """Every mistake that can be made with every collective of a step that `only` picks."""
    for index, collective in enumerate(list_collectives(setup, sequence_parallel)):
        if not only(collective):
            continue
        for how in ("drop", "average", "misplace", "repeat"):
            if is_visible(collective, how):
                name = f"{setup[0]}-{'sp' if sequence_parallel else 'ar'}-{how}-{index}-{collective}".replace(" ", "_")
                yield pytest.param(setup, sequence_parallel, Slip(index, how), id=name)


def is_visible(collective, how):
    """Whether the mistake is one: a softmax may subtract any number from a row that is the same on all ranks.

    Of the totals of a step the ranks of a tp group have the same, but for a wish to stop, and their sum has no order.
    """
    is_of_totals = collective.dtype == "float64"
    if how == "misplace":
        return collective.kind is Kind.ALL_GATHER and not is_of_totals
    if how == "drop" and is_of_totals and collective.op == "max":
        return False
    return not (how == "average" and collective.op == "max")


SLIPS = [
    *list_slips(LLAMA, sequence_parallel=True),
    *list_slips(LLAMA, sequence_parallel=False),
    *list_slips(GPT, sequence_parallel=True, only=lambda collective: collective.kind is Kind.ALL_REDUCE),
    *list_slips(SHARED_KV, sequence_parallel=True, only=lambda collective: collective.axis == "tp/kv"),
    *list_slips(SHARED_KV, sequence_parallel=False, only=lambda collective: collective.axis == "tp/kv"),
    *list_slips(SHARED_OUT, sequence_parallel=True),
    *list_slips(COPIED, sequence_parallel=True, only=lambda collective: collective.shape == (3 * 64,)),
]


@pytest.mark.parametrize(("setup", "sequence_parallel", "slip"), SLIPS)
def test_every_mistake_with_every_collective_is_found(ranks, setup, sequence_parallel, slip):
    source, tp, overrides = setup
    world_size = build_config(source, tp, *overrides).parallel.mesh_shape.world_size
    broken = MutatedRanks(ranks(world_size), slip)
    report = verify(broken, source, tp, *overrides, sequence_parallel=sequence_parallel)
    numbers_hold = all(row.passed for row in report.rows) and all(check.passed for check in report.exact)
    traces_hold = all(trace.passed for trace in report.traces)
    is_repetition = slip.how == "repeat"
    assert (numbers_hold, traces_hold) == (is_repetition, not is_repetition), report.failures
    assert not report.passed


@pytest.mark.parametrize(
    ("setup", "sequence_parallel"),
    [
        (LLAMA, True), (LLAMA, False), (GPT, True), (SHARED_KV, True), (SHARED_KV, False), (SHARED_OUT, True),
        (COPIED, True),
    ],
)
def test_without_a_mistake_the_same_verification_passes(ranks, setup, sequence_parallel):
    source, tp, overrides = setup
    ranks = MutatedRanks(ranks(build_config(source, tp, *overrides).parallel.mesh_shape.world_size), "nothing")
    report = verify(ranks, source, tp, *overrides, sequence_parallel=sequence_parallel)
    assert report.passed, report.failures


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_shared_kv_gradients_are_summed_by_collectives_that_are_mutated(sequence_parallel):
    """FIELD 3.10: weight and bias of key and value, nothing else, are summed over the ranks that share a KV head."""
    collectives = list_collectives(SHARED_KV, sequence_parallel)
    assert [each.shape for each in collectives if each.axis == "tp/kv"] == [(8, 64), (8,), (8, 64), (8,)]


SMOOTHED = ("train.label_smoothing=0.1",)
FOUND_BY = {
    "row bias on every rank": (("gpt-tiny",), "logits"),  # FIELD 3.16
    "replicas counted on every rank": (("gpt-tiny",), "gradient norm"),  # FIELD 3.11
    "shards counted on rank 0 only": (("llama-tiny",), "gradient norm"),  # FIELD 3.11
    "label smoothing over the local vocabulary": (("llama-tiny", *SMOOTHED), "loss"),  # FIELD 3.1
    "another rank's part of each weight": (("llama-tiny",), "logits"),
    "initial weights by local index": (("llama-tiny",), "initial weights"),  # FIELD 3.14, 3.15
    "token masks by local index": (("gpt-tiny",), "logits"),  # FIELD 3.15
    "attention masks by local head": (("gpt-tiny", "model.dropout=0.0"), "logits"),  # FIELD 3.15
    "position in the run forgotten": (("gpt-tiny",), "logits"),
    "last own vocabulary row missed": (("llama-tiny", "model.vocab_size=8"), "linear regions on integers"),
    "one use of a tied weight lost": (("smollm-tiny",), "gradient of embedding"),  # FIELD 3.27
    "sums carried in bfloat16": (("llama-tiny",), "collectives"),  # FIELD 3.18
    "one rank steps further": (("llama-tiny",), "replicas"),  # FIELD 3.9
}


def test_every_fault_is_tried():
    assert set(FOUND_BY) | {"nothing"} == set(FAULTS)


@pytest.mark.parametrize("fault", FOUND_BY)
def test_every_fault_is_found_where_it_shows_first(ranks, fault):
    (source, *overrides), place = FOUND_BY[fault]
    report = verify(MutatedRanks(ranks(2), fault), source, 2, *overrides)
    assert not report.passed
    failed = {row.what for row in report.rows if not row.passed}
    failed |= {check.what for check in report.exact if not check.passed}
    failed |= {"collectives" for trace in report.traces if not trace.passed}
    assert place in failed, report.failures
