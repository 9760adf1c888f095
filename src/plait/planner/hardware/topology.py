"""Which devices stand together, and where the ranks of a group come to lie."""

from dataclasses import dataclass
from math import lcm

from plait.planner.hardware.constant import Constant


@dataclass(frozen=True, slots=True)
class Placement:
    """A group of ranks over the machines: `inside` of them in each of `across` scale-up domains."""

    inside: int
    across: int

    @property
    def degree(self) -> int:
        """How many ranks the group has."""
        return self.inside * self.across

    @property
    def is_local(self) -> bool:
        """Whether no byte leaves the scale-up domain."""
        return self.across == 1


@dataclass(frozen=True, slots=True)
class Topology:
    """Devices in hosts, hosts in scale-up domains, domains on a network.

    Attributes:
        host_size: devices of one host; a job takes whole hosts.
        domain_size: devices that reach each other by the fast links: a node, or a rack of several hosts.
        nic_bytes_per_s: of the network, for each device, either direction.
        nic_efficiency: share of it that large collectives reach.
        nic_latency_s: of the network, for each doubling of the number of domains.
    """

    host_size: Constant
    domain_size: Constant
    nic_bytes_per_s: Constant
    nic_efficiency: Constant
    nic_latency_s: Constant

    def place(self, degree: int, stride: int = 1, num_devices: int | None = None) -> Placement:
        """Lay out a group of `degree` ranks, neighbours `stride` devices apart, in a job of `num_devices`.

        Consecutive ranks fill a domain. A group is inside one if so many of them as fill whole hosts fit; else the
        largest divisor of the degree that fits is inside, and the rest is reached through the network.
        """
        domain = int(self.domain_size.value)
        if num_devices is not None and num_devices <= domain:
            return Placement(degree, 1)
        host = min(int(self.host_size.value), domain)
        for inside in range(min(degree, domain // stride), 1, -1):
            if degree % inside == 0 and lcm(inside * stride, host) <= domain:
                return Placement(inside, degree // inside)
        return Placement(1, degree)

    def describe(self, placement: Placement) -> str:
        """The narrowest domain that holds the group: `node`, `rack` or `network`."""
        if not placement.is_local:
            return "network"
        return "node" if placement.degree <= self.host_size.value else "rack"
