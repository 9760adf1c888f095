"""The catalog: what devices and links can do, each constant with its provenance.

hardware = load_hardware("h100")        by name, alias, file, or "measured"
hardware.memory.capacity_bytes.value    SI base units
hardware.constants["gemm.bfloat16.efficiency"].source
hardware.topology.place(16)             8 inside a node, over 2 nodes
"""

from plait.planner.hardware.build import build_hardware
from plait.planner.hardware.catalog import list_hardware, load_hardware
from plait.planner.hardware.constant import Constant, Provenance
from plait.planner.hardware.device import Hardware, Regime
from plait.planner.hardware.measured import MeasuredRates, measured_path, save_measured
from plait.planner.hardware.topology import Placement, Topology

__all__ = [
    "Constant",
    "Hardware",
    "MeasuredRates",
    "Placement",
    "Provenance",
    "Regime",
    "Topology",
    "build_hardware",
    "list_hardware",
    "load_hardware",
    "measured_path",
    "save_measured",
]
