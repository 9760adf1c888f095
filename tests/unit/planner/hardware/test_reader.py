"""What is wrong with a catalog file is said at once, with the file and the key."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.planner.hardware import build_hardware, load_hardware
from plait.planner.hardware.catalog import FOLDER

CPU = (FOLDER / "cpu.toml").read_text()


def _load(tmp_path: Path, text: str) -> ConfigError:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_hardware(path)
    assert "mine.toml" in raised.value.message
    return raised.value


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ('capacity = "16 GB"\n', "", "memory.capacity: is missing"),
        ('capacity = "16 GB"', 'capacity = "16 GB/s"', "memory.capacity: should be a number and one of B, MB, GB"),
        ('capacity = "16 GB"', 'capacity = "16 gb"', '"gb" is another unit'),
        ('capacity = "16 GB"', "capacity = 16", "the unit is missing"),
        ('capacity = "16 GB"', "capacity = true", "memory.capacity: should be a number"),
        ('capacity = "16 GB"', 'capacity = "-16 GB"', "memory.capacity: should be more than 0"),
        ('capacity = "16 GB"', 'capacity = "16 GB"\ncapacty = "16 GB"', "memory.capacty: is not known; did you mean"),
        ('capacity = "16 GB"', 'capacity = { value = "16 GB", unit = "GB" }', "memory.capacity.unit: is not known"),
        ('capacity = "16 GB"', 'capacity = { value = "16 GB", source = "me" }', 'source "me" is not under [sources]'),
        ('capacity = "16 GB"', 'capacity = { value = "16 GB", error = -1 }', "capacity.error: should be a share"),
        ('capacity = "16 GB"', 'capacity = { value = "16 GB", low = 3 }', "memory.capacity.low: should be"),
        ('capacity = "16 GB"', 'capacity = { value = "16 GB", confidence = "sure" }', "capacity.confidence: should"),
        ("[peak]", "[peek]", "peak: is missing"),
        ("float32 = {", "fp32 = {", "peak.fp32: is not known; "),
        ("[gemm.bfloat16]", "[gemm.bf16]", "gemm.bf16: is not known; did you mean"),
        ("wave_weight = 0\n", 'wave_weight = "0 us"\n', "gemm.float32.wave_weight: should be a plain number"),
        ('launch = "8 us"\n', 'launch = "8 us"\nregime = "fast"\n', "gemm.float32.regime: should be one of burst"),
        ('2 = { pieces = [["900 us", "0.75 GB/s"]] }', "2 = 3", "collectives.all_gather.2: should be pieces such as"),
        ('["900 us", "0.75 GB/s"]', '["900 us", "0.75 GB"]', 'collectives.all_gather.2: should be'),
        ('["900 us", "0.75 GB/s"]', '["900 us"]', "collectives.all_gather.2: a piece should be a latency and a band"),
        ('2 = { pieces = [["900 us"', '1 = { pieces = [["900 us"', "collectives.all_gather.1: should be a degree"),
        ("[collectives.all_reduce]", "[collectives.all_reduces]", "collectives.all_reduce: is missing"),
        ('title = "two', 'title = 2\nx = "two', "title: should be a string"),
        ('provenance = "measured"', 'provenance = "guessed"', "sources.box.provenance: should be one of"),
        ('date = "2026-11-30", provenance = "measured"', 'provenance = "measured"', "sources.box.date: is missing"),
        ("[overlap]", "[more]", "more.gain: is not known"),
        ("num_multi", "speed = 3\nnum_multi", "speed: is not known; known are aliases, attention, collectives, derate"),
        ("num_multi", 'name = "box"\nnum_multi', "name: is not known"),
        ("num_multi", 'provenance = "measured"\nnum_multi', "provenance: is not known"),
        ("[memory]", "[colour]\n\n[memory]", "colour: is not known"),
        ('capacity = "16 GB"', 'capacity = "inf GB"', "memory.capacity: should be a finite number, not 'inf GB'"),
        ('host_size = "8 devices"', 'host_size = "2.5 devices"', "topology.host_size: should be a whole number of dev"),
        ('domain_size = "8 devices"', 'domain_size = "1e12 devices"', "topology.domain_size: should be at most 131072"),
        ('domain_size = "8 devices"', 'domain_size = "inf devices"', "topology.domain_size: should be a finite number"),
        ("efficiency = 1.0", "efficiency = 1.2", "memory.efficiency: should be at most 1, not 1.2"),
        ("nic_efficiency = 0.8", "nic_efficiency = 9", "topology.nic_efficiency: should be at most 1, not 9"),
        ("sustained = 1.0", "sustained = 3", "derate.sustained: should be at most 1, not 3"),
        ("gain = { value = 0.65", "gain = { value = 1.65", "overlap.gain: should be at most 1, not 1.65"),
    ],
)  # fmt: skip
def test_each_mistake_is_named(before: str, after: str, expected: str, tmp_path: Path) -> None:
    assert before in CPU
    error: Any = _load(tmp_path, CPU.replace(before, after, 1))
    assert expected in error.message


def test_all_mistakes_come_at_once(tmp_path: Path) -> None:
    text = CPU.replace('capacity = "16 GB"\n', "").replace(
        'bandwidth = { value = "35.4 GB/s"', 'bandwidth = { value = "1"'
    )
    error = _load(tmp_path, text)
    assert "2 problems" in error.message
    assert "memory.capacity: is missing" in error.message
    assert "memory.bandwidth: should be a number and one of B/s, MB/s, GB/s, TB/s: the unit is missing" in error.message


def test_a_catalog_states_the_source_of_everything() -> None:
    tree = tomllib.loads(CPU.replace('[memory]\nsource = "guess"', "[memory]", 1))
    with pytest.raises(ConfigError, match="memory.capacity: has no source"):
        build_hardware(tree, name="cpu", where="cpu.toml")


def test_an_empty_file_lists_what_it_needs(tmp_path: Path) -> None:
    message = _load(tmp_path, "").message
    for key in (
        "title",
        "sources",
        "peak",
        "gemm",
        "memory.bandwidth",
        "topology.domain_size",
        "collectives.all_gather",
    ):
        assert f"{key}: is missing" in message


@pytest.mark.parametrize("text", ["a = ", "\x00", 'sources = 3\npeak = 3\ngemm = "x"\ncollectives = []\n'])
def test_whatever_a_file_says_the_error_is_ours(text: str, tmp_path: Path) -> None:
    _load(tmp_path, text)
