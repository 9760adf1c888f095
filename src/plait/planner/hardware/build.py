"""From the tree of a catalog file to a `Hardware`."""

from typing import cast, get_args

from plait.errors import ConfigError
from plait.planner.hardware.constant import Constant
from plait.planner.hardware.device import (
    AttentionConstants,
    Derate,
    GemmConstants,
    Hardware,
    Links,
    Memory,
    Overlap,
    Regime,
)
from plait.planner.hardware.line import Line, derive_lines
from plait.planner.hardware.reader import Reader, Tree
from plait.planner.hardware.topology import Topology

FORMATS = ("bfloat16", "float8", "float4", "float32")
"""Number formats that a catalog may give rates for; float16 is as fast as bfloat16."""

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def build_hardware(tree: Tree, *, name: str, where: str) -> Hardware:
    """Check a catalog tree and make a `Hardware` of it; `where` is named in errors.

    Raises:
        ConfigError: a constant is missing, in a wrong unit or without a source, or a key is not known; all are listed.
    """
    reader = Reader(tree)
    title = reader.take_text("title")
    reader.take_texts("aliases")
    topology = _read_topology(reader)
    hardware = Hardware(
        name=name,
        title=title,
        where=where,
        num_multiprocessors=reader.take("num_multiprocessors", "1"),
        peaks=_read_peaks(reader),
        memory=_read_memory(reader),
        gemms=_read_gemms(reader),
        attention=_read_attention(reader),
        derate=_read_derate(reader),
        links=_read_links(reader, int(topology.domain_size.value)),
        topology=topology,
        overlap=_read_overlap(reader),
        constants=reader.constants,
    )
    reader.check_all_taken()
    if reader.problems:
        raise ConfigError.from_problems(
            where, reader.problems, hint="plait/planner/hardware/catalog/cpu.toml has every key"
        )
    return hardware


def _read_peaks(reader: Reader) -> dict[str, Constant]:
    return {dtype: reader.take(f"peak.{dtype}", "FLOP/s") for dtype in reader.list_names("peak", FORMATS)}


def _read_memory(reader: Reader) -> Memory:
    return Memory(
        capacity_bytes=reader.take("memory.capacity", "B"),
        bytes_per_s=reader.take("memory.bandwidth", "B/s"),
        efficiency=reader.take_share("memory.efficiency"),
        launch_s=reader.take("memory.launch", "s", positive=False),
    )


def _read_gemms(reader: Reader) -> dict[str, GemmConstants]:
    return {dtype: _read_gemm(reader, f"gemm.{dtype}") for dtype in reader.list_names("gemm", FORMATS)}


def _read_gemm(reader: Reader, key: str) -> GemmConstants:
    return GemmConstants(
        efficiency=reader.take_share(f"{key}.efficiency"),
        prologue=reader.take(f"{key}.prologue", "elements", positive=False),
        wave_weight=reader.take(f"{key}.wave_weight", "1", positive=False, most=1.0),
        memory_efficiency=reader.take_share(f"{key}.memory_efficiency"),
        launch_s=reader.take(f"{key}.launch", "s", positive=False),
        regime=cast(Regime, reader.take_choice(f"{key}.regime", get_args(Regime), "burst")),
    )


def _read_attention(reader: Reader) -> AttentionConstants:
    return AttentionConstants(
        flops_per_s=reader.take("attention.rate", "FLOP/s"),
        half_length=reader.take("attention.half_length", "tokens", positive=False),
        backward_rate=reader.take("attention.backward_rate", "1"),
    )


def _read_derate(reader: Reader) -> Derate:
    return Derate(
        sustained=reader.take_share("derate.sustained"),
        training=reader.take_share("derate.training"),
        long_burst=reader.take_share("derate.long_burst"),
    )


def _read_links(reader: Reader, domain_size: int) -> Links:
    has_multicast = "multicast_from" in reader.list_keys("collectives")
    multicast = int(reader.take_count("collectives.multicast_from").value) if has_multicast else None
    lines = {}
    for kind in KINDS:
        measured = _read_measured(reader, f"collectives.{kind}")
        if not measured:
            reader.problems.append(f"collectives.{kind}: is missing, or has no degree")
            measured = {2: Line(((0.0, 1.0),), 1.0, ())}
        lines[kind] = derive_lines(measured, domain_size, multicast if kind == "all_reduce" else None)
    return Links(
        lines=lines,
        p2p_bytes_per_s=reader.take("collectives.p2p", "B/s"),
        host_launch_s=reader.take("collectives.host_launch", "s", positive=False),
    )


def _read_measured(reader: Reader, key: str) -> dict[int, Line]:
    measured = {}
    for degree in reader.list_keys(key):
        if not degree.isdecimal() or int(degree) < 2:
            reader.problems.append(f"{key}.{degree}: should be a degree from 2 up")
            continue
        constant, pieces = reader.take_pieces(f"{key}.{degree}")
        measured[int(degree)] = Line(pieces, constant.uncertainty, (constant.name,))
    return measured


def _read_topology(reader: Reader) -> Topology:
    return Topology(
        host_size=reader.take_count("topology.host_size"),
        domain_size=reader.take_count("topology.domain_size"),
        nic_bytes_per_s=reader.take("topology.nic_bandwidth", "B/s"),
        nic_efficiency=reader.take_share("topology.nic_efficiency"),
        nic_latency_s=reader.take("topology.nic_latency", "s", positive=False),
    )


def _read_overlap(reader: Reader) -> Overlap:
    return Overlap(
        compute_tax=reader.take("overlap.compute_tax", "1"),
        gain=reader.take("overlap.gain", "1", positive=False, most=1.0),
        least_gemm_s=reader.take("overlap.least_gemm", "s", positive=False),
    )
