import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.planner.hardware import Placement, list_hardware, load_hardware


@pytest.mark.parametrize(
    ("name", "degree", "stride", "num_devices", "expected"),
    [
        ("h100", 8, 1, None, Placement(8, 1)),
        ("h100", 16, 1, None, Placement(8, 2)),
        ("h100", 4, 8, None, Placement(1, 4)),
        ("h100", 4, 4, None, Placement(2, 2)),
        ("h100", 3, 1, None, Placement(1, 3)),
        ("h100", 3, 1, 6, Placement(3, 1)),
        ("h100", 6, 1, None, Placement(2, 3)),
        ("gb200-nvl72", 16, 1, None, Placement(16, 1)),
        ("gb200-nvl72", 72, 1, None, Placement(72, 1)),
        ("gb200-nvl72", 128, 1, None, Placement(64, 2)),
        ("gb200-nvl72", 8, 8, None, Placement(8, 1)),
        ("gb200-nvl72", 3, 1, None, Placement(3, 1)),
    ],
)
def test_groups_lie_where_whole_hosts_hold_them(
    name: str, degree: int, stride: int, num_devices: int | None, expected: Placement
) -> None:
    assert load_hardware(name).topology.place(degree, stride, num_devices) == expected


@given(st.sampled_from(list_hardware()), st.integers(1, 600), st.integers(1, 200))
def test_every_rank_has_a_place_and_no_domain_too_many(name: str, degree: int, stride: int) -> None:
    topology = load_hardware(name).topology
    placement = topology.place(degree, stride)
    assert placement.degree == degree
    assert placement.inside == 1 or placement.inside * stride <= topology.domain_size.value


def test_domains_have_names() -> None:
    topology = load_hardware("gb200").topology
    assert [topology.describe(topology.place(degree)) for degree in (4, 72, 144)] == ["node", "rack", "network"]
