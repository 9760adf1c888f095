"""What is chosen for a collective GEMM, and the reason given where it is not what was asked."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import OverlapConfig
from plait.errors import ConfigError
from plait.overlap.choice import LIBRARY, Choice, Way
from plait.overlap.machine.rates import GemmRates, LibraryRates, LinkRates, Rates
from plait.overlap.predict import predict
from plait.overlap.select import check_transport, choose, needs_rates
from plait.overlap.site import Site
from plait.schedule.program import build_program
from plait.schedule.step import Method
from plait.schedule.work import Operation, Work, derive_work
from plait.sharding import Invariant, Partial, Replicate, Shard, derive_transition

SITE = Site("layers.0.mlp.gate_up", "mlp", 1024, 2048, "float32")
ALL = {LIBRARY: None, "ring": None, "shm": None}
NOT_SHM = {LIBRARY: None, "ring": None, "shm": "the ranks are on 2 hosts"}
NOTHING = {LIBRARY: None, "ring": "there is no process group"}
FLOPS_PER_S = 50e9


def build_work(operation: Operation, num_rows: int = 1024, degree: int = 2, *, is_sharded: bool = True) -> Work:
    outside = Shard(0) if is_sharded else Invariant()
    entry, exit = derive_transition(outside, Replicate()), derive_transition(Partial(), outside)
    return derive_work(operation, entry if "column" in operation else exit, num_rows, degree)


FORWARD, BACKWARD = build_work(Operation.COLUMN_FORWARD), build_work(Operation.COLUMN_BACKWARD)


def build_rates(
    ratio: float, *, contention: float = 0.0, link_ratio: float | None = None, num_rows: int = 1024
) -> Rates:
    """Rates at which the library's gather takes `ratio` times as long as the GEMM of SITE at degree 2."""
    gemm_s = num_rows * SITE.flops_per_row / FLOPS_PER_S
    whole_bytes = num_rows * SITE.width * 4
    library = whole_bytes / gemm_s / ratio
    link = whole_bytes / 2 / gemm_s / (link_ratio or ratio)
    return Rates(
        GemmRates(2e-6, FLOPS_PER_S, 16.0),
        LibraryRates(2e-4, library, library, library / 2),
        tuple(LinkRates(name, 4e-5, 1e-4, link, 0.0, 4e9, contention) for name in ("ring", "shm")),
    )


def ask(config: OverlapConfig | str, work: Work = FORWARD, site: Site = SITE, **how: Any) -> Choice:
    config = OverlapConfig.model_validate(config)
    return choose(config, site, work, **{"reachable": ALL, "rates": None, **how})


def test_disabled_is_the_library_and_as_asked() -> None:
    choice = ask("disabled", rates=build_rates(1.0))
    assert (choice.way, choice.reason, choice.is_as_asked) == (Way(Method.NONE, 1, LIBRARY), "disabled", True)


@pytest.mark.parametrize("region", ["attention", "head"])
def test_mlp_only_leaves_other_regions_alone(region: Any) -> None:
    assert ask("mlp_only").overlaps
    choice = ask("mlp_only", site=replace(SITE, region=region))
    assert not choice.overlaps
    assert (choice.reason, choice.is_as_asked) == (f"belongs to the {region}, not to an MLP", True)


@pytest.mark.parametrize("policy", ["full", "auto"])
def test_where_nothing_moves_nothing_is_overlapped_and_that_is_as_asked(policy: str) -> None:
    whole = build_work(Operation.COLUMN_FORWARD, is_sharded=False)
    alone = build_work(Operation.COLUMN_FORWARD, degree=1)
    for work in (whole, alone):
        choice = ask(OverlapConfig(policy=policy, method="ring", chunks=4), work)
        assert (choice.overlaps, choice.reason, choice.is_as_asked) == (False, "nothing moves", True)


def test_without_tokens_nothing_is_overlapped() -> None:
    choice = ask("full", build_work(Operation.COLUMN_FORWARD, num_rows=0))
    assert (choice.overlaps, choice.reason, choice.is_as_asked) == (False, "there are no tokens", True)


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize("rates", [None, build_rates(0.01), build_rates(1.0), build_rates(1.0, contention=1.0)])
def test_full_overlaps_wherever_something_moves(operation: Operation, is_sharded: bool, rates: Rates | None) -> None:
    work = build_work(operation, is_sharded=is_sharded)
    choice = ask("full", work, rates=rates)
    assert choice.overlaps == bool(work.flows)
    assert choice.is_as_asked


