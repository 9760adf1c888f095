"""A user's file over the entry it is based on: whose is what."""

import os
from pathlib import Path

import pytest

from plait.planner.hardware import Hardware, Provenance, load_hardware

MINE = '[sources.mine]\ntext = "my stopwatch"\ndate = "2026-11-01"\nprovenance = "measured"\nconfidence = "high"\n'


def load(folder: Path, text: str) -> Hardware:
    path = folder / "mine.toml"
    path.write_text(f'title = "mine"\nbased_on = "h100"\n{text}')
    os.utime(path, (1.77e9, 1.77e9))
    return load_hardware(path)


def list_differing(hardware: Hardware) -> set[str]:
    base = load_hardware("h100").constants
    return {key for key, constant in hardware.constants.items() if constant != base[key]}


@pytest.mark.parametrize("written", ['bandwidth = "1.0 TB/s"', 'bandwidth = { value = "1.0 TB/s" }'])
def test_what_is_stated_without_a_source_is_assumed_by_the_file(tmp_path: Path, written: str) -> None:
    hardware = load(tmp_path, f"[memory]\n{written}\n")
    constant = hardware.constants["memory.bandwidth"]
    assert (constant.value, constant.source, constant.date) == (1e12, "mine.toml", "2026-02-02")
    assert (constant.provenance, constant.confidence) == (Provenance.ASSUMED, "low")
    assert constant.uncertainty == 0.25
    assert list_differing(hardware) == {"memory.bandwidth"}


def test_the_file_says_how_it_is_known(tmp_path: Path) -> None:
    hardware = load(tmp_path, '[memory]\nbandwidth = { value = "1.0 TB/s", provenance = "measured" }\n')
    constant = hardware.constants["memory.bandwidth"]
    assert (constant.provenance, constant.source) == (Provenance.MEASURED, "mine.toml")


def test_bounds_notes_and_errors_of_the_base_are_not_those_of_the_file(tmp_path: Path) -> None:
    hardware = load(tmp_path, "[memory]\nefficiency = 0.9\n[gemm.bfloat16]\nefficiency = { value = 0.5 }\n")
    for key in ("memory.efficiency", "gemm.bfloat16.efficiency"):
        constant = hardware.constants[key]
        assert (constant.source, constant.error, constant.low, constant.note) == ("mine.toml", None, None, "")
    assert list_differing(hardware) == {"memory.efficiency", "gemm.bfloat16.efficiency"}


def test_a_source_of_a_table_is_for_what_the_file_states_beneath_it(tmp_path: Path) -> None:
    hardware = load(tmp_path, f'{MINE}[memory]\nsource = "mine"\nbandwidth = "1.0 TB/s"\n')
    assert hardware.constants["memory.bandwidth"].source == "my stopwatch"
    assert hardware.constants["memory.bandwidth"].provenance is Provenance.MEASURED
    assert list_differing(hardware) == {"memory.bandwidth"}


def test_a_source_of_the_same_name_is_another_one(tmp_path: Path) -> None:
    named = MINE.replace("sources.mine", "sources.datasheet")
    hardware = load(tmp_path, f'{named}[memory]\nbandwidth = {{ value = "1.0 TB/s", source = "datasheet" }}\n')
    assert hardware.constants["memory.bandwidth"].source == "my stopwatch"
    assert list_differing(hardware) == {"memory.bandwidth"}


def test_the_example_of_the_guide_is_a_file_that_loads(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[4] / "docs/guides/hardware.md").read_text(encoding="utf-8")
    path = tmp_path / "my-h100.toml"
    path.write_text(guide.split("```toml\n")[1].split("```")[0])
    hardware = load_hardware(path)
    assert list_differing(hardware) == {
        "memory.bandwidth", "peak.bfloat16", "topology.host_size", "topology.domain_size", "topology.nic_bandwidth",
        "topology.nic_efficiency", "collectives.all_gather.4",
    }  # fmt: skip
    constants = hardware.constants
    assert (constants["memory.bandwidth"].source, constants["memory.bandwidth"].provenance) == (path.name, "assumed")
    assert (constants["peak.bfloat16"].source, constants["peak.bfloat16"].provenance) == (path.name, "datasheet")
    assert constants["collectives.all_gather.4"].source.startswith("our all-gather")
    assert constants["topology.nic_efficiency"].provenance is Provenance.MEASURED


def test_measured_links_are_replaced_as_a_whole(tmp_path: Path) -> None:
    hardware = load(tmp_path, '[collectives.all_gather]\n8 = [["20 us", "100 GB/s"]]\n')
    constant = hardware.constants["collectives.all_gather.8"]
    assert (constant.source, constant.note) == ("mine.toml", "20 us at 100 GB/s")
    assert list_differing(hardware) == {"collectives.all_gather.8"}
