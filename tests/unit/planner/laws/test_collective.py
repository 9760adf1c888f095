"""Collectives against measured rows, and what must hold of them for any size, degree and place."""

from statistics import fmean
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.contract.collective import Collective
from plait.planner.hardware import list_hardware, load_hardware
from plait.planner.laws import estimate_collective, estimate_p2p
from plait.planner.laws.collective import CollectiveKind, count_wire_bytes
from plait.sharding import Kind
from tests.support.hardware import Row, list_rows, scale_links

GATE_MAPE = 0.08
"""Of all measured collectives from 1 MB up."""

LINES_OF_ANOTHER = {"B300-SXM": 0.10}
"""A GPU whose own lines were never fitted: those of its predecessor are held against its rows."""

KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
MEASURED = sorted({row["hardware"]["gpu"] for row in list_rows("aic_nccl_")})
NAMES = list_hardware()
BYTES = st.integers(1, 1 << 34)


def _error(row: Row) -> float:
    operation, count = row["parallel"], row["hardware"]["count"]
    estimate = estimate_collective(load_hardware(row["hardware"]["gpu"]), operation["op"], operation["bytes"], count)
    return estimate.seconds * 1e6 / row["value"] - 1


@pytest.mark.parametrize("gpu", MEASURED)
def test_gate_on_measured_collectives(gpu: str) -> None:
    errors = [_error(row) for row in list_rows("aic_nccl_") if row["hardware"]["gpu"] == gpu]
    assert len(errors) >= 24
    assert fmean(map(abs, errors)) <= LINES_OF_ANOTHER.get(gpu, GATE_MAPE)


def test_gate_on_all_measured_collectives_together() -> None:
    rows = [row for row in list_rows("aic_nccl_") if row["parallel"]["bytes"] >= 1_000_000]
    assert len(rows) == 204
    assert fmean(abs(_error(row)) for row in rows) <= GATE_MAPE


def test_other_machines_with_the_switch_launched_by_a_host() -> None:
    """H200, nccl-tests elsewhere: the bandwidths carry over, and without the switch an all-reduce is what AG+RS are."""
    h200 = load_hardware("h200")
    errors = []
    for row in list_rows("bus_h200x8_"):
        operation, num_bytes = row["parallel"]["op"], row["parallel"]["bytes"]
        ring = "ring" in operation or "nonvls" in row["id"]
        kind = "all_reduce" if operation.startswith("all_reduce") else operation
        seconds = estimate_collective(h200, kind, num_bytes, 8, multicast=not ring, launch="host").seconds
        errors.append(count_wire_bytes(kind, num_bytes, 8) / seconds / 1e9 / row["value"] - 1)
    assert len(errors) == 13
    assert fmean(map(abs, errors)) <= 0.06


def test_the_switch_makes_gather_and_scatter_dearer_than_one_all_reduce() -> None:
    for name in ("h100", "h200"):
        hardware = load_hardware(name)
        apart = sum(
            estimate_collective(hardware, kind, 1 << 28, 8).seconds for kind in ("all_gather", "reduce_scatter")
        )
        assert 1.2 < apart / estimate_collective(hardware, "all_reduce", 1 << 28, 8).seconds < 1.5


@pytest.mark.parametrize("kind", KINDS)
@given(num_tokens=st.integers(1, 4096), degree=st.integers(1, 64))
def test_bytes_on_the_wire_are_those_of_the_contract(kind: CollectiveKind, num_tokens: int, degree: int) -> None:
    collective = Collective(Kind(kind), "tp", degree, (num_tokens, 64), "bfloat16")
    counted = count_wire_bytes(kind, collective.payload_bytes, degree)
    assert counted == pytest.approx(collective.wire_bytes_per_rank)


_IDEAL = {name: scale_links(name, latency=0.0, bandwidth=float("inf")) for name in NAMES}
_FASTER = {name: scale_links(name, latency=1.0, bandwidth=1.5) for name in NAMES}
_SLOWER = {name: scale_links(name, latency=2.0, bandwidth=1.0) for name in NAMES}


@given(st.sampled_from(NAMES), st.sampled_from(KINDS), BYTES, st.integers(1, 300), st.integers(1, 64))
def test_links_without_latency_and_limit_take_no_time(
    name: str, kind: CollectiveKind, num_bytes: int, degree: int, stride: int
) -> None:
    hardware = _IDEAL[name]
    placement = hardware.topology.place(degree, stride)
    for launch in ("graph", "host"):
        assert estimate_collective(hardware, kind, num_bytes, degree, placement=placement, launch=launch).seconds == 0
        for local in (True, False):
            assert estimate_p2p(hardware, num_bytes, local=local, launch=launch).seconds == 0


