"""A device and its links, as the laws see them: every number is a constant with its provenance."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from plait.errors import ConfigError
from plait.planner.hardware.constant import Constant
from plait.planner.hardware.line import Line
from plait.planner.hardware.topology import Topology

Regime = Literal["burst", "sustained", "training"]
"""How long a device computes: a moment, as in tables of kernel times; at its steady clock; in a training run, where
stragglers, hosts and allocators take their share too."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory.

    Attributes:
        efficiency: share of the data sheet's bandwidth that streaming kernels reach.
        launch_s: what every memory-bound kernel takes besides.
    """

    capacity_bytes: Constant
    bytes_per_s: Constant
    efficiency: Constant
    launch_s: Constant

    @property
    def streamed_bytes_per_s(self) -> float:
        """What streaming kernels read and write in a second."""
        return self.bytes_per_s.value * self.efficiency.value


@dataclass(frozen=True, slots=True)
class GemmConstants:
    """The law of GEMMs in one number format.

    Attributes:
        efficiency: share of the peak that the main loop reaches.
        prologue: begin and end of a tile, in elements of K.
        wave_weight: how much of the last wave's idle multiprocessors is paid: 0 nothing, 1 all.
        memory_efficiency: share of the memory's bandwidth where a GEMM is bound by it.
        regime: in which of them it was measured.
    """

    efficiency: Constant
    prologue: Constant
    wave_weight: Constant
    memory_efficiency: Constant
    launch_s: Constant
    regime: Regime


@dataclass(frozen=True, slots=True)
class AttentionConstants:
    """Flash attention: `flops_per_s * s / (s + half_length)`, where causal FLOPs are counted once.

    Attributes:
        backward_rate: share of the forward's rate.
    """

    flops_per_s: Constant
    half_length: Constant
    backward_rate: Constant


@dataclass(frozen=True, slots=True)
class Derate:
    """Share of the burst rate that remains.

    Attributes:
        sustained: of GEMMs one after another at the steady clock.
        training: in a run from end to end.
        long_burst: of one GEMM that is so long that the burst ends within it.
    """

    sustained: Constant
    training: Constant
    long_burst: Constant


@dataclass(frozen=True, slots=True)
class Links:
    """What moves bytes inside the scale-up domain.

    Attributes:
        lines: per kind of collective and degree, its latency-bandwidth lines.
        host_launch_s: what a collective takes besides where a host launches it, not a graph.
    """

    lines: Mapping[str, Mapping[int, Line]]
    p2p_bytes_per_s: Constant
    host_launch_s: Constant


@dataclass(frozen=True, slots=True)
class Overlap:
    """GEMMs beside collectives.

    Attributes:
        compute_tax: by which factor a GEMM takes longer while a collective takes multiprocessors from it.
        gain: share of what an ideal schedule hides that real kernels hide.
        least_gemm_s: shorter GEMMs gain nothing.
    """

    compute_tax: Constant
    gain: Constant
    least_gemm_s: Constant


@dataclass(frozen=True, slots=True, eq=False)
class Hardware:
    """A kind of device, its links and how many of them stand together.

    Attributes:
        where: the catalog file.
        constants: all of them by name.
    """

    name: str
    title: str
    where: str
    num_multiprocessors: Constant
    peaks: Mapping[str, Constant]
    memory: Memory
    gemms: Mapping[str, GemmConstants]
    attention: AttentionConstants
    derate: Derate
    links: Links
    topology: Topology
    overlap: Overlap
    constants: Mapping[str, Constant]

    def peak(self, dtype: str) -> Constant:
        """The data sheet's dense FLOP/s in a number format.

        Raises:
            ConfigError: the catalog has none.
        """
        if (peak := self.peaks.get(_FORMATS.get(dtype, dtype))) is None:
            raise self._lack("peak", dtype, self.peaks)
        return peak

    def gemm(self, dtype: str) -> GemmConstants:
        """The law of GEMMs in a number format.

        Raises:
            ConfigError: the catalog has none.
        """
        if (gemm := self.gemms.get(_FORMATS.get(dtype, dtype))) is None:
            raise self._lack("gemm", dtype, self.gemms)
        return gemm

    @property
    def multiplies_blocks(self) -> bool:
        """Whether it has instructions for numbers whose scales are of blocks: those came with that for float4."""
        return "float4" in self.peaks

    def has_gemm(self, dtype: str) -> bool:
        """Whether the catalog says how long GEMMs of a number format take."""
        return _FORMATS.get(dtype, dtype) in self.gemms

    def _lack(self, section: str, dtype: str, known: Iterable[str]) -> ConfigError:
        return ConfigError(f"{self.where}: there is no {section}.{dtype}", hint=f"there is {', '.join(sorted(known))}")


_FORMATS = {"float16": "bfloat16"}
"""Formats of the same rate."""
