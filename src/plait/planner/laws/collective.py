"""Collectives: latency-bandwidth lines inside a scale-up domain, rings over the network beyond it."""

from functools import lru_cache
from math import ceil, hypot, log2
from typing import Literal

from plait.planner.hardware import Hardware, Placement, Provenance
from plait.planner.hardware.constant import USUAL_ERROR
from plait.planner.hardware.line import Line
from plait.planner.laws.estimate import Estimate

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

Launch = Literal["graph", "host"]


@lru_cache(maxsize=65536)
def estimate_collective(
    hardware: Hardware,
    kind: CollectiveKind,
    payload_bytes: float,
    degree: int,
    *,
    placement: Placement | None = None,
    launch: Launch = "graph",
    multicast: bool = True,
) -> Estimate:
    """How long a collective of a whole tensor of `payload_bytes` takes: gathered, scattered, reduced or exchanged.

    `placement` says how the ranks lie over the domains, as `Topology.place` answers; without it they are a job of
    their own. Beyond a domain both levels are pipelined: the slower one counts, and the network's latency. Without
    `multicast` an all-reduce is a reduce-scatter and an all-gather.
    """
    if degree == 1 or payload_bytes == 0:
        return Estimate(0.0, 0.0, (), "latency")
    where = placement or hardware.topology.place(degree, num_devices=degree)
    inside_bytes, network_bytes = _split_bytes(kind, payload_bytes, where)
    inside = _estimate_inside(hardware, kind, inside_bytes, where.inside, multicast)
    launch_s = hardware.links.host_launch_s.value if launch == "host" else 0.0
    names = (hardware.links.host_launch_s.name,) if launch == "host" else ()
    if where.is_local:
        return Estimate(inside.seconds + launch_s, inside.uncertainty, inside.constants + names, inside.limit)
    topology = hardware.topology
    latency_s = topology.nic_latency_s.value * ceil(log2(where.across)) + launch_s
    network_s = network_bytes / _network_rate(hardware)
    used = (topology.nic_bytes_per_s.name, topology.nic_efficiency.name, topology.nic_latency_s.name)
    return Estimate(
        latency_s + max(inside.seconds, network_s),
        hypot(inside.uncertainty, topology.nic_efficiency.uncertainty),
        (*inside.constants, *used, *names),
        "latency" if latency_s > max(inside.seconds, network_s) else "bandwidth",
    )


def estimate_p2p(hardware: Hardware, num_bytes: float, *, local: bool, launch: Launch = "graph") -> Estimate:
    """How long it takes to send so many bytes to one neighbour, inside the scale-up domain or over the network."""
    links, topology = hardware.links, hardware.topology
    launch_s = links.host_launch_s.value if launch == "host" else 0.0
    if local:
        line = links.lines["all_gather"][2]
        latency_s, rate = min(line.pieces)[0] + launch_s, links.p2p_bytes_per_s.value
        uncertainty = hypot(line.uncertainty, links.p2p_bytes_per_s.uncertainty)
        names = (links.p2p_bytes_per_s.name, *line.constants)
    else:
        latency_s, rate = topology.nic_latency_s.value + launch_s, _network_rate(hardware)
        uncertainty = topology.nic_efficiency.uncertainty
        names = (topology.nic_bytes_per_s.name, topology.nic_efficiency.name, topology.nic_latency_s.name)
    moving_s = num_bytes / rate
    return Estimate(latency_s + moving_s, uncertainty, names, "latency" if latency_s > moving_s else "bandwidth")


def count_wire_bytes(kind: CollectiveKind, payload_bytes: float, degree: int) -> float:
    """Bytes out of every rank's port: (p-1)/p of the tensor, twice that to reduce it; of an exchange its own part."""
    share = (degree - 1) / degree
    if kind == "all_reduce":
        share *= 2
    elif kind == "all_to_all":
        share /= degree
    return share * payload_bytes


def _split_bytes(kind: CollectiveKind, payload_bytes: float, where: Placement) -> tuple[float, float]:
    """The tensor that a collective inside the domain moves, and the bytes that go through every network card.

    A ring enters and leaves a domain through all its cards, each with a part of the tensor; an exchange sends what is
    for other domains straight through the rank's own card.
    """
    if kind != "all_to_all":
        return payload_bytes, count_wire_bytes(kind, payload_bytes, where.degree) / where.inside
    own_bytes = payload_bytes / where.degree
    leaving = (where.degree - where.inside) / where.degree
    return own_bytes * where.inside * where.inside / where.degree, own_bytes * leaving


def _estimate_inside(
    hardware: Hardware, kind: CollectiveKind, payload_bytes: float, degree: int, multicast: bool
) -> Estimate:
    if degree == 1:
        return Estimate(0.0, 0.0, (), "latency")
    if kind == "all_reduce" and not multicast:
        halves = [_follow(hardware, half, payload_bytes, degree) for half in ("reduce_scatter", "all_gather")]
        first, second = halves
        return Estimate(
            first.seconds + second.seconds,
            max(first.uncertainty, second.uncertainty),
            first.constants + second.constants,
            first.limit,
        )
    return _follow(hardware, kind, payload_bytes, degree)


def _follow(hardware: Hardware, kind: CollectiveKind, payload_bytes: float, degree: int) -> Estimate:
    """An exchange loads every port like an all-gather of as many bytes, and was not measured."""
    line = _line(hardware, "all_gather" if kind == "all_to_all" else kind, degree)
    wire_bytes = count_wire_bytes(kind, payload_bytes, degree)
    seconds = line.seconds(wire_bytes)
    latency_s = min(line.pieces)[0]
    uncertainty = line.uncertainty if kind != "all_to_all" else max(line.uncertainty, USUAL_ERROR[Provenance.ASSUMED])
    return Estimate(seconds, uncertainty, line.constants, "latency" if 2 * latency_s > seconds else "bandwidth")


def _line(hardware: Hardware, kind: str, degree: int) -> Line:
    lines = hardware.links.lines[kind]
    return lines[degree] if degree in lines else lines[max(lines)]


def _network_rate(hardware: Hardware) -> float:
    return hardware.topology.nic_bytes_per_s.value * hardware.topology.nic_efficiency.value