@pytest.mark.parametrize("rates", [None, build_rates(1.0)])
def test_what_is_asked_for_by_name_is_what_runs(rates: Rates | None) -> None:
    config = OverlapConfig(policy="full", method="ring_two_way", chunks=3, transport="ring")
    choice = ask(config, rates=rates)
    assert (choice.way, choice.reason) == (Way(Method.RING_TWO_WAY, 3, "ring"), "asked for")
    assert choice.asked == "full method=ring_two_way chunks=3 transport=ring"
    assert choice.is_as_asked
    assert (choice.predicted_s is None) == (rates is None)


def test_bulk_needs_an_independent_gemm() -> None:
    config = OverlapConfig(policy="full", method="bulk")
    assert ask(config, BACKWARD).method is Method.BULK
    choice = ask(config, FORWARD)
    assert (choice.method, choice.is_as_asked) == (Method.NONE, False)
    assert choice.reason.startswith("bulk needs a GEMM that does not need what moves")


def test_what_sums_cost_keeps_small_reductions_whole() -> None:
    """Of a reduction in pieces each owner sums its own, with a call that a small piece does not pay for."""
    work, rates = build_work(Operation.ROW_FORWARD, num_rows=64), build_rates(1.0, num_rows=64)
    slow = replace(rates, links=tuple(replace(link, latency_s=1e-6, step_s=1e-6) for link in rates.links))
    dear = replace(slow, links=tuple(replace(link, add_s=1.0) for link in slow.links))
    assert ask("auto", work, rates=slow).overlaps
    assert not ask("auto", work, rates=dear).overlaps


def test_chunks_that_were_asked_for_are_not_lost_to_bulk() -> None:
    choice = ask(OverlapConfig(policy="full", chunks=4), BACKWARD, rates=build_rates(0.5))
    assert choice.method is not Method.BULK
    assert choice.chunks == 4


def test_more_chunks_than_rows_are_not_as_asked() -> None:
    choice = ask(OverlapConfig(policy="full", method="direct", chunks=8), build_work(Operation.ROW_FORWARD, num_rows=7))
    assert (choice.chunks, choice.reason, choice.is_as_asked) == (4, "no rank has more than 4 rows", False)


def test_no_transport_is_a_reason_and_not_what_full_asks_for() -> None:
    for policy, is_as_asked in (("full", False), ("auto", True)):
        choice = ask(policy, reachable=NOTHING, rates=build_rates(1.0))
        assert (choice.overlaps, choice.is_as_asked) == (False, is_as_asked)
        assert choice.reason == "ring: there is no process group"


def test_a_named_transport_is_never_replaced_by_another() -> None:
    for policy in ("full", "auto"):
        choice = ask(OverlapConfig(policy=policy, transport="shm"), reachable=NOT_SHM, rates=build_rates(1.0))
        assert (choice.way.transport, choice.is_as_asked) == (LIBRARY, False)
        assert choice.reason == "shm: the ranks are on 2 hosts"
    assert ask(OverlapConfig(policy="full", transport="symm_mem")).reason == "symm_mem: there is no such transport here"


def test_a_transport_that_cannot_execute_a_method_is_not_chosen_for_it() -> None:
    capable = {"ring": frozenset(Method), "shm": frozenset({Method.NONE, Method.DIRECT})}
    assert ask(OverlapConfig(policy="full", method="ring"), capable=capable).transport == "ring"
    choice = ask(OverlapConfig(policy="full", method="ring", transport="shm"), capable=capable)
    assert (choice.overlaps, choice.is_as_asked, choice.reason) == (False, False, "shm cannot execute ring")


SYMM_MEM = {"reachable": {**ALL, "symm_mem": None}, "capable": {"symm_mem": frozenset({Method.DIRECT})}}


def test_a_fused_operation_runs_where_it_is_asked_for_as_one_way_without_chunks() -> None:
    config = OverlapConfig(policy="full", transport="symm_mem")
    choice = ask(config, **SYMM_MEM)
    assert (choice.way, choice.reason, choice.is_as_asked) == (
        Way(Method.DIRECT, 1, "symm_mem"), "the only way", True,
    )  # fmt: skip
    assert not needs_rates(config)
    cut = ask(config.model_copy(update={"chunks": 4}), **SYMM_MEM)
    assert (cut.way, cut.reason, cut.is_as_asked) == (choice.way, "symm_mem has no chunks", False)
    ring = ask(config.model_copy(update={"method": "ring"}), **SYMM_MEM)
    assert (ring.way, ring.reason, ring.is_as_asked) == (
        Way(Method.NONE, 1, "shm"), "symm_mem cannot execute ring", False,
    )  # fmt: skip
    auto = ask(OverlapConfig(policy="auto", transport="symm_mem"), **SYMM_MEM)
    assert (auto.overlaps, auto.reason) == (False, "what computing and moving cost here was not measured")


