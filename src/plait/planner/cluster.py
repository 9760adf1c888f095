"""Devices of one kind, and how many."""

from dataclasses import dataclass

from plait.planner.hardware.device import Hardware


@dataclass(frozen=True, slots=True)
class Cluster:
    """So many devices of one kind."""

    hardware: Hardware
    num_devices: int
