"""Kernels that wait for memory: norms, residuals, activations, quantise passes, the optimizer, the loss."""

from functools import cache
from math import hypot

from plait.planner.hardware import Hardware
from plait.planner.laws.estimate import Estimate

OPTIMIZER_BYTES = 30
"""AdamW reads a gradient, reads and writes master weight and both moments in float32, and writes the weight back."""

LOSS_BYTES = 10
"""Cross entropy per logit: read for the maximum and the sum, read and written for its gradient."""


def estimate_memory_bound(hardware: Hardware, num_bytes: float, *, kernels: int = 1) -> Estimate:
    """How long `kernels` kernels take that together read and write so many bytes."""
    memory = hardware.memory
    launch_s = kernels * memory.launch_s.value
    moving_s = num_bytes / (memory.bytes_per_s.value * memory.efficiency.value)
    return Estimate(launch_s + moving_s, *_describe(hardware), limit="latency" if launch_s > moving_s else "memory")


@cache
def _describe(hardware: Hardware) -> tuple[float, tuple[str, ...]]:
    memory = hardware.memory
    uncertainty = hypot(memory.efficiency.uncertainty, memory.bytes_per_s.uncertainty)
    return uncertainty, (memory.bytes_per_s.name, memory.efficiency.name, memory.launch_s.name)


def estimate_optimizer(hardware: Hardware, num_params: float) -> Estimate:
    """A step of AdamW over the parameters that a rank keeps the state of."""
    return estimate_memory_bound(hardware, OPTIMIZER_BYTES * num_params)


def estimate_loss(hardware: Hardware, num_logits: float) -> Estimate:
    """Cross entropy, forward and backward, over the logits of a rank."""
    return estimate_memory_bound(hardware, LOSS_BYTES * num_logits, kernels=3)


def estimate_quantize(
    hardware: Hardware, num_elements: float, *, delayed: bool = False, transposed: bool = False
) -> Estimate:
    """A tensor in two bytes an element, cast to one.

    The largest value is found in a pass before, unless scaling is `delayed`; a copy is written the other way round for
    the GEMM that contracts the other dim where `transposed`.
    """
    num_bytes = num_elements * ((0 if delayed else 2) + 2 + 1 + (1 if transposed else 0))
    return estimate_memory_bound(hardware, num_bytes, kernels=1 if delayed else 2)