def test_method_none_is_the_library_or_the_named_transport_without_overlap() -> None:
    for policy in ("full", "auto"):
        plain = OverlapConfig(policy=policy, method="none")
        assert ask(plain, reachable=NOT_SHM).way == Way(Method.NONE, 1, LIBRARY)
        assert ask(plain).way == Way(Method.NONE, 1, "shm"), "ranks that share memory have their collectives in it"
        choice = ask(OverlapConfig(policy=policy, method="none", transport="ring"), rates=build_rates(1.0))
        assert (choice.way, choice.is_as_asked) == (Way(Method.NONE, 1, "ring"), True)


def test_auto_without_rates_overlaps_nothing() -> None:
    choice = ask("auto")
    assert (choice.overlaps, choice.is_as_asked) == (False, True)
    assert "not measured" in choice.reason


def test_auto_overlaps_what_pays_and_cuts_finer_the_more_there_is_to_hide() -> None:
    chunks = [ask("auto", reachable=NOT_SHM, rates=build_rates(ratio)).chunks for ratio in (0.1, 0.5, 0.9)]
    assert chunks[0] == 1
    assert chunks == sorted(chunks)
    assert chunks[-1] >= 4


def test_auto_answers_none_where_moving_is_the_work_of_the_same_core() -> None:
    choice = ask("auto", rates=build_rates(0.2, contention=1.0, link_ratio=0.22))
    assert (choice.overlaps, choice.is_as_asked) == (False, True)
    assert "by the cost model" in choice.reason
    assert choice.predicted_s == choice.predicted_serial_s


def test_auto_answers_none_where_there_is_too_little_to_gain() -> None:
    assert not ask("auto", rates=build_rates(0.001)).overlaps
    assert ask("full", rates=build_rates(0.001)).overlaps


def test_of_two_transports_the_faster_is_chosen() -> None:
    slow, fast = (replace(build_rates(ratio).links[0], transport=name) for name, ratio in (("ring", 2.0), ("shm", 0.5)))
    rates = replace(build_rates(2.0), links=(slow, fast))
    assert ask("auto", rates=rates).transport == "shm"


@given(
    ratio=st.floats(0.02, 4.0),
    contention=st.floats(0.0, 1.0),
    operation=st.sampled_from(list(Operation)),
    num_rows=st.integers(1, 2048),
    degree=st.integers(2, 4),
    is_sharded=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_auto_is_never_slower_than_the_library_by_its_own_model(
    ratio: float, contention: float, operation: Operation, num_rows: int, degree: int, is_sharded: bool
) -> None:
    work = build_work(operation, num_rows, degree, is_sharded=is_sharded)
    rates = build_rates(ratio, contention=contention)
    choice = ask("auto", work, rates=rates)
    if not work.flows:
        assert not choice.overlaps
        return
    serial_s = predict(Way(Method.NONE, 1, LIBRARY), work, SITE, rates).duration_s
    assert choice.predicted_s is not None
    assert choice.predicted_s <= serial_s
    assert (choice.predicted_s < serial_s) or choice.way == Way(Method.NONE, 1, "shm")
    assert choice.transport != LIBRARY
    assert choice == ask("auto", work, replace(SITE, label="layers.7.mlp.gate_up"), rates=rates)
    build_program(work, choice.method, choice.chunks, rank=0)


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        (OverlapConfig(), False),
        (OverlapConfig(policy="auto"), True),
        (OverlapConfig(policy="full"), True),
        (OverlapConfig(policy="full", method="none"), False),
        (OverlapConfig(policy="full", method="direct", chunks=2, transport="ring"), False),
        (OverlapConfig(policy="auto", method="direct", chunks=2, transport="ring"), True),
    ],
)
def test_rates_are_needed_only_where_something_is_left_open(config: OverlapConfig, needs: bool) -> None:
    assert needs_rates(config) == needs


def test_a_transport_that_cannot_serve_is_refused_with_those_that_can() -> None:
    config = OverlapConfig(policy="full", transport="shm")
    check_transport(config, ALL)
    check_transport(OverlapConfig(policy="disabled", transport="shm"), NOT_SHM)
    with pytest.raises(ConfigError, match="overlap.transport = shm: the ranks are on 2 hosts") as caught:
        check_transport(config, NOT_SHM)
    assert caught.value.hint == "ring can serve; overlap.transport=auto chooses"
    with pytest.raises(ConfigError, match="overlap.transport = symm_mem: there is no such transport here"):
        check_transport(OverlapConfig(policy="full", transport="symm_mem"), NOT_SHM)
