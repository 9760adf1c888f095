from math import inf

import pytest

from plait.planner.hardware import load_hardware
from plait.planner.hardware.line import Line, derive_lines

TWO = Line(((1e-6, 1e9), (2e-6, 2e9)), 0.04, ("two",))
FOUR = Line(((3e-6, 3e9), (4e-6, 6e9)), 0.02, ("four",))
EIGHT = Line(((5e-6, 9e9),), 0.02, ("eight",))


def test_a_measured_degree_is_what_was_measured() -> None:
    assert derive_lines({2: TWO, 4: FOUR}, 4, None)[4] is FOUR


def test_between_two_degrees_lies_a_straight_line_and_more_doubt() -> None:
    three = derive_lines({2: TWO, 4: FOUR}, 4, None)[3]
    assert three.pieces == ((pytest.approx(2e-6), pytest.approx(2e9)), (pytest.approx(3e-6), pytest.approx(4e9)))
    assert three.uncertainty > TWO.uncertainty
    assert three.constants == ("two", "four")


def test_one_piece_stands_for_both_between() -> None:
    six = derive_lines({4: FOUR, 8: EIGHT}, 8, None)[6]
    assert six.pieces == ((pytest.approx(4e-6), pytest.approx(6e9)), (pytest.approx(4.5e-6), pytest.approx(7.5e9)))


def test_what_the_switch_adds_is_not_mixed_with_what_ranks_add() -> None:
    lines = derive_lines({2: TWO, 4: FOUR, 8: EIGHT}, 8, 6)
    assert lines[5].pieces == FOUR.pieces
    assert lines[6].pieces == lines[7].pieces == EIGHT.pieces


def test_beyond_the_last_degree_the_line_stays() -> None:
    assert derive_lines({2: TWO, 4: FOUR}, 16, None)[16].pieces == FOUR.pieces


def test_infinite_bandwidth_stays_infinite_between() -> None:
    free = Line(((0.0, inf),), 0.0, ())
    three = derive_lines({2: free, 4: free}, 4, None)[3]
    assert three.seconds(1e12) == 0.0


def test_a_mesh_of_links_adds_one_link_for_each_rank() -> None:
    """MI300X: p ranks use p-1 links of about 45 GB/s."""
    for degree in range(3, 9):
        bandwidth = load_hardware("mi300x").links.lines["all_reduce"][degree].pieces[-1][1]
        assert bandwidth == pytest.approx(45e9 * (degree - 1), rel=0.05)


def test_a_rack_has_lines_for_all_its_devices() -> None:
    lines = load_hardware("gb200").links.lines["all_gather"]
    assert max(lines) == 72
    latencies = [min(line.pieces)[0] for line in lines.values()]
    assert latencies == sorted(latencies)
    assert latencies[-1] - latencies[6] == pytest.approx(64e-6)