@given(st.sampled_from(NAMES), st.sampled_from(KINDS), BYTES, st.integers(2, 300), st.integers(1, 64))
def test_more_bandwidth_is_never_slower_and_more_latency_never_faster(
    name: str, kind: CollectiveKind, num_bytes: int, degree: int, stride: int
) -> None:
    hardware = load_hardware(name)
    placement = hardware.topology.place(degree, stride)
    seconds = estimate_collective(hardware, kind, num_bytes, degree, placement=placement).seconds
    assert 0 < estimate_collective(_FASTER[name], kind, num_bytes, degree, placement=placement).seconds <= seconds
    assert estimate_collective(_SLOWER[name], kind, num_bytes, degree, placement=placement).seconds >= seconds


@given(st.sampled_from(NAMES), st.sampled_from(KINDS), BYTES, BYTES, st.integers(2, 300))
def test_more_bytes_are_never_faster(name: str, kind: CollectiveKind, first: int, second: int, degree: int) -> None:
    hardware = load_hardware(name)
    less, more = sorted((first, second))
    assert (
        estimate_collective(hardware, kind, less, degree).seconds
        <= estimate_collective(hardware, kind, more, degree).seconds
    )


@given(st.sampled_from(NAMES), st.sampled_from(KINDS), BYTES, st.integers(2, 300))
def test_constants_are_those_of_the_catalog(name: str, kind: CollectiveKind, num_bytes: int, degree: int) -> None:
    hardware = load_hardware(name)
    estimate = estimate_collective(hardware, kind, num_bytes, degree, launch="host")
    assert estimate.constants
    assert set(estimate.constants) <= set(hardware.constants)
    assert estimate.uncertainty > 0


def test_a_group_of_one_and_an_empty_tensor_cost_nothing() -> None:
    hardware = load_hardware("h100")
    assert estimate_collective(hardware, "all_gather", 1 << 20, 1).seconds == 0
    assert estimate_collective(hardware, "all_gather", 0, 8).seconds == 0


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "mi300x"])
def test_a_group_that_leaves_its_domain_pays_for_it(name: str) -> None:
    hardware = load_hardware(name)
    inside, beyond = (estimate_collective(hardware, "all_gather", 1 << 26, degree) for degree in (8, 16))
    assert beyond.seconds > inside.seconds
    assert beyond.uncertainty > inside.uncertainty
    assert "topology.nic_bandwidth" in beyond.constants
    assert "topology.nic_bandwidth" not in inside.constants


def test_sixteen_ranks_stay_inside_a_rack() -> None:
    gb200, b200 = load_hardware("gb200"), load_hardware("b200")
    inside = estimate_collective(gb200, "all_gather", 1 << 26, 16)
    assert "topology.nic_bandwidth" not in inside.constants
    assert inside.seconds < estimate_collective(b200, "all_gather", 1 << 26, 16).seconds


def test_rings_over_the_network_by_hand() -> None:
    """Two nodes of eight: 15/16 of the tensor through eight cards of 50 GB/s at .8, and 20 us for the doubling."""
    seconds = estimate_collective(load_hardware("h100"), "all_gather", 1 << 30, 16).seconds
    assert seconds == pytest.approx(20e-6 + 15 / 16 * 2**30 / (8 * 50e9 * 0.8))


def test_ranks_of_one_node_each_use_their_own_card() -> None:
    """Data parallel beneath tensor parallel: 8 groups of 4, one rank of each in every node."""
    hardware = load_hardware("h100")
    placement = hardware.topology.place(4, stride=8)
    seconds = estimate_collective(hardware, "all_gather", 1 << 30, 4, placement=placement).seconds
    assert seconds == pytest.approx(40e-6 + 3 / 4 * 2**30 / (50e9 * 0.8))


def test_an_exchange_sends_what_leaves_the_node_over_its_own_card() -> None:
    hardware = load_hardware("h100")
    seconds = estimate_collective(hardware, "all_to_all", 16 << 26, 16).seconds
    assert seconds == pytest.approx(20e-6 + (1 << 26) / 2 / (50e9 * 0.8))


def test_a_host_that_launches_adds_its_time() -> None:
    hardware = load_hardware("a100")
    graph, host = (
        estimate_collective(hardware, "all_reduce", 1 << 10, 8, launch=launch) for launch in ("graph", "host")
    )
    assert host.seconds - graph.seconds == pytest.approx(16e-6)
    assert graph.limit == "latency"


def test_mi300x_gathers_like_it_reduces_and_says_so() -> None:
    hardware = load_hardware("mi300x")
    gather = estimate_collective(hardware, "all_gather", 1 << 28, 8)
    assert 2 * gather.seconds > estimate_collective(hardware, "all_reduce", 1 << 28, 8).seconds
    assert hardware.constants[gather.constants[0]].provenance == "assumed"
    assert gather.uncertainty >= 0.25


def test_a_neighbour_is_nearer_inside_than_over_the_network() -> None:
    hardware = load_hardware("h100")
    near, far = (estimate_p2p(hardware, 1 << 26, local=local) for local in (True, False))
    assert near.seconds == pytest.approx(5.8e-6 + 2**26 / 376e9)
    assert far.seconds == pytest.approx(20e-6 + 2**26 / 40e9)
